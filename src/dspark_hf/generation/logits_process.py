"""Logits processors on the drafter's side: the sequential head as one, and which of the user's may run there."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from ..heads import SequentialHead

# These look at the scores alone, so all positions of a round can be processed in one call.
_ROWWISE = (
    stock.TemperatureLogitsWarper,
    stock.TopKLogitsWarper,
    stock.TopPLogitsWarper,
    stock.TopHLogitsWarper,
    stock.MinPLogitsWarper,
    stock.TypicalLogitsWarper,
    stock.EpsilonLogitsWarper,
    stock.EtaLogitsWarper,
    stock.SuppressTokensLogitsProcessor,
    stock.InfNanRemoveLogitsProcessor,
    stock.LogitNormalization,
)
# Stock processors that remember earlier calls.
_STATEFUL = (
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    stock.SynthIDTextWatermarkLogitsProcessor,
    stock.WhisperTimeStampLogitsProcessor,
)


class SequentialHeadLogitsProcessor(LogitsProcessor):
    """
    Adds the transition bias of the current slot, given the last token of `input_ids` (paper section 3.2).

    It runs ahead of the user's processors, so that drafts are warped exactly like the target's tokens. Call
    [`~SequentialHeadLogitsProcessor.begin_block`] first; each call then takes the next slot.

    Args:
        head: The drafter's sequential head.
    """

    def __init__(self, head: SequentialHead):
        self.head = head
        self.previous_embeddings: torch.Tensor | None = None

    def begin_block(self, hidden_states: torch.Tensor) -> None:
        """Starts a block whose slots have normed hidden states `[B, G, D]`."""
        self._hidden_states = hidden_states
        self._state: torch.Tensor | None = None
        self._slot = 0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[B, L]`, of which the last token counts; `scores` `[B, V_draft]` -> `[B, V_draft]`."""
        features, self._state = self.head.step(
            input_ids[:, -1],  # type: ignore[arg-type]
            self._hidden_states[:, self._slot],
            self._state,
        )
        self._slot += 1
        return scores + self.head.markov_w2(features).to(scores.dtype)


def is_rowwise(processors: LogitsProcessorList) -> bool:
    """Whether every processor looks at the scores alone, so that positions may be processed together."""
    return all(type(processor) in _ROWWISE for processor in processors)


def drafting_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """
    The processors to warp drafts with: transformers' own, but for the few that remember their calls.

    Any other may keep a state, and a call for a draft that is then rejected would corrupt it. Nor would a copy help: its
    state may lie elsewhere, and it may hold a whole model. So it sees one call a committed token, as in plain
    `generate`. That costs acceptance and never exactness: the draft's law is whatever it was drawn from.
    """
    return LogitsProcessorList(
        processor
        for processor in processors
        if type(processor).__module__ == stock.__name__ and not isinstance(processor, _STATEFUL)
    )
