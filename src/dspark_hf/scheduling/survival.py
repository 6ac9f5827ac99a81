"""From confidence logits to the probability that a whole prefix of drafts is accepted (paper section 3.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def calibrated_confidence(confidence_logits: torch.Tensor, temperatures: Sequence[float] | None = None) -> torch.Tensor:
    """
    `c_k = sigmoid(logit_k / T_k)`: the probability that draft `k` is accepted given that all before it are.

    Args:
        confidence_logits: `[..., G]`.
        temperatures: `T_k` of each slot, at least `G` of them; all 1 by default.

    Returns:
        Float32 probabilities, `[..., G]`.
    """
    logits = confidence_logits.float()
    if temperatures is not None:
        own = torch.tensor(temperatures[: logits.shape[-1]])
        logits = logits / own.to(logits.device, non_blocking=True)  # Waits for nothing, unlike `device=`.
    return torch.sigmoid(logits)


def prefix_survival(confidence: torch.Tensor) -> torch.Tensor:
    """
    `a_k`, the product of `c_1 .. c_k`: the probability that drafts 1 to `k` are all accepted.

    Args:
        confidence: `[..., G]`.

    Returns:
        Float64, never increasing along the slots, `[..., G]`.
    """
    return confidence.double().cumprod(-1)


def confident_lengths(confidence: torch.Tensor, threshold: float) -> torch.Tensor:
    """
    How many slots precede the first one below `threshold`, `[..., G]` -> `[...]` (static threshold, section 3.3).

    The threshold applies to `c_k`, not to the survival `a_k`; 0 keeps every slot.
    """
    return (confidence >= threshold).long().cumprod(-1).sum(-1)
