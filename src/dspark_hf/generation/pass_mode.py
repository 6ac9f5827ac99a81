"""When a model may run in inference mode, so that nothing of that reaches the caller.

In inference mode torch does none of the bookkeeping for autograd, which is a good part of what a small operation costs. But the
tensors made there can take no part in training later. So the passes of a round alone run in it, and whatever outlives
the call is an ordinary tensor: [`make_ordinary`] sees to the cache and to buffers that a pass has replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import nn
from transformers import Cache

from ..transformers_names import buffers_of, has_hooks, is_compiled, weights_of

PassMode: TypeAlias = Callable[[], contextlib.AbstractContextManager[Any]]


def pass_mode(model: nn.Module) -> PassMode:
    """
    The context for the passes of a model: `torch.inference_mode` where nobody else sees the tensors.

    Others see them where modules have hooks. Compiled models gain nothing and would be compiled again, and weights that are not
    plain tensors (quantized ones) may not support it.
    """
    is_plain = all(type(weight) is nn.Parameter and type(weight.data) is torch.Tensor for weight in weights_of(model))
    return (
        torch.inference_mode if is_plain and not has_hooks(model) and not is_compiled(model) else contextlib.nullcontext
    )


def make_ordinary(model: nn.Module, cache: Cache | None = None) -> None:
    """Replaces the inference tensors among the buffers of a model, and in a cache that outlives the call, by copies."""
    if torch.is_inference_mode_enabled():
        return  # The caller wants it so.
    for module, name, buffer in buffers_of(model):
        if buffer.is_inference():
            setattr(module, name, buffer.clone())
    for layer in [] if cache is None else cache.layers:
        for name, value in list(vars(layer).items()):
            if isinstance(value, dict):  # States by their index or name.
                value.update({key: _ordinary(state) for key, state in value.items()})
            else:
                setattr(layer, name, _ordinary(value))


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) and value.is_inference() else value
