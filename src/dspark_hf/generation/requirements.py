"""Refuses calls for which the output would not be exact, with an error that says what to do instead."""

from __future__ import annotations

from os import PathLike
from typing import Any, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..drafter import Drafter
from ..ragged.supported import length_limits
from ..rope_limit import RopeLimit
from ..target_config import optional_field
from ..transformers_names import peft_arguments, uncompiled, without_peft

logger = logging.get_logger(__name__)

# Other decoding methods of `generate`, by the setting that selects them.
OTHER_METHODS = {
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
    The drafter, unwrapped from PEFT if necessary; `None` when `model` is not a drafter.

    Raises:
        ValueError: for the result of `torch.compile(drafter)`, because `generate` calls other methods than `forward`, which
            would not be compiled; for a drafter in `DataParallel` and the like; and for things that are not models: a path or
            name, a class, a configuration.
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
    if isinstance(model, Drafter):
        return model
    if isinstance(inner := getattr(model, "module", None), torch.nn.Module) and unwrap_drafter(inner) is not None:
        raise ValueError(
            f"{type(model).__name__} wraps the drafter away from generate: pass the drafter inside, which is its `.module`."
        )
    base = without_peft(model)
    return base if isinstance(base, Drafter) else None


class CannotDraft(ValueError):
    """
    A call that a drafter cannot serve, and that plain `generate` can. Raised before anything reaches the caller.

    Args:
        reason: Why, in a sentence.
        remedy: What to do, in a sentence. A call with an attached drafter does so by itself, and mentions the reason alone.
    """

    def __init__(self, reason: str, remedy: str = ""):
        super().__init__(f"{reason} {remedy}".strip())
        self.reason = reason


def refuse(reason: str) -> NoReturn:
    """Raises [`CannotDraft`] for a call whose output would not be exact."""
    raise CannotDraft(f"DSpark cannot draft for this call: {reason}.", "Generate without assistant_model=.")


def check_call(
    model: PreTrainedModel, input_ids: torch.Tensor, generation_config: GenerationConfig, rope: RopeLimit | None = None
) -> None:
    """
    Refuses calls for which the output would not be exact.

    Args:
        model, input_ids, generation_config: As `generate` prepared them.
        rope: The length at which the target's rotary positions change, if they do.

    Raises:
        CannotDraft: beams, other decoding methods, prompt-tuned targets, activated LoRA, an adapter per row, attention weights of
            several rows, several rows that may grow too long to share a pass.
    """
    if (generation_config.num_beams or 1) > 1:
        raise CannotDraft(
            f"Beam search (num_beams={generation_config.num_beams}) does not work with a DSpark drafter: speculative decoding "
            "follows one continuation.",
            "Use num_beams=1, or leave out assistant_model=.",
        )
    for name, method in OTHER_METHODS.items():
        if optional_field(generation_config, name):
            raise CannotDraft(
                f"{name}= asks for {method}, which does not combine with a DSpark drafter.", "Leave one of them out."
            )
    if len(input_ids) > 1 and generation_config.return_dict_in_generate and generation_config.output_attentions:
        raise CannotDraft(
            f"output_attentions=True is not available for several rows ({len(input_ids)} here): their attention is computed "
            "together. Call generate for each row."
        )
    for name, limit in length_limits(model).items() if len(input_ids) > 1 else ():
        if generation_config.max_length > limit:
            raise CannotDraft(
                f"Several rows ({len(input_ids)} here) may grow to {generation_config.max_length} tokens, but beyond the {name} "
                f"of {type(model).__name__}, {limit} tokens, rows that share a pass influence each other. Lower "
                "max_new_tokens, or call generate for each row."
            )
    if rope is not None and rope.kind == "dynamic" and generation_config.max_length > rope.length:
        logger.warning_once(
            f"{type(model).__name__} changes its rotary positions with every token past {rope.length} (rope_type='dynamic'), so "
            "nothing is drafted from there on: the same output, at the speed of plain generate."
        )
    _refuse_virtual_tokens(model, len(input_ids))
    _refuse_adapters_by_row(model, len(input_ids))


def _refuse_virtual_tokens(model: PreTrainedModel, num_rows: int) -> None:
    """PEFT's prompt tuning adds embeddings without token ids, so positions and cache lengths would not match `input_ids`."""
    peft_model = getattr(model.prepare_inputs_for_generation, "__self__", model)
    peft_config = getattr(peft_model, "active_peft_config", None) if peft_model is not model else None
    if peft_config is not None and peft_config.is_prompt_learning and peft_config.peft_type.value != "PREFIX_TUNING":
        raise CannotDraft(
            f"A target with virtual tokens ({peft_config.peft_type.value}) does not work with a DSpark drafter. LoRA and prefix "
            "tuning do."
        )
    if peft_config is not None and peft_config.is_prompt_learning and num_rows > 1:
        refuse("its cache holds tokens that have no id (prefix tuning), which several rows at once do not allow")


def _refuse_adapters_by_row(model: PreTrainedModel, num_rows: int) -> None:
    """What PEFT's hooks add to the calls of layers fits the rows and tokens of plain `generate`'s passes."""
    given = peft_arguments(model)
    if num_rows > 1 and given.get("adapter_names") is not None:
        raise CannotDraft(
            f"adapter_names= gives each of {num_rows} rows its adapter, but with a DSpark drafter the rows share passes of other "
            "shapes.",
            "Call generate for each row, or leave out assistant_model=.",
        )
    if any(offset is not None for offset in given.get("alora_offsets") or ()):
        refuse(
            "activated LoRA (aLoRA) counts the tokens that its adapter applies to from the end of each pass, and a pass over "
            "drafts has several"
        )
