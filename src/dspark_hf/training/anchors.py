"""Chooses the anchors of training blocks, and which drafts of a block count in the loss (paper section 4).

A block's anchor is a token of a response that is followed by another token of the response. Draft `j` (from 0) of the block
predicts the token at `anchor + 1 + j`, and is compared with the target's distribution at position `anchor + j`.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch


class Anchors(NamedTuple):
    """
    The blocks of a batch.

    Args:
        positions (`[B, A]`): Index of each anchor in its row, ascending; 0 for fillers.
        keep (`[B, A]`): False for fillers of rows that have fewer anchors than others.
    """

    positions: torch.Tensor
    keep: torch.Tensor


def anchor_candidates(loss_mask: torch.Tensor) -> torch.Tensor:
    """Whether each position can be an anchor: it and the next one are in the loss mask. `[..., T]` -> `[..., T]`."""
    loss_mask = loss_mask.bool()
    candidates = torch.zeros_like(loss_mask)
    candidates[..., :-1] = loss_mask[..., :-1] & loss_mask[..., 1:]
    return candidates


def row_generator(seed: int, epoch: int, input_ids: torch.Tensor) -> torch.Generator:
    """
    A random generator seeded with the seed, the epoch and the tokens of the row.

    So the anchors of a row do not depend on the order of rows, the rest of its batch or the number of workers. With gradient
    accumulation, or in a resumed run, they are the same as otherwise.
    """
    content = hashlib.blake2b(input_ids.to(torch.int64).numpy().tobytes(), digest_size=8)
    content.update(f"{seed}:{epoch}".encode())
    return torch.Generator().manual_seed(int.from_bytes(content.digest(), "little") >> 1)


def sample_anchors(loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator | None) -> torch.Tensor:
    """
    Up to `num_anchors` different anchors of one row, ascending.

    Args:
        loss_mask: True where a token is to be learned, `[T]`.
        num_anchors: At most this many.
        generator: Random generator; `None` spreads the anchors evenly.
    """
    candidates = anchor_candidates(loss_mask).nonzero().squeeze(-1)
    if len(candidates) <= num_anchors:
        return candidates
    if generator is None:
        chosen = torch.arange(num_anchors) * len(candidates) // num_anchors
    else:
        chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors].sort().values
    return candidates[chosen]


def stack_anchors(rows: list[torch.Tensor]) -> Anchors:
    """Pads the anchors of several rows to the longest, and to at least one."""
    size = max(1, *(len(row) for row in rows))
    positions = torch.zeros(len(rows), size, dtype=torch.long)
    keep = torch.zeros(len(rows), size, dtype=torch.bool)
    for index, row in enumerate(rows):
        positions[index, : len(row)] = row
        keep[index, : len(row)] = True
    return Anchors(positions, keep)


def gather_positions(values: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`values` `[B, T, ...]` at `positions` `[B, ...]`, which are clamped to the row."""
    rows = torch.arange(len(values), device=values.device).view(-1, *[1] * (positions.dim() - 1))
    return values[rows, positions.clamp(max=values.shape[1] - 1)]


def draft_positions(anchors: Anchors, num_drafts: int) -> torch.Tensor:
    """The position before each predicted token, `anchor + j`, `[B, A, J]`; may be past the end of a row."""
    return anchors.positions[..., None] + torch.arange(num_drafts, device=anchors.positions.device)


def counted_drafts(loss_mask: torch.Tensor, anchors: Anchors, num_drafts: int) -> torch.Tensor:
    """
    Which drafts count, `[B, A, J]`, bool: those for which all labels up to theirs are in the loss mask.

    Args:
        loss_mask: `[B, T]`.
        anchors: The blocks.
        num_drafts: Drafts per block, `J`.
    """
    label_positions = draft_positions(anchors, num_drafts) + 1
    inside = label_positions < loss_mask.shape[1]
    learned = gather_positions(loss_mask.bool(), label_positions) & inside & anchors.keep[..., None]
    return learned.long().cumprod(dim=-1).bool()


def position_weights(num_drafts: int, decay: float | None) -> torch.Tensor:
    """`exp(-j / decay)` for draft `j` of a block, `[J]`; all ones without a decay."""
    if not decay:
        return torch.ones(num_drafts)
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / decay)
