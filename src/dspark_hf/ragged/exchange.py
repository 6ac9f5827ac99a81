"""Replaces a target's attention function by ours, for passes over rows of different lengths only.

transformers lets every model look up its attention function, and the function that makes its masks, by the name in its
configuration. Within [`attention_in_place`], the target's configuration names functions of this file. These apply to passes
within [`following`]; all other passes of the target, in the same thread or another, use the target's original functions.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from ..transformers_names import attention_function, attention_name, has_exchangeable_attention, set_attention_name
from ..trials import trial_ids, trial_positions
from .attention import NotPackable, RaggedMask, ragged_attention
from .plan import RaggedPlan

_PREFIX = "dspark_hf_ragged_"

# The sizes of the windows or chunks for which a pass has made masks; `None` outside of [`makes_window_masks`].
_windows: contextvars.ContextVar[set[Any] | None] = contextvars.ContextVar("dspark_hf_windows", default=None)
_plan: contextvars.ContextVar[RaggedPlan | None] = contextvars.ContextVar("dspark_hf_ragged_plan", default=None)


@contextlib.contextmanager
def following(plan: RaggedPlan) -> Iterator[None]:
    """Within the context, passes of this thread run over the tokens of `plan`, packed."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


@torch.no_grad()
def makes_window_masks(model: PreTrainedModel) -> bool:
    """
    Whether the target asks transformers for masks of its windows. Some have a window in their configuration that only the cache
    keeps to (Moshi).
    """
    ids = trial_ids(model, 2)[None]
    token = _windows.set(set())
    try:
        with attention_in_place(model):
            model(input_ids=ids, use_cache=False, **trial_positions(model, 0, 2))
        return bool((_windows.get() or set()) - {None})
    finally:
        _windows.reset(token)


def can_exchange_attention(model: PreTrainedModel) -> bool:
    """Whether the target uses transformers' attention interface, so that its attention function can be exchanged."""
    return has_exchangeable_attention(model) and isinstance(attention_name(model.config), str)


@contextlib.contextmanager
def attention_in_place(model: PreTrainedModel) -> Iterator[None]:
    """
    Within the context, passes of `model` within [`following`] use our attention, and all others the original.

    Contexts of one model may overlap, in any number of threads. The configurations are restored when the last one ends.
    """
    with contextlib.ExitStack() as ending:
        for config in _attention_configs(model):
            _exchange(config)
            ending.callback(_put_back, config)
        yield


@dataclass
class _Exchanged:
    """A configuration whose attention is exchanged, its original name of the attention, and the number of open contexts."""

    config: PreTrainedConfig
    name: str
    num_contexts: int = 0


_lock = threading.Lock()
_exchanged: dict[int, _Exchanged] = {}  # By the `id()` of the configuration.


def _exchange(config: PreTrainedConfig) -> None:
    with _lock:
        if id(config) not in _exchanged:
            name = attention_name(config)
            _exchanged[id(config)] = _Exchanged(config, name)
            _register(name)
            set_attention_name(config, _PREFIX + name)
        _exchanged[id(config)].num_contexts += 1


def _put_back(config: PreTrainedConfig) -> None:
    with _lock:
        exchanged = _exchanged[id(config)]
        exchanged.num_contexts -= 1
        if exchanged.num_contexts == 0:
            del _exchanged[id(config)]
            set_attention_name(config, exchanged.name)


def _attention_configs(model: PreTrainedModel) -> list[PreTrainedConfig]:
    """The configurations from which the model's text layers read their attention implementation."""
    held = [model.config, *(getattr(module, "config", None) for module in model.get_decoder().modules())]
    distinct = {id(config): config for config in held if isinstance(config, PreTrainedConfig)}
    return [config for config in distinct.values() if isinstance(attention_name(config), str)]


def _register(name: str) -> None:
    """Registers functions that use our attention in passes that follow a plan, and the implementation `name` in all others."""

    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        plan = _plan.get()
        if plan is None:
            return attention_function(module, name)(module, *args, **kwargs)
        if name == "sdpa":  # transformers' sdpa ignores these arguments in some versions and refuses them in others.
            kwargs |= {"softcap": None, "s_aux": None}
        return ragged_attention(plan, module, *args, **kwargs)

    def mask(**kwargs: Any) -> Any:
        plan, windows = _plan.get(), _windows.get()
        if windows is not None:
            windows.add(kwargs.get("local_size"))
        if plan is not None:
            if "allow_is_bidirectional_skip" in kwargs:
                raise NotPackable("its tokens attend to later ones")
            reach = kwargs.get("local_size") if kwargs.get("allow_is_causal_skip", True) else 0
            return RaggedMask(plan, kwargs["mask_function"], reach, by_index=not kwargs.get("use_vmap", False))
        masks = AttentionMaskInterface()
        return masks[name](**kwargs) if name in masks else None

    AttentionInterface.register(_PREFIX + name, attention)
    AttentionMaskInterface.register(_PREFIX + name, mask)
