"""Drafting with a DSpark drafter: one pass over a block of slots, then its sequential head slot by slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from ..kinds.dspark.heads import SequentialHead
from ..kinds.dspark.modeling_dspark import DSparkDrafter
from .candidate_generator import DrafterCandidateGenerator
from .telemetry import stage


class SequentialHeadLogitsProcessor(LogitsProcessor):
    """
    Adds the transition bias of the current slot, given the last token of `input_ids` (paper section 3.2).

    It runs before the user's processors, so that drafts are processed exactly like the target's tokens. Call
    [`~SequentialHeadLogitsProcessor.begin_block`] first; each call then takes the next slot.

    Args:
        head: The drafter's sequential head.
    """

    def __init__(self, head: SequentialHead):
        self.head = head

    def begin_block(self, hidden_states: torch.Tensor) -> None:
        """Starts a block whose slots have normed hidden states `[B, G, D]`."""
        self._slots = iter(hidden_states.unbind(1))
        self._state: torch.Tensor | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Only the last token of `input_ids` `[B, L]` is used; `scores` `[B, V_draft]` -> `[B, V_draft]`."""
        features, self._state = self.head.step(input_ids[:, -1], next(self._slots), self._state)
        return scores + self.head.markov_w2(features).to(scores.dtype)


class DSparkCandidateGenerator(DrafterCandidateGenerator):
    """
    Drafts a block for each row of one `generate` call.

    Arguments as in [`DrafterCandidateGenerator`].
    """

    drafter: DSparkDrafter
    head: SequentialHeadLogitsProcessor | None

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.drafter.markov_head is not None:
            self.head = SequentialHeadLogitsProcessor(self.drafter.markov_head)

    def backbone_pass(self, input_ids: Sequence[torch.Tensor], num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        One pass over `[anchor, MASK, ...]`.

        Returns:
            Normed hidden states `[B, G, D]` and base logits `[B, G, V_draft]` of the first `num_drafts` predicting slots.
        """
        config = self.drafter.config
        anchor_ids = torch.cat([ids[:, -1] for ids in input_ids])  # [B]
        # Always the whole block, even for fewer drafts: the slots attend to each other, and so they did in training.
        block_ids = torch.full(
            (len(anchor_ids), config.block_size), config.mask_token_id or 0, device=anchor_ids.device
        )
        block_ids[:, 0] = anchor_ids
        positions = self.context.next_positions(config.block_size)
        with stage("backbone"):
            output = self.drafter(block_ids, positions, draft_cache=self.context.cache, embeddings=self.embeddings)
        first = 0 if config.sample_from_anchor else 1
        hidden_states = output.last_hidden_state[:, first : first + num_drafts]
        if self.head is not None:
            self.head.begin_block(hidden_states)
        with stage("draft LM head"):
            return hidden_states, self.drafter.base_logits(hidden_states, self.embeddings)
