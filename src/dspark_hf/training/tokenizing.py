"""Data as users give it to a trainer, conversations or tokens, in memory or streamed, as rows of tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedModel

from ..conversations.rows import encode_rows, encode_stream, end_token_ids
from .features import CachedFeatureDataset


@dataclass(frozen=True)
class Tokenizing:
    """
    Tokenizes conversations; rows that are tokens already stay as they are.

    Args:
        tokenizer: The target's; only conversations need one.
        target: Gives the tokens that end a turn.
        max_length: Rows are cut here.
        template_options: For the chat template.
    """

    tokenizer: Any
    target: PreTrainedModel
    max_length: int | None
    template_options: Mapping[str, Any]

    def __call__(self, data: Any) -> Any:
        """
        Args:
            data: A sequence of conversations or rows, a stream of them, a [`CachedFeatureDataset`], or a dictionary that
                names several. `None` and the name of a data set that the trainer knows stay as they are.

        Raises:
            ValueError: when rows are neither conversations nor tokens with a `loss_mask`, or there is no tokenizer.
        """
        if data is None or isinstance(data, (str, EncodedStream)):
            return data
        if isinstance(data, dict):
            return {name: self(part) for name, part in data.items()}
        if isinstance(data, CachedFeatureDataset):
            data.check_target(self.target)
            return data
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            return EncodedStream(data, self)
        if not len(data) or not self.is_conversation(data[0]):
            return data
        return encode_rows((data[i] for i in range(len(data))), **self.encoding)

    @property
    def encoding(self) -> dict[str, Any]:
        """The arguments of `encode_rows`."""
        return {
            "tokenizer": self.tokenizer,
            "max_length": self.max_length,
            "eos_token_ids": end_token_ids(self.target, self.tokenizer) or None,
            **self.template_options,
        }

    def is_conversation(self, row: Mapping[str, Any]) -> bool:
        """
        Whether a row is still to be tokenized.

        Raises:
            ValueError: as above.
        """
        if "input_ids" in row and "loss_mask" in row:
            return False
        if "input_ids" in row:
            raise ValueError(
                f"The rows have {sorted(row)} but no 'loss_mask': mark the tokens that the target generated with 1, and prompt "
                "and padding with 0, or give conversations instead."
            )
        if self.tokenizer is None:
            raise ValueError(f"The rows have {sorted(row)}: pass processing_class=tokenizer to have them tokenized.")
        return True


def pass_on_epoch(data: Any, epoch: int) -> None:
    """Tells a stream or a collator the epoch, if it has `set_epoch`."""
    if hasattr(data, "set_epoch"):
        data.set_epoch(epoch)


class EncodedStream(IterableDataset[dict[str, Any]]):
    """A stream of rows or conversations, each tokenized when it is read. It can be read again where the stream can."""

    def __init__(self, stream: Any, tokenizing: Tokenizing):
        self.stream = stream
        self.tokenizing = tokenizing

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = iter(self.stream)
        first = next(rows, None)
        if first is None:
            return
        if self.tokenizing.is_conversation(first):
            yield from encode_stream(chain([first], rows), **self.tokenizing.encoding)
        else:
            yield from chain([first], rows)

    def set_epoch(self, epoch: int) -> None:
        """Passed on to the stream, which may shuffle by it."""
        pass_on_epoch(self.stream, epoch)
