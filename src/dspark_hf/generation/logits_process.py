"""Which of the user's logits processors may be applied to drafts, and to several positions at once."""

from __future__ import annotations

import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as stock

# The result depends on the scores alone, so all positions of a round can be processed in one call.
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
# Of these, the ones that treat particular ids specially. For the others, tokens of probability 0 can be left out.
_NAMING = (stock.SuppressTokensLogitsProcessor,)
# Processors of transformers that remember earlier calls.
_STATEFUL = (
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    stock.SynthIDTextWatermarkLogitsProcessor,
    stock.WhisperTimeStampLogitsProcessor,
)


def processed(processors: LogitsProcessorList, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """The scores `[B, V]` after all processors, given the tokens so far, `[B, L]`."""
    return processors(input_ids, scores)  # type: ignore[arg-type]  # Declared for LongTensor, an older type of tensors.


def is_rowwise(processors: LogitsProcessorList) -> bool:
    """Whether every processor depends on the scores alone, so that positions may be processed together."""
    return all(type(processor) in _ROWWISE for processor in processors)


def names_tokens(processors: LogitsProcessorList) -> bool:
    """Whether the result of a processor may depend on which token a score belongs to."""
    return not is_rowwise(processors) or any(type(processor) in _NAMING for processor in processors)


def is_stock(processor: LogitsProcessor) -> bool:
    """Whether it is one of transformers' processors. Subclasses do not count, because they may do anything."""
    return type(processor).__module__ == stock.__name__


def is_stateless_stock(processor: LogitsProcessor) -> bool:
    """Whether it is one of transformers' processors, except for the few that remember earlier calls."""
    return is_stock(processor) and not isinstance(processor, _STATEFUL)


def drafting_processors(processors: LogitsProcessorList) -> LogitsProcessorList:
    """
    The processors to apply to drafts: transformers' stateless ones.

    Any other may keep state, which a call for a draft that is then rejected would corrupt. A copy would not help, because its
    state may be outside the object, and it may hold a whole model. So it is called once per committed token, as in plain
    `generate`. That lowers acceptance but never changes the distribution of the output, because verification takes into
    account what each draft was drawn from.
    """
    return LogitsProcessorList(processor for processor in processors if is_stateless_stock(processor))
