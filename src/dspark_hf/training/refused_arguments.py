"""The options of transformers' `TrainingArguments` and `Trainer` that mean nothing to a drafter, and are refused for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any

from transformers import TrainingArguments

_NO_PREDICTIONS = (
    "evaluation sums the metrics of a drafter and keeps no predictions, so there is nothing to {0}: leave it out"
)
_WITH_MUON = "matrix_optimizer='muon' chooses the optimizer: leave {0} out, or use matrix_optimizer='adamw'"

# What each option would do, and what to do instead. An option counts as given when it differs from its default.
REFUSED_ARGUMENTS: dict[str, str] = {
    "label_smoothing_factor": (
        "the loss compares the drafter's distribution with the target's, not with single labels: use the weights ce_weight "
        "and tv_weight instead"
    ),
    "neftune_noise_alpha": (
        "it adds noise to the input embedding, which is the target's and frozen: use weight_decay, or LoRA's dropout, to "
        "regularize a drafter"
    ),
    "use_liger_kernel": "Liger has no kernels for drafters: leave it out",
    "liger_kernel_config": "Liger has no kernels for drafters: leave it out",
    "use_cache": "training computes all blocks of a row in one pass and caches nothing: leave it out",
    "label_names": "the drafter learns from `input_ids` and the target's features, and no column holds labels: leave it out",
    "batch_eval_metrics": _NO_PREDICTIONS.format("compute them from"),
    "include_for_metrics": _NO_PREDICTIONS.format("add to"),
    "eval_do_concat_batches": _NO_PREDICTIONS.format("concatenate"),
    "eval_accumulation_steps": _NO_PREDICTIONS.format("move to the CPU"),
    "eval_use_gather_object": _NO_PREDICTIONS.format("gather"),
}
REFUSED_WITH_MUON: dict[str, str] = {
    name: _WITH_MUON.format(name) for name in ("optim", "optim_args", "optim_target_modules")
}

# Arguments of the trainer's constructor.
REFUSED_KEYWORDS: dict[str, str] = {
    "model_init": "the drafter, its features and its target belong together: pass model=drafter",
    "compute_metrics": (
        "there are no predictions to compute metrics from; evaluation reports acceptance, losses and calibration by itself. "
        "Override `evaluation_loop` to add metrics"
    ),
    "preprocess_logits_for_metrics": "there are no predictions to preprocess: leave it out",
    "compute_loss_func": (
        "the loss needs the target's distribution at every draft, which such a function is not given: weigh its terms with "
        "ce_weight, tv_weight and confidence_weight, or override `compute_loss`"
    ),
}
REFUSED_KEYWORDS_WITH_MUON: dict[str, str] = {
    name: _WITH_MUON.format(name) for name in ("optimizers", "optimizer_cls_and_kwargs")
}


def check_arguments(args: TrainingArguments, uses_muon: bool) -> None:
    """
    Refuses options that would be accepted and then do nothing, or do something wrong.

    Args:
        args: After transformers' own checks.
        uses_muon: Whether Muon trains the matrices.

    Raises:
        ValueError: with every such option, and what to do instead.
    """
    refused = REFUSED_ARGUMENTS | (REFUSED_WITH_MUON if uses_muon else {})
    defaults = {field.name: _default(field) for field in fields(TrainingArguments)}
    given = {name: vars(args)[name] for name in refused if name in defaults}
    problems = {name: refused[name] for name, value in given.items() if value != defaults[name]}
    options = _checkpointing_options(args)
    if options.get("use_reentrant"):
        problems["use_reentrant=True"] = (
            "reentrant checkpointing computes no gradients where only weights need them, as in a drafter whose inputs come "
            "from the frozen target, and most of it would not be trained: use use_reentrant=False"
        )
    for name in ("cp_size", "sp_size", "tp_size"):
        if args.parallelism_config is not None and getattr(args.parallelism_config, name, 1) not in (None, 1):
            problems[f"parallelism_config.{name}"] = (
                "a row's blocks attend to the whole context before them, so neither rows nor the drafter can be cut: use "
                "data parallelism or FSDP"
            )
    _raise(problems)


def check_keywords(given: Mapping[str, Any], uses_muon: bool) -> None:
    """
    The same for what the constructor of `Trainer` takes.

    Raises:
        ValueError: with every argument that a drafter's trainer does not use.
    """
    refused = REFUSED_KEYWORDS | (REFUSED_KEYWORDS_WITH_MUON if uses_muon else {})
    _raise(
        {name: refused[name] for name, value in given.items() if name in refused and value not in (None, (None, None))}
    )


def _checkpointing_options(args: TrainingArguments) -> dict[str, Any]:
    """`activation_checkpointing_kwargs`, which transformers before 5.24 calls `gradient_checkpointing_kwargs`."""
    given = vars(args)
    options: dict[str, Any] | None = given.get(
        "activation_checkpointing_kwargs", given.get("gradient_checkpointing_kwargs")
    )
    return options or {}


def _default(field: Any) -> Any:
    default: Any = field.default
    if default is MISSING:
        factory: Callable[[], Any] = field.default_factory
        return factory()
    return default


def _raise(problems: Mapping[str, str]) -> None:
    if problems:
        raise ValueError(
            "Training a drafter does not work with "
            + "; nor with ".join(f"{name} ({reason})" for name, reason in problems.items())
            + "."
        )
