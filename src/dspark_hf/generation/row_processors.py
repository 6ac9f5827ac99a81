"""The user's logits processors for each row of a batch. Rows differ in length, so each is processed separately."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase
from transformers.generation import logits_process as stock

from ..transformers_names import allowed_tokens_function
from .logits_process import is_stateless_stock, is_stock
from .requirements import CannotDraft

# Copies of a processor may share objects of these types, because calls do not change them.
_SHARED = (torch.nn.Module, PreTrainedTokenizerBase, type(threading.Lock()), type(threading.RLock()))


class ProcessorOfRow(LogitsProcessor):
    """
    Applies a processor that may hold a value per row of the batch to a single row.

    The processor is called with a batch in which every row is this one, and this row of the result is used. That is right for
    processors that treat all rows alike, and for those that hold a list, a temperature or a grammar per row. It is wrong only for
    a processor that compares rows with each other, which is not supported.

    Args:
        processor: A copy of the user's processor that no other row uses.
        row: Index of the row in the batch.
        num_rows: Rows of the batch.
    """

    def __init__(self, processor: LogitsProcessor, row: int, num_rows: int):
        self.processor = processor
        self.row = row
        self.num_rows = num_rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[1, L]`, `scores` `[1, V]` -> `[1, V]`."""
        processed = self.processor(input_ids.repeat(self.num_rows, 1), scores.repeat(self.num_rows, 1))
        return processed[self.row : self.row + 1]


def processors_for_row(processors: LogitsProcessorList, row: int, num_rows: int) -> LogitsProcessorList:
    """
    The processors to call with one row of a batch alone.

    Args:
        processors: As `generate` prepared them.
        row: Index of the row in the batch.
        num_rows: Rows of the batch.

    Raises:
        ValueError: when a processor that may remember its calls cannot be copied for each row.
    """
    if num_rows == 1:
        return processors
    return LogitsProcessorList(_for_row(processor, row, num_rows) for processor in processors)


def _for_row(processor: LogitsProcessor, row: int, num_rows: int) -> LogitsProcessor:
    # The per-row values of these processors of transformers are cut to this row, which is cheaper than a full batch. Not for
    # subclasses, which may hold other values too.
    if type(processor) is stock.PrefixConstrainedLogitsProcessor:
        allowed = allowed_tokens_function(processor)
        return stock.PrefixConstrainedLogitsProcessor(lambda _, sent: allowed(row, sent), num_beams=1)
    if type(processor) is stock.EncoderNoRepeatNGramLogitsProcessor:
        return _changed(processor, batch_size=1, generated_ngrams=[processor.generated_ngrams[row]])
    if type(processor) is stock.EncoderRepetitionPenaltyLogitsProcessor:
        return _changed(processor, encoder_input_ids=processor.encoder_input_ids[row : row + 1])
    if type(processor) is stock.RepetitionPenaltyLogitsProcessor and torch.is_tensor(processor.prompt_ignore_length):
        return _changed(processor, prompt_ignore_length=processor.prompt_ignore_length[row : row + 1])
    if type(processor) is stock.UnbatchedClassifierFreeGuidanceLogitsProcessor:
        context = {k: v[row : row + 1] if torch.is_tensor(v) else v for k, v in processor.unconditional_context.items()}
        return _changed(processor, unconditional_context=context)  # Shares the model, but not its cache.
    if is_stateless_stock(processor):
        return processor
    copied = _copied(processor)
    return copied if is_stock(processor) else ProcessorOfRow(copied, row, num_rows)


def _changed(processor: LogitsProcessor, **attributes: Any) -> LogitsProcessor:
    """A shallow copy with other values of some attributes."""
    changed = copy.copy(processor)
    vars(changed).update(attributes)
    return changed


def _copied(processor: LogitsProcessor) -> LogitsProcessor:
    """A deep copy that shares models, tokenizers and locks with the original."""
    shared = {id(value): value for value in getattr(processor, "__dict__", {}).values() if isinstance(value, _SHARED)}
    try:
        return copy.deepcopy(processor, shared)
    except Exception as error:  # Whatever its parts raise.
        raise CannotDraft(
            f"The logits processor {type(processor).__name__} cannot be copied ({type(error).__name__}: {error}), and each row "
            "needs a copy, since rows call it at different lengths. Give it a `__deepcopy__` that shares what cannot be copied "
            "(it may return `self` where calls leave nothing behind), or call generate for each row."
        ) from error
