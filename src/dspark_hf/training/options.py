"""Sorts the settings of `dspark-hf train` into options, fields of the drafter's configuration and training arguments."""

from __future__ import annotations

import difflib
import types
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from ..registry import config_classes, presets
from .arguments import DSparkTrainingArguments

# Fields of a configuration that describe a checkpoint and cannot be chosen for a new drafter.
_NOT_SETTINGS = ("tie_word_embeddings", "has_embed_tokens", "has_lm_head", "confidence_temperatures", "use_cache")
# Defaults of `dspark-hf train` that differ from those of `TrainingArguments`.
RUN_DEFAULTS = {"save_total_limit": 2, "metric_for_best_model": "eval_acceptance_length", "greater_is_better": True}
LORA_TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc")


@dataclass
class TrainOptions:
    """
    What to train and on which data. The other settings are in [`DSparkTrainingArguments`] and in the drafter's configuration.

    Args:
        target: The target, a folder or a model on the Hub. It is not trained.
        data: Training data: JSONL files of the target's responses, data sets on the Hub with a `messages` column, or folders
            of cached features.
        eval_data: Conversations for evaluation; a part of `data` by default.
        held_out: Share of the conversations in `data` that is used for evaluation instead, chosen by the prompt's tokens.
        split: Split of data sets on the Hub.
        thinking: The chat template's `enable_thinking` switch with which the responses were made.
        drafter: Start from this drafter instead of a new one. If its configuration is changed, weights of the same name and
            shape are kept.
        kind: Kind of a new drafter, one of [`~dspark_hf.registry.presets`] such as `"dspark"`.
        mask_token: Token at masked slots, by its text.
        target_dtype: Dtype of the target, `"auto"` for that of its files.
        target_device: Device of the target, `"auto"` to spread it over all; by default the drafter's device.
        attn_implementation: The drafter's attention; `"flex_attention"` on CUDA and `"sdpa"` elsewhere by default.
        lora_rank: Train LoRA adapters of this rank and the heads instead of all weights.
        lora_alpha: LoRA's scale; twice the rank by default.
        lora_dropout: Dropout before the adapters.
        lora_target_modules: Linear layers that get an adapter.
        lora_heads: Also train the sequential and the confidence head in full.
        resume: Continue from the last checkpoint in the output folder, if there is one.
    """

    target: str
    data: list[str]
    eval_data: list[str] | None = None
    held_out: float = 0.01
    split: str = "train"
    thinking: bool | None = None
    drafter: str | None = None
    kind: str = "dspark"
    mask_token: str | None = None
    target_dtype: str = "auto"
    target_device: str | None = None
    attn_implementation: str | None = None
    lora_rank: int | None = None
    lora_alpha: float | None = None
    lora_dropout: float = 0.0
    lora_target_modules: list[str] = field(default_factory=lambda: list(LORA_TARGET_MODULES))
    lora_heads: bool = True
    resume: bool = True

    def __post_init__(self) -> None:
        if self.kind not in presets():
            raise ValueError(f"kind is {self.kind!r}, but it has to be one of {', '.join(presets())}.")


class TrainCommand(NamedTuple):
    """
    The settings of a run.

    Args:
        options: What to train and on which data.
        drafter: The given fields of the drafter's configuration.
        arguments: The training arguments.
        given: All given settings by name.
    """

    options: TrainOptions
    drafter: dict[str, Any]
    arguments: DSparkTrainingArguments
    given: dict[str, Any]


def train_command(settings: dict[str, Any]) -> TrainCommand:
    """
    Sorts settings by their names.

    Args:
        settings: Fields of [`TrainOptions`], of the drafter's configuration and of [`DSparkTrainingArguments`]. Others have
            their defaults.

    Raises:
        ValueError: for a name that is none of these, or a value of the wrong type.
    """
    kinds: tuple[dict[str, Any], ...] = (_types_of(TrainOptions), drafter_fields(), _types_of(DSparkTrainingArguments))
    if unknown := [name for name in settings if not any(name in types_ for types_ in kinds)]:
        raise ValueError(_unknown_text(unknown, [name for types_ in kinds for name in types_]))
    options, drafter, training = (
        {name: converted(name, settings[name], types_[name]) for name in settings if name in types_} for types_ in kinds
    )
    drafter = {name: value for name, value in drafter.items() if value is not None}
    training = {**RUN_DEFAULTS, **training}
    chosen = TrainOptions(**options)
    _evaluate_when_saving(training, is_evaluated=bool(chosen.held_out or chosen.eval_data))
    return TrainCommand(chosen, drafter, DSparkTrainingArguments(**training), settings)


def drafter_fields() -> dict[str, Any]:
    """The fields of all kinds of drafter configurations that can be set, with their types."""
    found: dict[str, Any] = {}
    for configuration in config_classes().values():
        for name, kind in configuration.own_fields().items():  # A field may be optional in one kind only.
            found[name] = found[name] | kind if name in found else kind
    return {name: kind for name, kind in found.items() if name not in _NOT_SETTINGS}


def _types_of(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in fields(kind) if f.init}


def _unknown_text(unknown: list[str], known: list[str]) -> str:
    said = []
    for name in unknown:
        close = difflib.get_close_matches(name, known, n=1)
        said.append(f"{name} (did you mean {close[0]}?)" if close else name)
    return f"There is no setting {', '.join(said)}; `dspark-hf train --help` lists the most important ones."


def converted(name: str, value: Any, kind: Any) -> Any:
    """
    Converts a value from a file or a command line to the type of a field. For instance, YAML reads 6e-4 as text, and 1 as `int`.

    Raises:
        ValueError: when the value cannot be of this type.
    """
    options = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    plain = [get_origin(option) or option for option in options]
    if value is None and type(None) in plain:
        return None
    if Any in plain or type(value) in plain:
        lists = [option for option in options if get_origin(option) is list]
        if isinstance(value, list) and lists:
            return [converted(name, item, get_args(lists[0])[0]) for item in value]
        return value
    for wanted in (int, float):
        if wanted in plain and isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                return wanted(value)
            except ValueError:
                continue
    if isinstance(value, str) and any(isinstance(option, type) and issubclass(option, Enum) for option in plain):
        return value
    if list in plain and not isinstance(value, list | dict):
        return converted(name, [value], kind)
    names = [option.__name__ for option in plain if option is not type(None)] + ["none"] * (type(None) in plain)
    raise ValueError(f"{name} is {value!r}, but it has to be of type {' or '.join(names)}.")


def _evaluate_when_saving(training: dict[str, Any], is_evaluated: bool) -> None:
    """By default, evaluates whenever a checkpoint is written, so that the best one can be kept."""
    if training.get("eval_strategy") is not None:
        return
    training["eval_strategy"] = "no"
    if is_evaluated:
        defaults = {f.name: f.default for f in fields(DSparkTrainingArguments)}
        strategy = training.get("save_strategy", defaults["save_strategy"])
        training["eval_strategy"] = strategy
        training["eval_steps"] = training.get("save_steps", defaults["save_steps"])
        training["load_best_model_at_end"] = strategy not in ("no", "best")
