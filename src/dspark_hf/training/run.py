"""A complete training run, as by `dspark-hf train`: loads target, drafter and data, trains, and writes the results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerCallback,
    TrainerState,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import CONFIG_NAME, logging

from ..checkpoints import read_checkpoint
from ..configuration_drafter import DrafterConfig
from ..conversations.rows import end_token_ids
from ..conversations.templates import thinking_switch
from ..drafter import Drafter
from ..loading import check_device, check_is_target, load_target
from ..registry import drafter_class, presets
from ..storage.atomic import whole_file
from ..transformers_names import GenerativeModel
from .adaptation import add_lora, warm_start
from .checkpoints import last_checkpoint
from .data import TrainingData, cache_index, check_source, is_cache, joined, load_source
from .draft_vocab import select_draft_vocabulary, set_draft_vocabulary
from .history import CsvLog, training_figure
from .options import TrainCommand, TrainOptions
from .target_logits import logit_rule
from .trainer import DSparkTrainer

logger = logging.get_logger(__name__)

FIGURE = "training_curve.png"


@dataclass
class TrainingRun:
    """
    The result of a run.

    Args:
        trainer: The trainer, with the best drafter and the history.
        data: The sources of rows, each with the indices of training rows and of held-out rows.
        metrics: Metrics of the last evaluation by name; empty if nothing was held out.
    """

    trainer: DSparkTrainer
    data: list[tuple[TrainingData, list[int], list[int]]]
    metrics: dict[str, float]


def train(
    command: TrainCommand,
    loaded: tuple[GenerativeModel, PreTrainedTokenizerBase] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
) -> TrainingRun:
    """
    Trains a drafter, or resumes an interrupted run, and saves it in `output_dir`.

    Args:
        command: From [`~dspark_hf.training.options.train_command`].
        loaded: The target and its tokenizer, if they are loaded already.
        callbacks: Further callbacks of the trainer.

    Raises:
        ValueError: when target, drafter, data and options do not fit one another.
    """
    options, arguments = command.options, command.arguments
    set_seed(arguments.seed)
    check_before_loading(command)
    target, tokenizer = loaded or load_frozen_target(options)
    start, has_new_vocabulary = starting_drafter(command, target, tokenizer)
    data = load_data(command, start.config, target, tokenizer)
    checkpoint = checkpoint_of(command)
    if checkpoint is not None:
        check_same_drafter(start.config, checkpoint)
    if has_new_vocabulary:
        set_draft_vocabulary(start, used_tokens(start.config, data, end_token_ids(target, tokenizer)))
    model = start
    if options.lora_rank is not None:
        model = add_lora(
            start,
            options.lora_rank,
            options.lora_target_modules,
            options.lora_alpha,
            options.lora_dropout,
            options.lora_heads,
        )
    held_out = joined([source for source, _, _ in data], [held for _, _, held in data])
    if held_out is None:
        warn_of_no_evaluation(options, data)
        arguments.eval_strategy, arguments.load_best_model_at_end = "no", False
    trainer = DSparkTrainer(
        model,
        target,
        arguments,
        train_dataset=joined([source for source, _, _ in data], [trained for _, trained, _ in data]),
        eval_dataset=held_out,
        processing_class=tokenizer,
        callbacks=[CsvLog(), *callbacks],
    )
    if not take_finished(trainer, checkpoint):
        trainer.train(resume_from_checkpoint=checkpoint)
    metrics = trainer.evaluate() if held_out is not None else {}
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        save_training_curve(trainer.state.log_history, Path(arguments.folder) / FIGURE)
    return TrainingRun(trainer, data, metrics)


def check_before_loading(command: TrainCommand) -> None:
    """
    Checks what can be checked without loading weights, so that mistakes are reported immediately.

    Raises:
        ValueError, OSError: when the target is not one, the drafter is not one, a source of data does not exist, or the
            output folder holds a run of another drafter.
    """
    options = command.options
    check_is_target(options.target)
    if options.drafter is not None:
        read_checkpoint(options.drafter, None, {})
    for source in [*options.data, *(options.eval_data or [])]:
        check_source(source, options.split)
    if (checkpoint := checkpoint_of(command)) is not None:
        refuse_differences(command.drafter, drafter_config_of(checkpoint), checkpoint)


def checkpoint_of(command: TrainCommand) -> str | None:
    """The checkpoint from which to resume; `None` to start from the beginning."""
    arguments = command.arguments
    if arguments.resume_from_checkpoint:
        return arguments.resume_from_checkpoint
    return last_checkpoint(arguments.folder) if command.options.resume else None


def load_frozen_target(options: TrainOptions) -> tuple[GenerativeModel, PreTrainedTokenizerBase]:
    """The target, in the dtype and on the device of the options, and its tokenizer."""
    device = options.target_device
    placed: dict[str, Any] = {}
    if device is not None:
        if device != "auto":
            check_device(device)
        placed["device_map"] = device if device == "auto" else {"": device}
    return load_target(options.target, options.target_dtype, **placed)


def starting_drafter(
    command: TrainCommand, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, bool]:
    """
    The drafter as it is before the first step, one that exists or a new one made for the target, and whether its draft
    vocabulary is still to be chosen.
    """
    options, fields = command.options, dict(command.drafter)
    if options.mask_token is not None:
        fields["mask_token_id"] = token_id(tokenizer, options.mask_token)
    if isinstance(ends := fields.get("eos_token_id"), list) and len(ends) == 1:
        fields["eos_token_id"] = ends[0]
    if options.drafter is not None:
        given = Drafter.from_pretrained(options.drafter, dtype=torch.float32)
        drafter, old_size = warm_start(given, **fields), given.config.draft_vocab_size
    else:
        drafter, old_size = new_drafter(options, fields, target, tokenizer), None
    if options.attn_implementation is not None:
        drafter.set_attn_implementation(options.attn_implementation)
    elif command.arguments.device.type == "cuda" and drafter.training_attention is not None:
        drafter.set_attn_implementation(drafter.training_attention)
    return drafter, drafter.config.draft_vocab_size not in (None, old_size)


def new_drafter(
    options: TrainOptions, fields: dict[str, Any], target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Any:
    """A drafter with random weights. It taps the layers of the feature caches, if there are any."""
    cached = [cache_index(source) for source in options.data if is_cache(source)]
    if cached:
        fields.setdefault("target_layer_ids", cached[0]["target_layer_ids"])
    config_class, preset = presets()[options.kind]
    if foreign := sorted(fields.keys() - config_class.own_fields().keys()):
        having = [name for name, (other, _) in presets().items() if other.own_fields().keys() >= set(foreign)]
        raise ValueError(f"{', '.join(foreign)}: only drafters of --kind {' or '.join(having)} have this.")
    if (scale := logit_rule(target).scale) != 1.0:
        fields.setdefault("logit_scale", scale)
    fields.setdefault("target_name_or_path", options.target)
    config = config_class.for_target(target.config, tokenizer=tokenizer, **(preset | fields))
    return drafter_class(config)(config)


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """
    The id of a token.

    Raises:
        ValueError: when the tokenizer has no such token.
    """
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        raise ValueError(
            f"The tokenizer has no token {token!r}; its special tokens are {', '.join(tokenizer.all_special_tokens)}."
        )
    return vocabulary[token]


def load_data(
    command: TrainCommand, config: DrafterConfig, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[TrainingData, list[int], list[int]]]:
    """All sources, each with the indices of training rows and of held-out rows."""
    options = command.options
    template = command.arguments.template_options
    encoding = {
        "target": target,
        "tokenizer": tokenizer,
        "max_length": command.arguments.max_length,
        "split": options.split,
        "template_options": template | thinking_switch(options.thinking),
    }
    share = 0.0 if options.eval_data else options.held_out
    sources = [load_source(name, config, **encoding) for name in options.data]
    data = [(source, *source.split(share)) for source in sources]
    held_out = [load_source(name, config, **encoding) for name in options.eval_data or []]
    data += [(source, [], list(range(len(source.rows)))) for source in held_out]
    if not any(trained for _, trained, _ in data):
        raise ValueError("All rows of --data are held out: lower --held-out, or give more data.")
    return data


def used_tokens(config: DrafterConfig, data: Any, end_ids: list[int]) -> torch.Tensor:
    """The draft vocabulary: the most frequent tokens in the responses of the training rows."""
    rows = (source.tokens(index) for source, trained, _ in data for index in trained)
    assert config.draft_vocab_size is not None, "only called with a draft vocabulary"
    return select_draft_vocabulary(rows, config.vocab_size, config.draft_vocab_size, end_ids)


def check_same_drafter(config: DrafterConfig, checkpoint: str) -> None:
    """
    Raises:
        ValueError: when a checkpoint holds another drafter than the one that was asked for.
    """
    here = json.loads(config.to_json_string(use_diff=False))
    own = {"model_type"} | config.own_fields().keys()
    own -= {"bos_token_id", "eos_token_id", "pad_token_id"}  # The Trainer sets these from the tokenizer.
    if there := drafter_config_of(checkpoint):
        refuse_differences(
            {name: here[name] for name in sorted(own & here.keys())},
            {name: there.get(name) for name in own},
            checkpoint,
        )


def drafter_config_of(checkpoint: str) -> dict[str, Any]:
    """The configuration in a checkpoint; empty for a checkpoint with an adapter."""
    file = Path(checkpoint) / CONFIG_NAME
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def refuse_differences(here: dict[str, Any], there: dict[str, Any], checkpoint: str) -> None:
    """
    Raises:
        ValueError: when fields of two configurations differ; the message lists them.
    """
    different = [
        f"{name} ({there[name]} there, {value} here)"
        for name, value in here.items()
        if name in there and there[name] != value
    ]
    if different:
        raise ValueError(
            f"'{checkpoint}' holds another drafter: {', '.join(different)}. Use the options that it was started with, another "
            "--output folder, or --no-resume to start over."
        )


def warn_of_no_evaluation(options: TrainOptions, data: list[tuple[TrainingData, list[int], list[int]]]) -> None:
    """Warns if a share was to be held out, but there are too few conversations."""
    if options.held_out:
        rows = sum(len(source.rows) for source, _, _ in data)
        logger.warning(
            f"None of {rows} conversations is held out (--held-out {options.held_out}), so there is no evaluation and no best "
            "checkpoint. Hold out more, or give --eval-data."
        )


def take_finished(trainer: DSparkTrainer, checkpoint: str | None) -> bool:
    """
    Whether a checkpoint is from the end of its run; if so, loads it into the trainer. (The Trainer itself would make one step
    more.)
    """
    if checkpoint is None or not (file := Path(checkpoint) / TRAINER_STATE_NAME).exists():
        return False
    state, arguments = TrainerState.load_from_json(str(file)), trainer.args
    if arguments.max_steps > 0:
        finished = state.global_step >= arguments.max_steps
    else:
        finished = (state.epoch or 0.0) >= arguments.num_train_epochs
    if finished:
        trainer.state = state
        best = state.best_model_checkpoint if arguments.load_best_model_at_end else None
        trainer.load_checkpoint(best or checkpoint)
    return finished


def save_training_curve(history: list[dict[str, float]], path: Path) -> None:
    try:
        with whole_file(path) as part:
            training_figure(history).savefig(part, dpi=120, format="png")
    except ImportError as error:
        logger.warning(f"{error} There is no picture of the training curve.")
