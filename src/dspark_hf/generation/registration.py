"""The one seam to transformers: `generate(assistant_model=drafter)` becomes `generate(custom_generate=...)`.

Everything here that is not public transformers API is listed in `_check_seam`, which runs at import and says so when a
transformers version changed it. Nothing else in the package knows these names.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from typing import Any

import torch
import transformers
from transformers import Cache, GenerationConfig, GenerationMixin, PreTrainedModel, StopStringCriteria
from transformers.generation import StoppingCriteriaList

from ..drafter import Drafter

_ORIGINAL = "_dspark_hf_original"

# Taken from the call, its generation configuration or the drafter's, in this order.
DRAFT_SETTINGS = ("num_assistant_tokens", "assistant_confidence_threshold", "verify_scheduler", "drafting_backoff")

# transformers 5.24 renamed the cache argument of models and the field of their outputs.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)


TOKEN_TYPE_KEYS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")


# ---------------------------------------------------------------------- the hook


def register() -> None:
    """Lets `generate` take a [`DSparkDrafter`] as `assistant_model`. Done on `import dspark_hf`; harmless when repeated."""
    current = GenerationMixin.generate
    if hasattr(current, _ORIGINAL):
        return

    @functools.wraps(current)
    def generate(self, *args, **kwargs):
        drafter = _drafter_in(current, self, args, kwargs)
        if drafter is None:
            return current(self, *args, **kwargs)
        return _generate_with_drafter(current, self, drafter, args, kwargs)

    setattr(generate, _ORIGINAL, current)
    GenerationMixin.generate = generate


def unregister() -> None:
    """Gives transformers its own `generate` back."""
    original = getattr(GenerationMixin.generate, _ORIGINAL, None)
    if original is not None:
        GenerationMixin.generate = original


def unwrap_drafter(model: Any) -> Drafter | None:
    """
    The drafter behind `model`, which may be wrapped by PEFT; `None` when it is none.

    Raises:
        ValueError: for what `torch.compile(drafter)` returns, through which neither side would run compiled.
    """
    if isinstance(getattr(model, "_orig_mod", None), Drafter):
        raise ValueError("torch.compile(drafter) wraps the drafter away from generate: call drafter.compile() instead.")
    if not isinstance(model, Drafter) and hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model if isinstance(model, Drafter) else None


def _drafter_in(generate, target, args: tuple, kwargs: dict[str, Any]) -> Drafter | None:
    from .loop import dspark_generate

    if kwargs.get("custom_generate") is dspark_generate and kwargs.get("drafter") is not None:
        return unwrap_drafter(kwargs["drafter"])
    assistant = kwargs.get("assistant_model")
    if assistant is None and len(args) > 6:  # Seventh positional parameter of `generate`, `self` not counted.
        assistant = inspect.signature(generate).bind_partial(target, *args).arguments.get("assistant_model")
    return unwrap_drafter(assistant)


def _generate_with_drafter(generate, target, drafter: Drafter, args: tuple, kwargs: dict[str, Any]):
    from .loop import dspark_generate

    call = inspect.signature(generate).bind(target, *args, **kwargs).arguments
    call.update(call.pop("kwargs", {}))
    del call["self"]
    call.pop("assistant_model", None), call.pop("drafter", None)
    if call.pop("custom_generate", None) not in (None, dspark_generate):
        raise ValueError(
            "Pass either assistant_model=<DSpark drafter> or custom_generate=, not both: each is a decoding loop."
        )
    _refuse_synced_ranks(target, call.get("synced_gpus"))
    _refuse_what_leaves_no_loop(target, call)
    # One tokenizer serves both models: a drafter shares its target's vocabulary.
    call.pop("assistant_tokenizer", None)
    _build_stop_strings(target, call)
    settings = {name: _setting(name, call) for name in DRAFT_SETTINGS}
    streamer = call.get("streamer")

    def decode(model, input_ids, logits_processor, stopping_criteria, generation_config, **model_kwargs):
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


def _setting(name: str, call: dict[str, Any]) -> Any:
    """A knob of assisted generation as given in this call, or `None`: the drafter's own settings then count."""
    value = call.pop(name, None)
    config: GenerationConfig | None = call.get("generation_config")
    if value is not None or config is None:
        return value
    defaults = GenerationConfig._get_default_generation_params()
    is_filled_in = all(getattr(config, key, None) is not None for key in defaults if defaults[key] is not None)
    value = getattr(config, name, None)
    # Pipelines of older versions of transformers fill in defaults that are not meant for these drafters.
    return None if is_filled_in and value == defaults.get(name) else value


def _build_stop_strings(target: PreTrainedModel, call: dict[str, Any]) -> None:
    """
    Turns `stop_strings=` into a stopping criterion, since transformers loses the tokenizer on the way to a custom loop.

    Raises:
        ValueError: when stop strings come without a tokenizer.
    """
    stop_strings = _in_force("stop_strings", target, call)
    tokenizer = call.pop("tokenizer", None)
    if stop_strings is None:
        return
    if tokenizer is None:
        raise ValueError("stop_strings= needs the tokenizer: pass tokenizer= to generate as well.")
    criteria = list(call.get("stopping_criteria") or ())
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):  # The user's own has precedence.
        criteria.append(StopStringCriteria(stop_strings=stop_strings, tokenizer=tokenizer))
    call["stopping_criteria"] = StoppingCriteriaList(criteria)
    # Nobody else is to build it again, from any of the places where stop strings may stand.
    call.pop("stop_strings", None)
    if getattr(call.get("generation_config"), "stop_strings", None) is not None:
        call["generation_config"] = copy.copy(call["generation_config"])
        call["generation_config"].stop_strings = None
    if target.generation_config.stop_strings is not None:
        call["stop_strings"] = None


def _in_force(name: str, target: PreTrainedModel, call: dict[str, Any]) -> Any:
    """A generation setting as `generate` will resolve it: of the call, of its `generation_config`, of the target."""
    if name in call:
        return call[name]
    value = getattr(call.get("generation_config"), name, None)
    return getattr(target.generation_config, name, None) if value is None else value


def _refuse_what_leaves_no_loop(target: PreTrainedModel, call: dict[str, Any]) -> None:
    """
    Raises:
        ValueError: for settings that `generate` acts on before or instead of calling a decoding loop.
    """
    if call.get("cache_implementation") == "paged":
        raise ValueError(
            "cache_implementation='paged' is continuous batching, which knows no drafters. Leave it or assistant_model= out."
        )
    if _in_force("token_healing", target, call):
        raise ValueError("token_healing=True does not work with a DSpark drafter. Leave it or assistant_model= out.")


def _refuse_synced_ranks(target: PreTrainedModel, synced_gpus: bool | None) -> None:
    if synced_gpus is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
        from transformers.integrations.fsdp import is_fsdp_managed_module

        sharded = is_deepspeed_zero3_enabled() or is_fsdp_managed_module(target)
        synced_gpus = sharded and torch.distributed.get_world_size() > 1
    if synced_gpus:
        raise ValueError(
            "DSpark decoding does not keep ranks in step (synced_gpus, FSDP or ZeRO-3 with several ranks): rounds differ in "
            "length from rank to rank, which would hang. Gather the target on each rank, or generate without a drafter."
        )


# ---------------------------------------------------------------------- transformers' internals, by their names


def pad_token_of(generation_config: GenerationConfig) -> int:
    """The padding token as `generate` prepared it; 0 where there is none and no row can end early."""
    token = getattr(generation_config, "_pad_token_tensor", None)
    return 0 if token is None else int(token)


def is_callers_cache(cache: Cache) -> bool:
    """Whether the cache outlives the call because the caller passed it in; versions that do not tell are taken to say yes."""
    return bool(getattr(cache, "_is_user_defined", CACHE_KEY != "cache"))


def prompt_mask_length(model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> int | None:
    """
    Columns of the attention mask the user gave. It tells a full prompt from one whose beginning is in the cache only.

    `generate` drops a mask of ones and remembers its length.
    """
    mask = model_kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", None)


def extended_model_kwargs(model: PreTrainedModel, model_kwargs: dict[str, Any], num_new_tokens: int) -> dict[str, Any]:
    """A copy of `model_kwargs` whose masks, positions and token types cover `num_new_tokens` more tokens."""
    model_kwargs = dict(model_kwargs)
    if num_new_tokens == 0:
        return model_kwargs
    update = model._update_model_kwargs_for_generation
    # Several tokens at once would take the types of as many prompt tokens, and overridden updates know only of one.
    is_plain = type(model)._update_model_kwargs_for_generation is GenerationMixin._update_model_kwargs_for_generation
    at_once = num_new_tokens if is_plain and model_kwargs.get("token_type_ids") is None else 1
    for _ in range(num_new_tokens // at_once):
        model_kwargs = update({}, model_kwargs, num_new_tokens=at_once)
    return model_kwargs


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether the model keeps recurrent state that cannot be rolled back."""
    return bool(getattr(model, "_is_stateful", False))


def _check_seam() -> None:
    missing = []
    parameters = inspect.signature(GenerationMixin.generate).parameters
    missing += [
        f"generate({name}=)" for name in ("custom_generate", "assistant_model", "streamer") if name not in parameters
    ]
    update = getattr(GenerationMixin, "_update_model_kwargs_for_generation", None)
    if update is None or "num_new_tokens" not in inspect.signature(update).parameters:
        missing.append("GenerationMixin._update_model_kwargs_for_generation(num_new_tokens=)")
    if CACHE_KEY not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
        missing.append(f"prepare_inputs_for_generation({CACHE_KEY}=)")
    if not hasattr(GenerationConfig, "_get_default_generation_params"):
        missing.append("GenerationConfig._get_default_generation_params")
    missing += [
        f"Cache.{name}" for name in ("crop", "is_croppable", "activate_past_recording") if not hasattr(Cache, name)
    ]
    if missing:
        warnings.warn(
            f"transformers {transformers.__version__} changed what dspark_hf builds on: {', '.join(missing)}. "
            "generate(assistant_model=drafter) may fail; install a transformers version that dspark_hf supports.",
            RuntimeWarning,
            stacklevel=2,
        )


_check_seam()
