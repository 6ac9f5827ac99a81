"""Which of the user's logits processors may be applied where."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

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


def processed(processors: LogitsProcessorList, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores `[B, V]` as all processors leave them, given the tokens so far, `[B, L]`."""
    return processors(input_ids, scores)  # type: ignore[arg-type]  # Declared for LongTensor, an older type of tensors.


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
