"""Which drafts are accepted and what is drawn instead: the part that makes speculative decoding lossless.

Pure functions over probabilities. Accepting `x ~ q` with probability `min(1, p(x) / q(x))` and otherwise drawing from
`norm(max(p - q, 0))` gives exactly `p` (paper section 2.1; Leviathan et al., 2023), whatever `q` is, as long as `q` is the
distribution that the draft was really drawn from.
"""

from __future__ import annotations

import torch

NO_TOKEN = -1  # In the place of a token id, where there is no distribution to draw from.


def draw(probs: torch.Tensor) -> torch.Tensor:
    """
    One token id per row of `probs` `[..., V]`, `[...]`. Rows need not be normalised.

    An exponential race: `p / e`, with `e` drawn from the exponential distribution, is largest at each token with that token's
    probability. `torch.multinomial` draws the same tokens, but checks its input first and waits for the device.
    """
    return _races(probs).argmax(-1)


def draw_or_none(probs: torch.Tensor) -> torch.Tensor:
    """The same, and `NO_TOKEN` for rows that hold NaN or no probability above 0."""
    rates, token_ids = _races(probs).max(-1)
    return torch.where(rates > 0, token_ids, NO_TOKEN)


def _races(probs: torch.Tensor) -> torch.Tensor:
    return probs / torch.empty_like(probs).exponential_()


def passes(draft_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """
    The acceptance test of each draft by itself.

    Args:
        draft_ids: `[...]`.
        draft_probs: The distribution each draft was drawn from, `[..., V]`.
        target_probs: The target's distribution at the same position, `[..., V]`.

    Returns:
        True with probability `min(1, p(x) / q(x))`, `[...]`.
    """
    q = draft_probs.gather(-1, draft_ids[..., None]).squeeze(-1)
    p = target_probs.gather(-1, draft_ids[..., None]).squeeze(-1)
    return torch.rand_like(q) * q < p


def residual(target_probs: torch.Tensor, draft_probs: torch.Tensor) -> torch.Tensor:
    """
    What to draw from after a rejection: `max(p - q, 0)`, `[..., V]`, not normalised.

    Where rounding leaves nothing (`p` and `q` equal, so a rejection had probability zero), it is `p`.
    """
    rest = (target_probs - draft_probs).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target_probs)


def leading_true(mask: torch.Tensor) -> torch.Tensor:
    """Number of True before the first False along the last dimension: `[..., G]` -> `[...]`."""
    return mask.long().cumprod(-1).sum(-1)


def verify_greedy(draft_ids: torch.Tensor, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Greedy acceptance.

    Args:
        draft_ids: Drafts sent to the target, `[B, L]`.
        target_ids: The target's choice at each of these positions and the one after, `[B, L + 1]`.

    Returns:
        `num_accepted` `[B]` and the token that follows them `[B]` (the target's correction, or the bonus token).
    """
    num_accepted = leading_true(draft_ids == target_ids[:, :-1])
    return num_accepted, target_ids.gather(1, num_accepted[:, None]).squeeze(1)


def verify_sampled(
    draft_ids: torch.Tensor, draft_probs: torch.Tensor, target_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Rejection sampling.

    Args:
        draft_ids: Drafts sent to the target, `[B, L]`.
        draft_probs: The distribution each was drawn from, `[B, L, V]`.
        target_probs: The target's distribution at each of these positions and the one after, `[B, L + 1, V]`.

    Returns:
        `num_accepted` `[B]` and the token that follows them `[B]`, `NO_TOKEN` where the target's probabilities are NaN.
    """
    num_drafts = draft_ids.shape[1]
    num_accepted = leading_true(passes(draft_ids, draft_probs, target_probs[:, :num_drafts]))
    rows = torch.arange(len(draft_ids), device=draft_ids.device)
    follow = target_probs[rows, num_accepted]  # [B, V]
    if num_drafts:
        q = draft_probs[rows, num_accepted.clamp(max=num_drafts - 1)]
        rejected = (num_accepted < num_drafts)[:, None]
        follow = torch.where(rejected, residual(follow, q), follow)
    return num_accepted, draw_or_none(follow)
