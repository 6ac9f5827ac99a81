"""What a call must satisfy for its answer to be exact; everything else is refused with what to do instead."""

from __future__ import annotations

from os import PathLike
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..drafter import Drafter
from ..rope_limit import RopeLimit
from ..scheduling import (
    ConfidenceThreshold,
    FixedLength,
    NoBackoff,
    RowsBackoff,
    ThroughputCurve,
    VerifyScheduler,
    build_scheduler,
)
from ..transformers_names import uncompiled

logger = logging.get_logger(__name__)

# Other decoding methods of `generate`, each by the setting that asks for it.
_OTHER_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "early-exit self-speculation",
    "assistant_ensemble_weight": "ensemble verification, which changes the distribution of the output",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}


def unwrap_drafter(model: Any) -> Drafter | None:
    """
    The drafter behind `model`, which may be wrapped by PEFT; `None` when `model` is another model.

    Raises:
        ValueError: for what `torch.compile(drafter)` returns: `generate` calls the methods of the drafter inside, uncompiled.
            For what no model can be: a path or name, a class, a configuration.
    """
    if isinstance(model, str | PathLike):
        raise ValueError(
            f"generate takes a loaded drafter or assistant, not a path or name ({str(model)!r}). Load it first, a drafter with "
            f"DSparkDrafter.from_pretrained({str(model)!r})."
        )
    if isinstance(model, type | PreTrainedConfig):
        given = (
            f"the class {model.__name__}" if isinstance(model, type) else f"a configuration ({type(model).__name__})"
        )
        raise ValueError(
            f"generate takes a loaded drafter or assistant, not {given}. Load one, for instance with "
            "DSparkDrafter.from_pretrained(path)."
        )
    if isinstance(uncompiled(model), Drafter):
        raise ValueError("torch.compile(drafter) wraps the drafter away from generate: call drafter.compile() instead.")
    if not isinstance(model, Drafter) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model if isinstance(model, Drafter) else None


def refuse(reason: str) -> NoReturn:
    """Raises the `ValueError` of a call that has no exact answer here."""
    raise ValueError(f"DSpark cannot draft for this call: {reason}. Generate without assistant_model=.")


def check_call(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, rope: RopeLimit | None = None
) -> None:
    """
    Refuses calls that this loop has no exact answer for.

    Args:
        model, input_ids, generation_config: As `generate` prepared them.
        rope: The length at which the target's rotary positions change, if they do.

    Raises:
        ValueError: beams, other decoding methods, prompt-tuned targets, attention weights of several rows, several rows
            that may outgrow `rope`.
    """
    if (generation_config.num_beams or 1) > 1:
        raise ValueError(
            f"Beam search (num_beams={generation_config.num_beams}) does not work with a DSpark drafter: speculative decoding "
            "follows one continuation. Use num_beams=1, or leave out assistant_model=."
        )
    for name, method in _OTHER_METHODS.items():
        if getattr(generation_config, name, None):
            raise ValueError(
                f"{name}= asks for {method}, which does not combine with a DSpark drafter. Leave one of them out."
            )
    if len(input_ids) > 1 and generation_config.return_dict_in_generate and generation_config.output_attentions:
        raise ValueError(
            f"output_attentions=True is not available for several rows ({len(input_ids)} here): their attention is computed "
            "together. Call generate for each row."
        )
    if rope is not None and len(input_ids) > 1 and generation_config.max_length > rope.length:
        raise ValueError(
            f"Several rows ({len(input_ids)} here) may reach {generation_config.max_length} tokens, but the rotary positions of "
            f"{type(model).__name__} (rope_type={rope.kind!r}) change for all rows once the longest is past {rope.length}. Lower "
            "max_new_tokens, or call generate for each row."
        )
    if rope is not None and rope.kind == "dynamic" and generation_config.max_length > rope.length:
        logger.warning_once(
            f"{type(model).__name__} changes its rotary positions with every token past {rope.length} (rope_type='dynamic'), so "
            "nothing is drafted from there on: the same output, at the speed of plain generate."
        )
    _refuse_virtual_tokens(model)


def draft_settings(
    drafter: Drafter,
    target: PreTrainedModel,
    num_drafts: int | None,
    threshold: float | None,
    scheduler: VerifyScheduler | str | None,
) -> tuple[int, VerifyScheduler]:
    """
    Drafts per round, and what decides how many are verified: the call's settings, else those of `drafter.generation_config`.

    Raises:
        ValueError: for more drafts than a block gives, a threshold that is no probability, two ways to decide, or a
            scheduler by name that there is not or whose curve is missing.
    """
    config, settings = drafter.config, drafter.generation_config
    if num_drafts is None:
        num_drafts = (
            settings.num_assistant_tokens if settings.num_assistant_tokens is not None else config.num_draft_tokens
        )
    if not 0 <= num_drafts <= config.num_draft_tokens:
        raise ValueError(
            f"num_assistant_tokens={num_drafts}, but a block of this drafter gives at most {config.num_draft_tokens} drafts "
            f"(block_size={config.block_size}, sample_from_anchor={config.sample_from_anchor}). Beyond what it was trained for, "
            "every slot's acceptance collapses."
        )
    if threshold and scheduler not in (None, "threshold"):
        raise ValueError(
            "Pass either assistant_confidence_threshold= or verify_scheduler=: both decide the verify length."
        )
    if threshold is None and scheduler is None:
        threshold, scheduler = settings.assistant_confidence_threshold, getattr(settings, "verify_scheduler", None)
    if isinstance(scheduler, str):
        if scheduler == "threshold" and threshold is None:
            threshold = settings.assistant_confidence_threshold
        scheduler = build_scheduler(scheduler, threshold=threshold or 0.0, curve=curve_of(drafter, target))
    if scheduler is not None:
        return num_drafts, scheduler
    if not 0.0 <= (threshold or 0.0) <= 1.0:
        raise ValueError(f"assistant_confidence_threshold={threshold} is not a probability.")
    if threshold and drafter.confidence_head is None:
        logger.warning_once(
            f"assistant_confidence_threshold={threshold} has no effect: this drafter has no confidence head."
        )
        threshold = 0.0
    return num_drafts, ConfidenceThreshold(threshold) if threshold else FixedLength()


def curve_of(drafter: Drafter, target: PreTrainedModel) -> ThroughputCurve | None:
    """The throughput curve that the drafter brings, where it was measured on this target and device."""
    curve = drafter.throughput_curve
    if curve is None:
        return None
    try:
        curve.check(target)
    except ValueError as error:
        logger.warning_once(f"The drafter's throughput curve is not used. {error}")
        return None
    return curve


def backoff_of(
    drafter: Drafter, target: PreTrainedModel, scheduler: VerifyScheduler, num_rows: int, is_on: bool | None
) -> RowsBackoff | NoBackoff:
    """
    What decides when drafting pauses. Costs are those of the scheduler's curve, else of
    the drafter's, else assumed: both models by their size, further tokens by the kind of device.

    Args:
        drafter, target, scheduler: Of the call.
        num_rows: Rows of the call.
        is_on: As given in the call; the drafter's `generation_config` counts by default.
    """
    if is_on is None:
        is_on = getattr(drafter.generation_config, "drafting_backoff", None)
    if is_on is False:
        return NoBackoff()
    costs = getattr(scheduler, "curve", None)
    if not isinstance(costs, ThroughputCurve):
        costs = curve_of(drafter, target)
    if costs is None:
        costs = ThroughputCurve.assumed(_relative_size(drafter, target), target.device.type != "cpu")
    elif not costs.drafting:
        costs = costs.with_assumed_drafting(_relative_size(drafter, target))
    return RowsBackoff(costs, num_rows)


def _relative_size(drafter: Drafter, target: PreTrainedModel) -> float:
    """Weights read to draft a whole round over those read for a pass of the target."""
    # A lookup in an embedding reads next to nothing, but tied weights are read by the LM head.
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    lookups = [] if getattr(embedding, "weight", None) is getattr(head, "weight", None) else [embedding]
    own = _num_weights(drafter) - sum(_num_weights(m) for m in (drafter.embed_tokens, drafter.lm_head) if m is not None)
    own += drafter.config.logits_size * drafter.config.hidden_size
    own *= drafter.passes_per_round
    return own / max(_num_weights(target) - sum(_num_weights(module) for module in lookups), 1)


def _num_weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _refuse_virtual_tokens(model: PreTrainedModel) -> None:
    """PEFT's prompt tuning feeds embeddings that no token id stands for, so positions and cache lengths do not add up."""
    peft_model = getattr(model.prepare_inputs_for_generation, "__self__", model)
    peft_config = getattr(peft_model, "active_peft_config", None) if peft_model is not model else None
    if peft_config is not None and peft_config.is_prompt_learning and peft_config.peft_type.value != "PREFIX_TUNING":
        raise ValueError(
            f"A target with virtual tokens ({peft_config.peft_type.value}) does not work with a DSpark drafter. LoRA and prefix "
            "tuning do."
        )
