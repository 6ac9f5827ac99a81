"""When logits that were computed in two ways count as the same: what differs is then rounding."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .embeddings import is_linear
from .transformers_names import compute_device, is_quantized, modules_of

# How far logits may be apart on average, in standard deviations. In float32, right targets stay below .0001 and wrong ones are
# above .1; in bfloat16, and with activations that are rounded to 8 bits, right ones stay below .025.
_TOLERANCE, _TOLERANCE_OF_COARSE = 0.01, 0.05


def is_near(logits: torch.Tensor, expected: torch.Tensor, model: PreTrainedModel) -> bool:
    """Whether logits of a target differ from those expected by no more than rounding."""
    is_fine = model.dtype in (torch.float32, torch.float64) and next(quantized_layers(model), None) is None
    tolerance = _TOLERANCE if is_fine else _TOLERANCE_OF_COARSE
    return bool((logits - expected).abs().mean() < tolerance * expected.std())


def quantized_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The linear layers of decoder and LM head that may be quantized: where transformers has quantized, all of them."""
    is_any = is_quantized(model)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        for layer in () if part is None else modules_of(part):
            if isinstance(vars(layer).get("in_features"), int) and (is_any or not is_linear(layer)):
                yield layer


def trial_ids(model: PreTrainedModel, count: int) -> torch.Tensor:
    """Different tokens for a trial, `[count]`."""
    ids = torch.arange(1, count + 1, device=compute_device(model))
    return ids % model.config.get_text_config(decoder=True).vocab_size


def trial_positions(model: PreTrainedModel, start: int, end: int) -> dict[str, Any]:
    """
    The argument with positions `start..end-1`, for targets that take it.

    Without it, models with positions of several axes would remember those of the trial.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    return {"position_ids": torch.arange(start, end, device=compute_device(model))[None]}
