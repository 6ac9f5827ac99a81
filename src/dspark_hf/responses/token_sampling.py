"""Draws tokens from a target's logits, with one uniform number per token."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Sampling:
    """The distribution tokens are drawn from. Applied in the order of `generate`: temperature, top-k, top-p.

    Args:
        do_sample: False takes the most likely token and ignores the rest.
        temperature: divides the logits.
        top_k: keep this many tokens; 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability; 1.0 keeps all.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.do_sample and not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}, but sampling needs a positive one; for greedy decoding set do_sample=False."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give a number of tokens, or 0 to keep all.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a probability in (0, 1], where 1.0 keeps all.")


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Draws one token for each row.

    Args:
        logits: `[B, V]`, any float dtype.
        uniforms: `[B]` float32 in [0, 1), one number for each row; not used for greedy decoding.

    Returns:
        token ids `[B]`.
    """
    if not sampling.do_sample:
        return logits.argmax(-1)  # [B]
    candidates = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, candidates = logits.topk(sampling.top_k, dim=-1)  # [B, K] each, most likely first
    logits = logits.to(torch.float32, copy=True).div_(sampling.temperature)  # a copy, so it may be written in place
    if sampling.top_p < 1:
        logits, order = keep_top_p(logits, sampling.top_p)  # [B, K] each
        candidates = order if candidates is None else candidates.gather(-1, order)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()  # [B, K]
    index = invert_cumulative(weights, uniforms)  # [B]
    return index if candidates is None else candidates.gather(-1, index[:, None])[:, 0]


def keep_top_p(logits: torch.Tensor, top_p: float, first_try: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks all but the most likely tokens that together reach `top_p`.

    Sorting a whole vocabulary is slow and rarely needed: only the `first_try` most likely tokens are sorted, and all of them
    if some row needs more.

    Args:
        logits: `[B, V]`.

    Returns:
        logits `[B, K]`, most likely first and -inf for dropped tokens, and the ids `[B, K]` of these tokens.
    """
    total = logits.logsumexp(-1, keepdim=True)  # [B, 1]
    size = min(first_try, logits.shape[-1])
    while True:
        kept, order = logits.topk(size, dim=-1)  # [B, K] each
        probs = torch.exp(kept - total)  # [B, K]
        before = probs.cumsum(-1) - probs  # [B, K] mass of all more likely tokens
        if size == logits.shape[-1] or bool((before[:, -1] + probs[:, -1] >= top_p).all()):
            break
        size = logits.shape[-1]
    dropped = before >= top_p
    dropped[:, 0] = False
    return kept.masked_fill(dropped, float("-inf")), order


def invert_cumulative(weights: torch.Tensor, uniforms: torch.Tensor, block: int = 256) -> torch.Tensor:
    """Draws an index for each row with probability proportional to `weights`: first a block of indices, then an index in it.

    The cumulative sum then runs over `V / block` numbers instead of `V`, which is faster and loses less precision.

    Args:
        weights: `[B, V]` float32, not negative, with a positive sum.
        uniforms: `[B]` in [0, 1).

    Returns:
        indices `[B]`; never one of weight zero.
    """
    rows, size = weights.shape
    padding = -size % block
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(rows, -1, block)  # [B, N, block]
    block_mass = blocks.sum(-1)  # [B, N]
    chosen, rest = pick(block_mass, uniforms[:, None] * block_mass.sum(-1, keepdim=True))  # [B, 1] each
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, block))[:, 0]  # [B, block]
    index, _ = pick(inside, rest)  # [B, 1]
    return (chosen * block + index)[:, 0]


def pick(weights: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose cumulative weight exceeds `threshold`, and the rest of the threshold within that index.

    Because of rounding, the threshold can be as large as the total or larger. Then it is the last index of positive weight.

    Args:
        weights: `[B, N]`; threshold: `[B, 1]`.

    Returns:
        index `[B, 1]`, rest `[B, 1]`.
    """
    cumulative = weights.cumsum(-1)  # [B, N]
    index = torch.searchsorted(cumulative, threshold, right=True)  # [B, 1]
    positions = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, positions, -1).amax(-1, keepdim=True)  # [B, 1]
    index = torch.minimum(index, last)
    rest = threshold - (cumulative.gather(-1, index) - weights.gather(-1, index))
    return index, rest.clamp_min(0)


def draw_uniforms(seed: int, count: int) -> torch.Tensor:
    """`count` uniform numbers in [0, 1) from a request's seed."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))
