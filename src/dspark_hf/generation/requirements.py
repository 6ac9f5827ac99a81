"""What a call must satisfy for its answer to be exact; everything else is refused with what to do instead."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import logging

from ..modeling_dspark import DSparkDrafter
from ..scheduling import ConfidenceThreshold, FixedLength, VerifyScheduler

logger = logging.get_logger(__name__)

# Other decoding methods of `generate`, each by the setting that asks for it.
_OTHER_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "prompt_lookup_num_tokens": "prompt lookup",
    "assistant_early_exit": "early-exit self-speculation",
    "assistant_ensemble_weight": "ensemble verification, which changes the output's law",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
}


def check_call(model: PreTrainedModel, input_ids: torch.LongTensor, generation_config: GenerationConfig) -> None:
    """
    Refuses calls that this loop has no exact answer for.

    Raises:
        ValueError: beams, other decoding methods, prompt-tuned targets, attention weights of several rows.
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
    _refuse_virtual_tokens(model)


def draft_settings(
    drafter: DSparkDrafter, num_drafts: int | None, threshold: float | None, scheduler: VerifyScheduler | None
) -> tuple[int, VerifyScheduler]:
    """
    Drafts a round and who decides how many are verified: the call's settings, else those of `drafter.generation_config`.

    Raises:
        ValueError: for more drafts than a block gives, a threshold that is no probability, or two ways to decide.
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
    if threshold and scheduler is not None:
        raise ValueError(
            "Pass either assistant_confidence_threshold= or verify_scheduler=: both decide the verify length."
        )
    if threshold is None and scheduler is None:
        threshold, scheduler = settings.assistant_confidence_threshold, getattr(settings, "verify_scheduler", None)
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


def _refuse_virtual_tokens(model: PreTrainedModel) -> None:
    """PEFT's prompt tuning feeds embeddings that no token id stands for, so positions and cache lengths do not add up."""
    peft_model = getattr(model.prepare_inputs_for_generation, "__self__", model)
    peft_config = getattr(peft_model, "active_peft_config", None) if peft_model is not model else None
    if peft_config is not None and peft_config.is_prompt_learning and peft_config.peft_type.value != "PREFIX_TUNING":
        raise ValueError(
            f"A target with virtual tokens ({peft_config.peft_type.value}) does not work with a DSpark drafter. LoRA and prefix "
            "tuning do."
        )
