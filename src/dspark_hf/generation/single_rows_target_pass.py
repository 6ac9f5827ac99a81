"""Verification for several rows in separate passes, for targets whose states cannot be shared by rows of different lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from ..transformers_names import CACHE_KEY
from .row_caches import cache_of_row, join_rows
from .target_model import TargetOutput
from .target_pass import TargetPass

logger = logging.get_logger(__name__)


class SingleRowsTargetPass:
    """
    Verifies each row as if it were alone; takes over from a [`TargetPass`] that has fed their prompts together.

    A round takes a pass for each row that is still being decoded, where plain `generate` takes one for all.

    Args:
        prompt: The pass that fed the prompts.
        reason: Why rows do not share passes, as the part of a sentence that follows "because".
    """

    def __init__(self, prompt: TargetPass, reason: str):
        logger.warning_once(
            f"Each row takes passes of {type(prompt.model).__name__} of its own, because {reason}. The output is the same, but "
            "for several rows plain generate may be faster."
        )
        self._prompt = prompt
        self._all = [self._row(row) for row in range(prompt.num_rows)]
        self._num_new = [1] * prompt.num_rows  # Tokens after each prompt, as far as its cache knows.
        self._rows = list(range(prompt.num_rows))

    @property
    def num_owed(self) -> list[int]:
        """Of each row, the committed tokens that are to be fed again."""
        return [self._all[row].num_owed[0] for row in self._rows]

    def verify(self, input_ids: list[torch.Tensor], draft_ids: list[torch.Tensor]) -> list[TargetOutput]:
        """As [`TargetPass.verify`], of each row."""
        parts = zip(self._rows, input_ids, draft_ids, strict=True)
        return [self._all[row].verify([ids], [drafts])[0] for row, ids, drafts in parts]

    def commit(self, num_committed: list[int]) -> None:
        """Ends a round: each row keeps its committed tokens but the last, which is the next anchor."""
        for row, count in zip(self._rows, num_committed, strict=True):
            self._num_new[row] += max(count, 0)
            self._all[row].commit([max(count, 0)])

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows still being decoded."""
        self._rows = [self._rows[place] for place in rows]

    def finish(self, sequences: torch.Tensor, num_new: list[int]) -> Any:
        """
        The caller's cache as plain `generate` leaves it: rows that ended early have been fed padding.

        Args:
            sequences: All rows, padded on the right, `[B, L]`.
            num_new: Tokens after each row's prompt.
        """
        if self._prompt.keeps_cache:
            caches = []
            for row, ids in enumerate(sequences.split(1)):
                if self._num_new[row] > num_new[row]:  # It was ahead when a criterion ended the batch.
                    self._all[row], self._num_new[row] = self._row(row), 1
                own = self._all[row]
                own.complete(ids[:, :-1], max(num_new) - self._num_new[row])
                own.end()
                caches.append(own.cache)
            join_rows(self._prompt.cache, caches)
        self._prompt.end()
        return self._prompt.cache

    def _row(self, row: int) -> TargetPass:
        """A row as the pass over the prompts left it."""
        prompt, num_rows = self._prompt, self._prompt.num_rows
        model_kwargs = {name: _of_row(value, row, num_rows) for name, value in prompt.model_kwargs.items()}
        model_kwargs[CACHE_KEY] = cache_of_row(prompt.cache, row, num_rows)
        own = replace(prompt, model_kwargs=model_kwargs, num_rows=1)
        own.begin_rounds()
        return own


def _of_row(value: Any, row: int, num_rows: int) -> Any:
    """One row of an argument of the model: rows are the first axis, or the last but one of positions with several axes."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    axis = 0 if len(value) == num_rows else value.dim() - 2
    return value.narrow(axis, row, 1) if value.shape[axis] == num_rows else value
