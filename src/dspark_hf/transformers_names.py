"""The only file with private names of transformers, and with names that differ between its supported versions.

Every other file of the package uses the functions and constants below. `check_transformers` runs at import and warns when
the installed transformers has changed one of these names. The few private names of torch, PEFT and accelerate that come
with transformers' models are here too.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import transformers
from transformers import (
    AttentionInterface,
    Cache,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.generation import StoppingCriteriaList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput, output_capturing

if TYPE_CHECKING:
    from transformers import Trainer

    # A `PreTrainedModel` with the `generate` that transformers has on another class: what `AutoModelForCausalLM` returns.
    from transformers.models.auto.modeling_auto import _BaseModelWithGenerate

    GenerativeModel: TypeAlias = _BaseModelWithGenerate
else:
    Trainer = object  # Importing the Trainer takes long, and only training needs it.
    GenerativeModel = PreTrainedModel

ModelClass = TypeVar("ModelClass", bound=PreTrainedModel)

# ---------------------------------------------------------------------- arguments of models

# The argument that takes the cache, and the field of a model's output that returns it. transformers 5.24 renamed it.
CACHE_KEY = (
    "cache"
    if "cache" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    else "past_key_values"
)

# Arguments that give each token of the prompt a type, `[B, T]`.
TOKEN_TYPE_KEYS = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

# Since transformers 5.23, `output_hidden_states=[...]` lists the entries of `hidden_states` to keep. Before, it listed
# decoder layers, which are numbered differently and do not include the embedding output.
_LISTS_NAME_ENTRIES = hasattr(output_capturing, "selected_hidden_states")

# transformers' DFlash generator, too, reads `hidden_states[i + 1]` for layer `i` since 5.23, and `hidden_states[i]` before.
DFLASH_READS_LAYER_INPUTS = not _LISTS_NAME_ENTRIES


# The module inside the result of `torch.compile(module)`.
_COMPILED = "_orig_mod"

# The mark of a model that has hooks for its hidden states.
_CAPTURES = "_output_capturing_hooks_installed"


def output_hidden_states(indices: list[int]) -> list[int] | bool:
    """The value of `output_hidden_states=` that returns the given entries of `hidden_states`, and possibly others."""
    return indices if _LISTS_NAME_ENTRIES else True


# ---------------------------------------------------------------------- properties of models


def modules_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """
    The modules of a model, itself first, each once. A call looks at all of them several times, and `modules()` takes about
    three times as long.
    """
    found, waiting = {id(model): model}, [model]
    while waiting:
        for module in waiting.pop()._modules.values():
            if module is not None and id(module) not in found:
                found[id(module)] = module
                waiting.append(module)
    return list(found.values())


def weights_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The weights of a model; those that modules share may occur more than once."""
    return [w for module in modules_of(model) for w in module._parameters.values() if w is not None]


def buffers_of(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    """The buffers of a model, each with its module and its name there."""
    return [
        (module, name, buffer)
        for module in modules_of(model)
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def is_stateful(model: PreTrainedModel) -> bool:
    """Whether the model keeps recurrent state that cannot be rolled back."""
    return bool(model._is_stateful)


def attention_name(config: PreTrainedConfig) -> Any:
    """The attention implementation that a model with this configuration runs, such as `"sdpa"`."""
    return config._attn_implementation


def set_attention_name(config: PreTrainedConfig, name: str) -> None:
    """Changes the attention implementation of this configuration, but not of its sub-configurations."""
    config._attn_implementation_internal = name


def attention_function(layer: torch.nn.Module, name: str) -> Callable[..., Any]:
    """The attention function that a layer uses for an attention implementation of this name."""
    for cls in type(layer).__mro__:  # The layer may be a subclass that is defined in another file.
        file = sys.modules[cls.__module__]
        if hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
            return file.ALL_ATTENTION_FUNCTIONS.get_interface(name, getattr(file, "eager_attention_forward", None))
    return AttentionInterface()[name]


def has_exchangeable_attention(model: PreTrainedModel) -> bool:
    """Whether the model looks its attention function up in transformers' attention interface."""
    return bool(model._supports_attention_backend)


def takes_cache(model: PreTrainedModel) -> bool:
    """Whether the model has a cache at all; OpenAI GPT and XLM read the whole text in every pass."""
    return CACHE_KEY in inspect.signature(model.forward).parameters


def supports_sdpa(model: PreTrainedModel) -> bool:
    """Whether the model can run torch's `scaled_dot_product_attention`."""
    return bool(model._supports_sdpa)


def with_experts(model_class: type[ModelClass]) -> type[ModelClass]:
    """
    Marks a class of models for whose experts `experts_implementation=` is to work.

    transformers finds out by itself, from the source of the class, but takes the answer for a class from one that it is derived
    from if that was asked before.
    """
    model_class._can_set_experts_implementation_cached_value = True  # type: ignore[attr-defined]
    return model_class


def has_device_hook(module: torch.nn.Module) -> bool:
    """Whether accelerate moves the module's inputs to the device of its weights (`device_map`, offloading)."""
    return "_hf_hook" in vars(module)


def on_its_device(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Inside, the weights of a module that accelerate offloads can be read."""
    if not has_device_hook(module):
        return contextlib.nullcontext()
    from accelerate.utils import align_module_device  # Hooks are there, so accelerate is.

    context: contextlib.AbstractContextManager[None] = align_module_device(module)
    return context


def compute_device(model: Any) -> torch.device:
    """The device that a model takes its inputs on: not `meta`, where weights are that accelerate offloads."""
    device = torch.device(model.device)
    if device.type != "meta":
        return device
    hooks = [module._hf_hook for module in modules_of(model) if has_device_hook(module)]
    for hook in itertools.chain.from_iterable(getattr(hook, "hooks", [hook]) for hook in hooks):
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    return device


def has_hooks(model: torch.nn.Module) -> bool:
    """
    Whether hooks see or move what the model computes: somebody's, or accelerate's. Those by which transformers returns hidden
    states do not count.
    """
    everywhere = torch.nn.modules.module
    hooks = [*everywhere._global_forward_hooks.values(), *everywhere._global_forward_pre_hooks.values()]
    for module in modules_of(model):
        if module._forward_hooks or module._forward_pre_hooks:
            hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if has_device_hook(module):
            return True
    return any(getattr(hook, "__module__", None) != output_capturing.__name__ for hook in hooks)


def has_capturing_hooks(model: torch.nn.Module) -> bool:
    """Whether the hooks are there by which transformers returns hidden states and attention weights."""
    return any(_CAPTURES in vars(module) for module in modules_of(model))


def remove_capturing_hooks(model: torch.nn.Module) -> None:
    """Removes these hooks. The next pass that is asked for hidden states makes them again."""
    for module in modules_of(model):
        vars(module).pop(_CAPTURES, None)
        for key, hook in list(module._forward_hooks.items()):
            if getattr(hook, "__module__", None) == output_capturing.__name__:
                del module._forward_hooks[key]


def is_compiled(model: torch.nn.Module) -> bool:
    """Whether the model or a module in it is compiled, by `module.compile()` or `torch.compile(module)`."""
    return any(module._compiled_call_impl is not None or _COMPILED in module._modules for module in modules_of(model))


def is_quantized(model: PreTrainedModel) -> bool:
    """Whether transformers has loaded the model with quantized layers."""
    return bool(getattr(model, "is_quantized", False))


def has_own_adapter(model: Any) -> bool:
    """Whether the model has an adapter from `add_adapter`, which does not make it a PEFT model."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def peft_arguments(model: torch.nn.Module) -> dict[str, Any]:
    """What PEFT gives its layers during this `generate` call: `adapter_names`, one per row, or `alora_offsets`."""
    hooks = [hook for module in modules_of(model) for hook in module._forward_pre_hooks.values()]
    given = [hook.keywords for hook in hooks if isinstance(hook, partial)]
    return {name: value for keywords in given for name, value in keywords.items()}


def without_peft(model: Any) -> Any:
    """The model inside a PEFT model; anything else as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def uncompiled(model: Any) -> Any:
    """The module inside the result of `torch.compile(module)`; `None` for anything else."""
    return getattr(model, _COMPILED, None)


# ---------------------------------------------------------------------- what `generate` prepares for a decoding loop


def plain_decoding(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> Any:
    """The decoding loop of plain `generate`, greedy or sampling, with the arguments that `generate` prepared."""
    sample: Any = model._sample  # type: ignore[misc]  # Declared for another class of its package.
    return sample(
        input_ids,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        generation_config=generation_config,
        synced_gpus=False,
        streamer=streamer,
        **model_kwargs,
    )


def pad_token_of(generation_config: GenerationConfig) -> int:
    """The padding token as `generate` prepared it; 0 if none is set, because then no row can end early."""
    token = getattr(generation_config, "_pad_token_tensor", None)
    return 0 if token is None else int(token)


def is_callers_cache(cache: Cache) -> bool:
    """Whether the caller of `generate` passed the cache in, so that it is used after the call."""
    return bool(getattr(cache, "_is_user_defined", False))


def hides_columns(attention_mask: torch.Tensor | None) -> bool:
    """
    Whether a prompt's mask hides any column.

    `generate` drops a mask that hides none; older versions, such as 5.17, keep it.
    """
    return attention_mask is not None and not bool(attention_mask.all())


def prompt_mask_length(model_kwargs: dict[str, Any], generation_config: GenerationConfig) -> int | None:
    """
    Columns of the attention mask that the user passed. It tells whether `input_ids` is the full prompt or only its last
    part, the rest being in the cache.

    `generate` replaces a mask of ones by its length.
    """
    mask = model_kwargs.get("attention_mask")
    return mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", None)


def default_generation_settings() -> dict[str, Any]:
    """The default that `generate` uses for each setting that neither the call nor the model sets."""
    return dict(GenerationConfig._get_default_generation_params())


def has_own_update(model: GenerativeModel) -> bool:
    """Whether the model changes how the arguments of the next pass follow from those of the last one."""
    return type(model)._update_model_kwargs_for_generation is not GenerationMixin._update_model_kwargs_for_generation


def extended_model_kwargs(model: GenerativeModel, model_kwargs: dict[str, Any], num_new_tokens: int) -> dict[str, Any]:
    """A copy of `model_kwargs` whose masks, positions and token types cover `num_new_tokens` more tokens."""
    model_kwargs = dict(model_kwargs)
    if num_new_tokens == 0:
        return model_kwargs
    update = model._update_model_kwargs_for_generation
    # transformers' update would give several new tokens the types of as many prompt tokens, and models that override it
    # expect a single new token.
    at_once = num_new_tokens if not has_own_update(model) and model_kwargs.get("token_type_ids") is None else 1
    for _ in range(num_new_tokens // at_once):
        # Mllama does not do without `is_encoder_decoder`.
        model_kwargs = update(ModelOutput(), model_kwargs, is_encoder_decoder=False, num_new_tokens=at_once)
    return model_kwargs


def allowed_tokens_function(processor: PrefixConstrainedLogitsProcessor) -> Callable[[int, torch.Tensor], list[int]]:
    """The `prefix_allowed_tokens_fn` that the caller of `generate` gave."""
    function: Callable[[int, torch.Tensor], list[int]] = processor._prefix_allowed_tokens_fn
    return function


# ---------------------------------------------------------------------- what the Trainer calls


class TrainerHooks(Trainer):
    """
    Public methods for what [`~transformers.Trainer`] only lets subclasses change through private methods.

    A trainer names this class before `Trainer` among its base classes and overrides the methods below.
    """

    input_columns: list[str]  # The columns of a dataset that reach the collator.

    @property
    def run_folder(self) -> str:
        """The folder of the run; transformers' default if the arguments do not set it."""
        return str(self.args.output_dir)

    def load_checkpoint(self, folder: str, model: torch.nn.Module | None = None) -> None:
        """Loads the weights of a checkpoint into `model`, by default the one being trained."""
        super()._load_from_checkpoint(folder, model)

    def load_best_checkpoint(self) -> None:
        """Loads the weights of the checkpoint that was best in evaluation, at the end of a run."""
        super()._load_best_model()

    def count_items(self, batches: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor | int | None:
        """The number that the losses of all micro-batches of one optimizer step, on all ranks, are divided by."""
        return super()._get_num_items_in_batch(batches, device)

    def on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """A batch, moved to the device of the model."""
        return super()._prepare_inputs(inputs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self.args.should_save:
            self.model_was_saved(output_dir or self.run_folder)

    def model_was_saved(self, folder: str) -> None:
        """Called on the writing process after `save_model` of the user, but not after a checkpoint."""

    def write_model(self, folder: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Writes model, tokenizer and arguments, which both `save_model` and a checkpoint contain."""
        super()._save(folder, state_dict)

    def write_checkpoint(self, folder: Path, write: Callable[[], None]) -> None:
        """Calls `write`, which writes a checkpoint to `folder` inside the folder of the run."""
        write()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        self.write_model(output_dir or self.run_folder, state_dict)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

        folder = Path(self._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")
        self.write_checkpoint(folder, partial(super()._save_checkpoint, model, trial))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: torch.nn.Module | None = None) -> None:
        self.load_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self.load_best_checkpoint()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        return self.count_items(batch_samples, device)

    def _set_signature_columns_if_needed(self) -> None:
        self._signature_columns: Any = list(self.input_columns)


# ---------------------------------------------------------------------- the check


def check_transformers() -> None:
    """Warns with one `RuntimeWarning` that lists the names used here that the installed transformers does not have."""
    parameters = inspect.signature(GenerationMixin.generate).parameters
    missing = [
        f"generate({name}=)" for name in ("custom_generate", "assistant_model", "streamer") if name not in parameters
    ]
    update = getattr(GenerationMixin, "_update_model_kwargs_for_generation", None)
    if update is None or "num_new_tokens" not in inspect.signature(update).parameters:
        missing.append("GenerationMixin._update_model_kwargs_for_generation(num_new_tokens=)")
    if CACHE_KEY not in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters:
        missing.append(f"prepare_inputs_for_generation({CACHE_KEY}=)")
    needed = {
        Cache: ("crop", "is_croppable", "activate_past_recording"),
        GenerationConfig: ("_get_default_generation_params",),
        PreTrainedConfig: ("_attn_implementation",),
        PreTrainedModel: ("_is_stateful", "_supports_attention_backend", "_supports_sdpa"),
    }
    missing += [
        f"{owner.__name__}.{name}" for owner, names in needed.items() for name in names if not hasattr(owner, name)
    ]
    if missing:
        warnings.warn(
            f"transformers {transformers.__version__} changed what dspark_hf builds on: {', '.join(missing)}. "
            "generate(assistant_model=drafter) may fail; install a transformers version that dspark_hf supports.",
            RuntimeWarning,
            stacklevel=2,
        )


check_transformers()
