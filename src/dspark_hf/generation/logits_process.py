"""Logits processors on the drafter's side: the sequential head as one, and which of the user's may run there."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

from ..heads import SequentialHead
from ..transformers_names import allowed_tokens_function

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
# Of these, the ones that name tokens; the others see no difference where only tokens of probability 0 are left out.
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

    It runs ahead of the user's processors, so that drafts are warped exactly like the target's tokens. Call
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


class DraftWarper:
    """
    Applies each row's processors to the scores of one slot after another.

    Args:
        processors: Of each row, those of [`drafting_processors`].
        input_ids: Of each row all tokens so far, `[1, L_row]`.

    Attributes:
        ignores_token_ids (`bool`): Whether it does not matter which token a score belongs to.
    """

    def __init__(self, processors: Sequence[LogitsProcessorList], input_ids: Sequence[torch.Tensor]):
        self._together = all(is_rowwise(own) for own in processors)
        self.ignores_token_ids = self._together and not any(type(p) in _NAMING for own in processors for p in own)
        self._processors = processors
        self._sequences = [] if self._together else list(input_ids)

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """`[B, V]` -> `[B, V]`, over the draft vocabulary where [`~DraftWarper.ignores_token_ids`]."""
        if not any(self._processors):
            return scores
        if self._together:
            no_ids = torch.zeros(len(scores), 0, dtype=torch.long, device=scores.device)
            return self._processors[0](no_ids, scores)
        rows = zip(self._processors, self._sequences, scores.split(1), strict=True)
        return torch.cat([processors(ids, row) for processors, ids, row in rows])

    def append(self, token_ids: torch.Tensor) -> None:
        """Adds the token drawn in each row, `[B]`."""
        self._sequences = [
            torch.cat([ids, token[None, None]], dim=1)
            for ids, token in zip(self._sequences, token_ids if self._sequences else (), strict=True)
        ]


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


def processors_for_row(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """
    The processors as one row of a batch sees them, called with that row alone.

    Rows differ in length, so they are processed one by one. What a processor knows of the batch is cut to the row; one
    that may remember calls (any but the stateless stock ones) gets a copy of its own for each row.
    """
    if num_rows == 1:
        return processors
    return LogitsProcessorList(_for_row(processor, row) for processor in processors)


def _for_row(processor: LogitsProcessor, row: int) -> LogitsProcessor:
    if isinstance(processor, stock.PrefixConstrainedLogitsProcessor):
        allowed = allowed_tokens_function(processor)
        return stock.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(row, sent), num_beams=1)
    if isinstance(processor, stock.EncoderNoRepeatNGramLogitsProcessor):
        own = copy.copy(processor)
        own.batch_size, own.generated_ngrams = 1, [processor.generated_ngrams[row]]
        return own
    for name in ("encoder_input_ids", "prompt_ignore_length"):  # Repetition penalties: what they know of each prompt.
        if isinstance(getattr(processor, name, None), torch.Tensor):
            own = copy.copy(processor)
            setattr(own, name, getattr(processor, name)[row : row + 1])
            return own
    if isinstance(processor, stock.UnbatchedClassifierFreeGuidanceLogitsProcessor):
        own = copy.copy(processor)  # Shares the model, not what it has computed.
        own.unconditional_context = {
            key: value[row : row + 1] if isinstance(value, torch.Tensor) else value
            for key, value in processor.unconditional_context.items()
        }
        return own
    if type(processor).__module__ == stock.__name__ and not isinstance(processor, _STATEFUL):
        return processor
    return copy.deepcopy(processor)
