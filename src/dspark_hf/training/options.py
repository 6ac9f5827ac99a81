"""Everything `dspark-hf train` can be told: on the command line, or in a YAML or JSON file whose values options override."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import HfArgumentParser

from ..configuration_drafter import DrafterConfig
from ..registry import config_classes, presets
from .arguments import DSparkTrainingArguments

# Fields of the configuration that describe a file, not a drafter to be made.
_NOT_OPTIONS = ("tie_word_embeddings", "has_embed_tokens", "has_lm_head", "confidence_temperatures", "use_cache")
# What `TrainingArguments` would do by default is less than one run of training should leave behind.
_DEFAULTS = {"save_total_limit": 2, "metric_for_best_model": "eval_acceptance_length", "greater_is_better": True}


@dataclass
class TrainOptions:
    """What to train on what; the rest is in [`DSparkTrainingArguments`] and in the drafter's configuration."""

    target: str = field(metadata={"help": "The target: a folder or a model of the Hub. It is frozen."})
    data: list[str] = field(
        metadata={
            "help": "What to learn from: JSONL files of the target's responses (`dspark-hf regenerate`), data sets of the "
            "Hub with a `messages` column, or folders of cached features (`dspark-hf cache-features`)."
        }
    )
    config: str | None = field(
        default=None,
        metadata={"help": "A YAML or JSON file with any of these options by name; options given here override it."},
    )
    drafter: str | None = field(
        default=None,
        metadata={
            "help": "Start from this drafter instead of a new one. Options of its configuration that differ are applied: "
            "weights of the same name and shape are kept, others are new (a DFlash drafter gets heads that way)."
        },
    )
    kind: str = field(default="dspark", metadata={"help": "What a new drafter is.", "choices": list(presets())})
    eval_data: list[str] | None = field(
        default=None, metadata={"help": "Held-out rows, as --data; by default a part of --data is held out."}
    )
    held_out: float = field(
        default=0.01,
        metadata={
            "help": "Share of the conversations in --data that is never trained on. It is chosen by the prompt's tokens, "
            "so the same conversations are held out in every file and run. 0 holds nothing out."
        },
    )
    split: str = field(default="train", metadata={"help": "Split of data sets of the Hub."})
    mask_token: str | None = field(
        default=None,
        metadata={"help": "The token at masked slots by name, one that no text holds; instead of --mask_token_id."},
    )
    enable_thinking: bool | None = field(
        default=None, metadata={"help": "The chat template's thinking switch, as the responses were made with."}
    )
    target_dtype: str = field(default="auto", metadata={"help": "Number type of the target."})
    target_device: str | None = field(
        default=None,
        metadata={"help": "Where the target is, such as cuda:1, or `auto` to spread it; the drafter's own by default."},
    )
    attn_implementation: str | None = field(
        default=None,
        metadata={
            "help": "The drafter's attention: flex_attention (default on CUDA), sdpa (default elsewhere) or eager."
        },
    )
    lora_rank: int | None = field(
        default=None, metadata={"help": "Train LoRA adapters of this rank (and the heads) instead of all weights."}
    )
    lora_alpha: float | None = field(default=None, metadata={"help": "LoRA's alpha; twice the rank by default."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before LoRA's matrices."})
    lora_target_modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"],
        metadata={"help": "Linear layers of the drafter that get an adapter."},
    )
    lora_heads: bool = field(
        default=True,
        metadata={"help": "Train whole copies of the sequential and the confidence head with the adapter."},
    )
    resume: bool = field(
        default=True, metadata={"help": "Go on from the last checkpoint in --output_dir where there is one."}
    )


def drafter_fields() -> list[tuple[str, Any, Any]]:
    """Every field of a drafter's configuration as an optional field of a dataclass, helped by the class's own documentation."""
    configurations = list(config_classes().values())
    helps: dict[str, str] = {}
    fields_of_kinds: dict[str, Any] = {}
    for configuration in reversed(configurations):  # The first kind's words count where kinds share a field.
        fields_of_kinds |= configuration.own_fields()
        for part in reversed(configuration.__mro__):
            if issubclass(part, DrafterConfig):
                helps |= _argument_helps(part.__doc__ or "")
    made = []
    for name, kind in fields_of_kinds.items():
        if name not in _NOT_OPTIONS:
            text = helps.get(name, "As in the target's own layers.").replace("%", "%%")
            made.append((name, _option_type(kind), field(default=None, metadata={"help": text})))
    return made


def _argument_helps(doc: str) -> dict[str, str]:
    """`{name: description}` of a docstring's `Args:`."""
    arguments = re.split(r"\n    Args:\n|\n    The remaining|\n    Raises:", doc)[1]
    found = {}
    for names, text in re.findall(r"^        ([\w, ]+?) \(.*?\):(.*?)(?=^        \w|\Z)", arguments, re.M | re.S):
        found.update(dict.fromkeys(names.split(", "), " ".join(text.split())))
    return found


def _option_type(kind: Any) -> Any:
    """A type that an option can have: one of several becomes the most general of them, a dictionary is JSON."""
    parts = {part for part in getattr(kind, "__args__", (kind,)) if part is not type(None)}
    lists = {part for part in {kind, *parts} if getattr(part, "__origin__", None) is list}
    if lists:
        return lists.pop() | None
    if dict in parts:
        return json.loads
    return next(iter(parts)) | None


DrafterOptions = make_dataclass("DrafterOptions", drafter_fields())
DrafterOptions.__doc__ = "Fields of a new drafter's configuration; those not given follow from the target."


def train_parser() -> argparse.ArgumentParser:
    """The parser of `dspark-hf train`."""
    parser = HfArgumentParser(
        (TrainOptions, DrafterOptions, DSparkTrainingArguments),
        prog="dspark-hf train",
        usage="dspark-hf train --target TARGET --data DATA [DATA ...] --output_dir FOLDER [options]",  # Not all 170.
        description="Train a drafter on the target's own responses, or fine-tune one. Stopped, the same command goes on.",
        formatter_class=argparse.HelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(**_DEFAULTS)
    return parser


class TrainCommand(NamedTuple):
    """
    What a run was told.

    Args:
        options: What to train on what.
        drafter: Fields of the drafter's configuration that were given.
        arguments: The trainer's.
        given: Every option that was given and is not the default, by name.
    """

    options: TrainOptions
    drafter: dict[str, Any]
    arguments: DSparkTrainingArguments
    given: dict[str, Any]


def parse_train_options(arguments: list[str]) -> TrainCommand:
    """
    The options of a run.

    Args:
        arguments: Of the command line.

    Raises:
        ValueError: for a file with options that do not exist. Wrong usage of the command line ends the program.
    """
    parser = train_parser()
    file = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    file.add_argument("--config")
    if path := file.parse_known_args(arguments)[0].config:
        _set_from_file(parser, path)
    parser.set_defaults(eval_strategy=None)  # Not the same as "no".
    found = vars(parser.parse_args(arguments))
    defaults = train_parser()
    given = {name: value for name, value in found.items() if value not in (None, defaults.get_default(name))}
    _evaluate_when_saving(found)
    options, drafter, training = (
        {f.name: found[f.name] for f in fields(kind) if f.init}
        for kind in (TrainOptions, DrafterOptions, DSparkTrainingArguments)
    )
    drafter = {name: value for name, value in drafter.items() if value is not None}
    return TrainCommand(TrainOptions(**options), drafter, DSparkTrainingArguments(**training), given)


def _set_from_file(parser: argparse.ArgumentParser, path: str) -> None:
    values = _read_file(path)
    actions = {action.dest: action for action in parser._actions}
    if unknown := sorted(set(values) - actions.keys()):
        raise ValueError(
            f"'{path}' sets {', '.join(unknown)}, which are no options; `dspark-hf train --help` lists them."
        )
    for name, value in values.items():
        action = actions[name]
        action.required = False
        parser.set_defaults(**{name: _checked(action, value, path)})


def _read_file(path: str) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # transformers brings it along

    text = Path(path).read_text(encoding="utf-8")
    try:
        values = json.loads(text) if path.endswith(".json") else yaml.safe_load(text) or {}
    except (json.JSONDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"'{path}' cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"'{path}' holds a {type(values).__name__}; give options as `name: value`.")
    return values


def _checked(action: argparse.Action, value: Any, path: str) -> Any:
    """
    A value of a file as the command line would have it: one of the option's choices, and a list where it takes several.
    (YAML reads 6e-4 as text; the option's own type makes a number of it.)
    """
    if action.nargs in ("+", "*") and value is not None:
        return [_of_type(action, part, path) for part in (value if isinstance(value, list) else [value])]
    value = _of_type(action, value, path)
    if action.choices is not None and value is not None and value not in action.choices:
        raise ValueError(
            f"'{path}' sets {action.dest} to {value!r}, but it is one of {', '.join(map(str, action.choices))}."
        )
    return value


def _of_type(action: argparse.Action, value: Any, path: str) -> Any:
    if not isinstance(value, str) or not callable(action.type):
        return value
    try:
        return action.type(value)
    except (ValueError, TypeError, argparse.ArgumentTypeError) as error:
        raise ValueError(f"'{path}' sets {action.dest} to {value!r}: {error}") from error


def _evaluate_when_saving(found: dict[str, Any]) -> None:
    """Held-out rows are looked at whenever a checkpoint is written, so that the best one can be kept."""
    if found["eval_strategy"] is not None:
        return
    found["eval_strategy"] = "no"
    if found["held_out"] or found["eval_data"]:
        found["eval_strategy"], found["eval_steps"] = found["save_strategy"], found["save_steps"]
        found["load_best_model_at_end"] = found["save_strategy"] not in ("no", "best")
