"""Logits processors: the drafter's sequential head as one, and which of the user's may be applied where."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from ..kinds.dspark.heads import SequentialHead

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
# Of these, the ones that name tokens; the others make no difference where only tokens of probability 0 are left out.
_NAMING = (stock.SuppressTokensLogitsProcessor,)
# Stock processors that remember earlier calls.
_STATEFUL = (
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    stock.SynthIDTextWatermarkLogitsProcessor,
    stock.WhisperTimeStampLogitsProcessor,
)


class SequentialHeadLogitsProcessor(LogitsProcessor):
    """
    Adds the transition bias of the current slot, given the last token of `input_ids` (paper section 3.2).

    It runs ahead of the user's processors, so that drafts are processed exactly like the target's tokens. Call
    [`~SequentialHeadLogitsProcessor.begin_block`] first; each call then takes the next slot.

    Args:
        head: The drafter's sequential head.
    """

    def __init__(self, head: SequentialHead):
        self.head = head

    def begin_block(self, hidden_states: torch.Tensor) -> None:
        """Starts a block whose slots have normed hidden states `[B, G, D]`."""
        self._hidden_states = hidden_states
        self._state: torch.Tensor | None = None
        self._slot = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[B, L]`, of which the last token counts; `scores` `[B, V_draft]` -> `[B, V_draft]`."""
        features, self._state = self.head.step(
            input_ids[:, -1],
            self._hidden_states[:, self._slot],
            self._state,
        )
        self._slot += 1
        return scores + self.head.markov_w2(features).to(scores.dtype)


def is_rowwise(processors: LogitsProcessorList) -> bool:
    """Whether every processor looks at the scores alone, so that positions may be processed together."""
    return all(type(processor) in _ROWWISE for processor in processors)


def names_tokens(processors: LogitsProcessorList) -> bool:
    """Whether it may matter to a processor which token a score belongs to."""
    return not is_rowwise(processors) or any(type(processor) in _NAMING for processor in processors)


def is_stock(processor: LogitsProcessor) -> bool:
    """Whether it is one of transformers' processors. A subclass of one may do anything."""
    return type(processor).__module__ == stock.__name__


def is_stateless_stock(processor: LogitsProcessor) -> bool:
    """Whether it is one of transformers' processors, and not of the few that remember their calls."""
    return is_stock(processor) and not isinstance(processor, _STATEFUL)


def drafting_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """
    The processors to apply to drafts: transformers' stateless ones.

    Any other may keep a state, and a call for a draft that is then rejected would corrupt it. A copy would not help: its
    state may lie elsewhere, and it may hold a whole model. So it sees one call per committed token, as in plain
    `generate`. That costs acceptance and never exactness: verification takes into account what the draft was drawn from.
    """
    return LogitsProcessorList(processor for processor in processors if is_stateless_stock(processor))
