"""The hook in transformers: `generate(assistant_model=drafter)` becomes `generate(custom_generate=...)`."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList, PreTrainedModel, StopStringCriteria
from transformers.generation import StoppingCriteriaList

from ..drafter import Drafter
from ..target_config import optional_field
from ..transformers_names import GenerativeModel, default_generation_settings
from .attached import Attachment, attachment_of
from .draft_settings import DraftOptions
from .entry import attached_generate, dspark_generate
from .requirements import OTHER_METHODS, CannotDraft, unwrap_drafter

_ORIGINAL = "_dspark_hf_original"

# Looked up in the call, then in its generation configuration, then in the drafter's.
DRAFT_SETTINGS = ("num_assistant_tokens", "assistant_confidence_threshold", "verify_scheduler", "drafting_backoff")
# Those that transformers does not know.
OUR_SETTINGS = ("verify_scheduler", "drafting_backoff")


def register() -> None:
    """Makes `generate` accept a [`Drafter`] as `assistant_model`. `import dspark_hf` calls this; repeating it is harmless."""
    current = GenerationMixin.generate
    if _original(current) is not None:
        return

    @functools.wraps(current)
    def generate(self: GenerativeModel, *args: Any, **kwargs: Any) -> Any:
        drafter = _drafter_in(current, self, args, kwargs)
        if drafter is not None:
            return _generate_with_drafter(current, self, drafter, args, kwargs)
        if (attachment := attachment_of(self)) is not None:
            return _generate_attached(current, self, attachment, args, kwargs)
        return current(self, *args, **kwargs)

    setattr(generate, _ORIGINAL, current)
    GenerationMixin.generate = generate  # type: ignore[method-assign]


def unregister() -> None:
    """Undoes [`register`]: restores transformers' `generate`."""
    if (original := _original(GenerationMixin.generate)) is not None:
        GenerationMixin.generate = original  # type: ignore[method-assign]


def _original(generate: Callable[..., Any]) -> Any:
    """transformers' `generate` inside the one of [`register`]; `None` for any other function."""
    return getattr(generate, _ORIGINAL, None)


def _drafter_in(
    generate: Callable[..., Any], target: GenerativeModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Drafter | None:
    """The drafter among the arguments of a `generate` call, if there is one."""
    if kwargs.get("custom_generate") is dspark_generate and kwargs.get("drafter") is not None:
        return unwrap_drafter(kwargs["drafter"])
    assistant = kwargs.get("assistant_model")
    if assistant is None and len(args) > 6:  # `assistant_model` is the seventh positional parameter after `self`.
        assistant = inspect.signature(generate).bind_partial(target, *args).arguments.get("assistant_model")
    return unwrap_drafter(assistant)


def _generate_with_drafter(
    generate: Callable[..., Any],
    target: GenerativeModel,
    drafter: Drafter,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls transformers' `generate` with our decoding loop."""
    call = _arguments(generate, target, args, kwargs)
    call.pop("assistant_model", None), call.pop("drafter", None)
    if call.pop("custom_generate", None) not in (None, dspark_generate):
        raise ValueError(
            "Pass either assistant_model=<DSpark drafter> or custom_generate=, not both: each is a decoding loop."
        )
    settings = _prepare(target, call)
    streamer = call.get("streamer")

    def decode(
        model: GenerativeModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        return dspark_generate(
            model,
            input_ids,
            logits_processor,
            stopping_criteria,
            generation_config,
            drafter=drafter,
            streamer=streamer,
            **settings,
            **model_kwargs,
        )

    return generate(target, custom_generate=decode, **call)


def _generate_attached(
    generate: Callable[..., Any],
    target: GenerativeModel,
    attachment: Attachment,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls transformers' `generate` with our decoding loop and the attached drafter, or as it is where that is impossible."""
    plain = {name: value for name, value in kwargs.items() if name not in OUR_SETTINGS}
    call = _arguments(generate, target, args, kwargs)
    if (other := _other_method(target, call)) is not None:
        attachment.warn_plain(other)
        return generate(target, *args, **plain)
    try:
        options = DraftOptions(**_prepare(target, call))
    except ValueError as reason:
        attachment.warn_plain(reason)
        return generate(target, *args, **plain)
    streamer = call.get("streamer")

    def decode(
        model: GenerativeModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> Any:
        prepared = (model, input_ids, logits_processor, stopping_criteria, generation_config)
        return attached_generate(attachment, *prepared, streamer, options, model_kwargs)

    return generate(target, custom_generate=decode, **call)


def _arguments(
    generate: Callable[..., Any], target: GenerativeModel, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a `generate` call by name."""
    call = inspect.signature(generate).bind(target, *args, **kwargs).arguments
    call.update(call.pop("kwargs", {}))
    del call["self"]
    return call


def _prepare(target: GenerativeModel, call: dict[str, Any]) -> dict[str, Any]:
    """
    Takes out of a call what transformers would not give to our loop, or would understand in another way.

    Returns:
        The settings of drafting.

    Raises:
        CannotDraft: for calls that would not reach our loop.
    """
    _refuse_synced_ranks(target, call.get("synced_gpus"))
    _refuse_what_leaves_no_loop(target, call)
    # A drafter shares its target's vocabulary, so the target's tokenizer is used for both.
    call.pop("assistant_tokenizer", None)
    _build_stop_strings(target, call)
    return {name: _setting(name, call) for name in DRAFT_SETTINGS}


def _other_method(target: GenerativeModel, call: dict[str, Any]) -> str | None:
    """Why a call decodes in another way than drafting with what is attached; `None` if it does not."""
    for name in ("assistant_model", "custom_generate"):
        if call.get(name) is not None:
            return f"It names {name}= itself."
    if (beams := _in_force("num_beams", target, call) or 1) > 1:
        return f"It searches with beams (num_beams={beams})."
    asked = next((name for name in OTHER_METHODS if _in_force(name, target, call)), None)
    return None if asked is None else f"{asked}= asks for {OTHER_METHODS[asked]}."


def _setting(name: str, call: dict[str, Any]) -> Any:
    """A setting of assisted generation as given in this call; `None` means that the drafter's setting is used."""
    value = call.pop(name, None)
    config: GenerationConfig | None = call.get("generation_config")
    if value is not None or config is None:
        return value
    defaults = default_generation_settings()
    is_filled_in = all(optional_field(config, key) is not None for key in defaults if defaults[key] is not None)
    value = optional_field(config, name)
    # Pipelines of older transformers versions fill in defaults that are meant for other assistants.
    return None if is_filled_in and value == defaults.get(name) else value


def _build_stop_strings(target: PreTrainedModel, call: dict[str, Any]) -> None:
    """
    Turns `stop_strings=` into a stopping criterion, because transformers does not pass the tokenizer to a custom loop.

    Raises:
        ValueError: when stop strings come without a tokenizer.
    """
    stop_strings = _in_force("stop_strings", target, call)
    tokenizer = call.pop("tokenizer", None)
    if stop_strings is None:
        return
    if tokenizer is None:
        raise CannotDraft("stop_strings= needs the tokenizer: pass tokenizer= to generate as well.")
    criteria = list(call.get("stopping_criteria") or ())
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # One passed by the user is kept.
        criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    call["stopping_criteria"] = StoppingCriteriaList(criteria)
    # Cleared wherever they may be set, so that `generate` does not build a second criterion.
    call.pop("stop_strings", None)
    config: GenerationConfig | None = call.get("generation_config")
    if config is not None and config.stop_strings is not None:
        call["generation_config"] = copy.copy(config)
        call["generation_config"].stop_strings = None
    if target.generation_config.stop_strings is not None:
        call["stop_strings"] = None


def _in_force(name: str, target: PreTrainedModel, call: dict[str, Any]) -> Any:
    """A generation setting from the call, its `generation_config` or the target's, in the order that `generate` uses."""
    if name in call:
        return call[name]
    config: GenerationConfig | None = call.get("generation_config")
    value = None if config is None else optional_field(config, name)
    return optional_field(target.generation_config, name) if value is None else value


def _refuse_what_leaves_no_loop(target: PreTrainedModel, call: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: for settings with which `generate` would not call our decoding loop, or not with the user's prompt.
    """
    if call.get("cache_implementation") == "paged":
        raise CannotDraft(
            "cache_implementation='paged' is continuous batching, which knows no drafters.",
            "Leave it or assistant_model= out.",
        )
    if _in_force("token_healing", target, call):
        raise CannotDraft(
            "token_healing=True does not work with a DSpark drafter.", "Leave it or assistant_model= out."
        )


def _refuse_synced_ranks(target: PreTrainedModel, synced_gpus: bool | None) -> None:
    if synced_gpus is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
        from transformers.integrations.fsdp import is_fsdp_managed_module

        sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(target)
        synced_gpus = sharded and torch.distributed.get_world_size() > 1
    if synced_gpus:
        raise CannotDraft(
            "DSpark decoding does not keep ranks in step (synced_gpus, FSDP or ZeRO-3 with several ranks): rounds differ in "
            "length from rank to rank, which would hang.",
            "Gather the target on each rank, or generate without a drafter.",
        )
