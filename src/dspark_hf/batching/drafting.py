"""The drafter's part of continuous batching: the drafts of the rows that are there, and whether they pay."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LogitsProcessorList

from ..drafter import Drafter
from ..generation.candidate_generator import Draft, no_draft
from ..generation.draft_settings import DraftOptions, backoff_of, draft_settings
from ..generation.generators import generator_of
from ..generation.target_model import TargetOutput
from ..transformers_names import GenerativeModel
from .row import Row


class RowsDrafting:
    """
    Drafts for rows that come and go. The scheduler sees those that are there, so it verifies less under load.

    Args:
        drafter: The drafter.
        target: The target.
        max_rows: Most rows at a time.
        options: Settings of drafting.

    Raises:
        ValueError: for settings that do not fit the drafter.
    """

    def __init__(self, drafter: Drafter, target: GenerativeModel, max_rows: int, options: DraftOptions):
        num_drafts, scheduler = draft_settings(drafter, target, options)
        self._generator = generator_of(drafter)(
            drafter, target, [LogitsProcessorList()], num_draft_tokens=num_drafts, scheduler=scheduler
        )
        self._backoff = backoff_of(drafter, target, scheduler, max_rows, options.drafting_backoff)
        self._places: list[int] = []
        self._wanted: list[bool] = []
        self._max_drafts: list[int] = []
        self._lengths: list[int] = []

    def add_row(self, place: int, num_rows: int) -> None:
        """Begins a row in place `place` of `num_rows`: that of a row that has ended, or a new one behind the others."""
        context = self._generator.context
        own = context.of_new_row()
        if num_rows == 1:
            self._generator.context = own
        else:
            if place == context.cache.num_rows:
                context.keep_rows([*range(place), 0])
            context.replace_row(place, own)

    def begin_prompt(self, place: int, features: torch.Tensor) -> None:
        """Gives a row that was just added the features of its prompt, `[T, m * D_target]`."""
        own = self._generator.context.of_new_row()
        own.add_prompt(features[None], None)
        self._generator.context.replace_row(place, own)

    def keep_rows(self, places: list[int]) -> None:
        """Keeps only the rows at these places."""
        if places:
            self._generator.context.keep_rows(places)

    def begin_account(self, account: int) -> None:
        """Begins the account of back-off of a new row."""
        self._backoff.begin_row(account)

    def draft(self, rows: Sequence[Row]) -> list[Draft]:
        """The drafts of each row that are sent to the target."""
        generator = self._generator
        self._places = [row.place for row in rows]
        self._wanted = self._backoff.wants_drafts(self._places)
        most = generator.num_draft_tokens
        # The last free place of an output is not for a draft, because a round always adds one token of the target.
        pairs = zip(rows, self._wanted, strict=True)
        self._max_drafts = [min(most, row.output.room - 1) if wants else 0 for row, wants in pairs]
        if any(row.ids.shape[1] == 1 for row in rows):  # A drafter has nothing to start from before the first token.
            self._max_drafts = [0] * len(rows)
        generator.rows = [row.serial for row in rows]
        generator.logits_processors = [row.drafting_processors for row in rows]
        generator.races = [row.races for row in rows]
        drafted = generator.draft([row.ids for row in rows], self._max_drafts) if any(self._max_drafts) else None
        drafted = no_draft(len(rows)) if drafted is None else drafted
        self._lengths = drafted.lengths
        return [drafted.of_row(index) for index in range(len(rows))]

    def observe(self, fed: Sequence[TargetOutput], counts: Sequence[int]) -> None:
        """Adds the tokens that a round committed to the context of each row, and accounts for the round."""
        self._generator.context.add([output.context_features[0] for output in fed], counts)
        if any(self._max_drafts) or not any(self._wanted):
            accepted = [max(count - 1, 0) for count in counts]
            self._backoff.observe(self._places, self._lengths, accepted, has_drafted=any(self._max_drafts))
