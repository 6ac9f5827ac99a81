"""Drafting with a DFlash2 drafter: one pass over a block of slots, then its selector slot by slot."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor

from ..kinds.dflash2.modeling_dflash2 import CandidateSelector, DFlash2Drafter
from .dspark_candidate_generator import DSparkCandidateGenerator


class CandidateSelectorLogitsProcessor(LogitsProcessor):
    """
    Leaves the candidates of the current slot, scored after the last token of `input_ids`.

    It comes before the user's processors, so that drafts are processed exactly like the target's tokens. Call
    [`~CandidateSelectorLogitsProcessor.begin_block`] first; each call then takes the next slot.

    Args:
        selector: The drafter's selector.
    """

    def __init__(self, selector: CandidateSelector):
        self.selector = selector

    def begin_block(self, hidden_states: torch.Tensor) -> None:
        """Starts a block whose slots have normed hidden states `[B, G, D]`."""
        self._slots = iter(hidden_states.unbind(1))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[B, L]`, of which only the last token is read; `scores` `[B, V]` -> `[B, V]`."""
        features = self.selector.features(input_ids[:, -1], next(self._slots))
        return self.selector.select(scores, features)


class DFlash2CandidateGenerator(DSparkCandidateGenerator):
    """
    Drafts a block for each row of one `generate` call.

    Arguments as in [`DrafterCandidateGenerator`].
    """

    drafter: DFlash2Drafter
    head: CandidateSelectorLogitsProcessor  # type: ignore[assignment]

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.head = CandidateSelectorLogitsProcessor(self.drafter.candidate_selector)
