"""What a block slot may attend to, as boolean masks (True = keep) and in the form each attention function wants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MaskMod = Callable[..., torch.Tensor]


def drafting_mask(
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    context_lengths: list[int],
    window: int | None,
    causal: bool,
) -> torch.Tensor | None:
    """
    Mask of one block per row over the row's cached context and the block itself.

    Args:
        query_positions: Absolute positions of the block slots, `[B, G]`.
        key_positions: Absolute positions of the cached context, `[B, T]`, `T` the longest row's length.
        context_lengths: Context tokens of each row; row `r` holds nothing from `context_lengths[r]` to `T`.
        window: Slots see positions closer than this; `None` for all.
        causal: Whether a slot sees only itself and earlier slots of its block.

    Returns:
        `[B, 1, G, T + G]`, or `None` when every slot sees everything.
    """
    (batch, num_slots), num_context = query_positions.shape, key_positions.shape[1]
    ragged = any(length != num_context for length in context_lengths)
    if not ragged and not causal and window is None:
        return None
    device = query_positions.device
    lengths = torch.tensor(context_lengths).to(device, non_blocking=True)  # Waits for nothing, unlike `device=`.
    context = (torch.arange(num_context, device=device) < lengths[:, None])[:, None].expand(-1, num_slots, -1)
    block = torch.ones(batch, num_slots, num_slots, dtype=torch.bool, device=device)
    if causal:
        block = block.tril()
    if window is not None:
        context = context & (query_positions[:, :, None] - key_positions[:, None] < window)
        block = block & (query_positions[:, :, None] - query_positions[:, None] < window)
    return torch.cat([context, block], dim=-1)[:, None]


def anchor_mask(
    anchor_positions: torch.Tensor,
    keep_anchors: torch.Tensor,
    attention_mask: torch.Tensor,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """
    Mask of many blocks of one sequence at once (paper section 4: anchors sampled along the sequence).

    A block sees the context strictly before its anchor and itself, nothing of the other blocks.

    Args:
        anchor_positions: Index of each block's anchor in the sequence, `[B, A]`.
        keep_anchors: False for filler blocks, which see only themselves, `[B, A]`.
        attention_mask: False for padding, `[B, T]`.
        block_size: Slots per block.
        window, causal: As in [`drafting_mask`].

    Returns:
        `[B, 1, A * G, T + A * G]`.
    """
    mask_mod = anchor_mask_mod(anchor_positions, keep_anchors, attention_mask, block_size, window, causal)
    batch, num_anchors = anchor_positions.shape
    num_queries, num_keys = num_anchors * block_size, attention_mask.shape[1] + num_anchors * block_size
    device = anchor_positions.device
    rows = torch.arange(batch, device=device)[:, None, None]
    queries = torch.arange(num_queries, device=device)[None, :, None]
    keys = torch.arange(num_keys, device=device)[None, None, :]
    return mask_mod(rows, 0, queries, keys)[:, None]


def anchor_mask_mod(
    anchor_positions: torch.Tensor,
    keep_anchors: torch.Tensor,
    attention_mask: torch.Tensor,
    block_size: int,
    window: int | None = None,
    causal: bool = False,
) -> MaskMod:
    """The rule behind [`anchor_mask`] as a `mask_mod(batch, head, query, key)` for `flex_attention`."""
    num_context = attention_mask.shape[1]
    last = num_context - 1

    def mask_mod(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        block, slot = query // block_size, query % block_size
        anchor, keep = anchor_positions[batch, block], keep_anchors[batch, block]
        in_context = key < num_context
        visible = in_context & keep & (key < anchor) & attention_mask[batch, key.clamp(max=last)]
        own_slot = key - num_context - block * block_size
        own = ~in_context & (own_slot >= 0) & (own_slot < block_size)
        if causal:
            own = own & (own_slot <= slot)
        if window is not None:
            visible = visible & (anchor + slot - key < window)
            own = own & (slot - own_slot < window)
        return visible | own

    return mask_mod


def chain_drafting_mask(context_lengths: list[int], num_steps: int, device: torch.device) -> torch.Tensor | None:
    """
    Mask of one step of one chain per row, over the row's cached context and the chain up to and including this step.

    Args:
        context_lengths: Context tokens of each row.
        num_steps: Steps of the chain, including this one.
        device: Device of the mask.

    Returns:
        `[B, 1, 1, T + num_steps]`, `T` the longest row's length; `None` when every row sees everything.
    """
    longest = max(context_lengths)
    if min(context_lengths) == longest:
        return None
    keys = torch.arange(longest + num_steps, device=device)
    lengths = torch.tensor(context_lengths).to(device, non_blocking=True)[:, None]
    return ((keys < lengths) | (keys >= longest))[:, None, None]


def chain_training_mask(starts: torch.Tensor, num_context: int, num_steps: int) -> torch.Tensor:
    """
    Mask of one step of many chains over the context and all steps so far (EAGLE-3's training-time test).

    A chain sees the context strictly before its start and its own steps, but not the other chains.

    Args:
        starts: Index in the sequence of the state that each chain starts from, `[B, A]`.
        num_context: Length of the sequence, `T`.
        num_steps: Steps so far, including this one. The keys are ordered by step, then by chain.

    Returns:
        `[B, 1, A, T + num_steps * A]`.
    """
    batch, num_chains = starts.shape
    context = torch.arange(num_context, device=starts.device) < starts[..., None]  # [B, A, T]
    own = torch.eye(num_chains, dtype=torch.bool, device=starts.device).repeat(1, num_steps)
    return torch.cat([context, own.expand(batch, -1, -1)], dim=-1)[:, None]


def as_attention_argument(mask: torch.Tensor | None, implementation: str | None, dtype: torch.dtype) -> Any:
    """
    A boolean mask in the form the attention implementation wants.

    `eager` adds its mask to the scores; `sdpa` keeps booleans; flash attention takes only which keys exist, `[B, S]`,
    so it only works for masks that are the same for every slot.

    Raises:
        ValueError: when flash attention is asked for a causal or sliding block.
    """
    if not isinstance(mask, torch.Tensor):
        return mask  # None, or a flex_attention BlockMask, which is ready as it is.
    if implementation is not None and "flash" in implementation:
        keys = mask[:, 0, 0]
        if not torch.equal(mask[:, 0], keys[:, None].expand_as(mask[:, 0])):
            raise ValueError(
                f"attn_implementation={implementation!r} cannot restrict single slots of a block (causal or sliding "
                "draft layers, several blocks): load the drafter with attn_implementation='sdpa'."
            )
        return keys
    if implementation == "sdpa":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
