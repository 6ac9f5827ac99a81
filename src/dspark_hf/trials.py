"""When logits that were computed in two ways count as the same: what differs is then rounding."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel

from .transformers_names import compute_device

# How far logits may be apart on average, in standard deviations. In float32, right targets stay below .0001 and wrong ones are
# above .1; in bfloat16, right ones stay below .025.
_TOLERANCE = {torch.float32: 0.01, torch.float64: 0.01}
_TOLERANCE_OF_HALF = 0.05


def is_near(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits differ from those expected, of a target with this dtype, by no more than rounding."""
    return bool((logits - expected).abs().mean() < _TOLERANCE.get(dtype, _TOLERANCE_OF_HALF) * expected.std())


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
