"""Verification for one row: runs the target over the drafts and removes rejected ones from its cache."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch

from ..transformers_names import extended_model_kwargs, is_callers_cache, is_compiled
from .growing_cache import begin_growing, end_growing
from .pass_mode import make_ordinary
from .rollback import Rollback
from .rollback_trial import check_target
from .target_model import TargetModel, TargetOutput
from .telemetry import stage


@dataclass
class TargetPass(TargetModel):
    """
    Runs the target over the prompts (see [`~dspark_hf.generation.prompt_pass.feed_prompt`]) and then, for one row, over
    `[anchor, drafts]`.

    Args: as in [`TargetModel`], and:
        num_rows: Prompts of the call.

    Attributes:
        num_owed (`list[int]`):
            Of each row, committed tokens that left the cache with a rejected draft, because it holds states that cannot be
            cropped. They are fed again in front of the next anchor.

    Raises:
        ValueError: when the target's cache is off or cannot be rolled back.
    """

    num_rows: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ending = contextlib.ExitStack()  # What has to be undone when the call ends.
        mask, max_length = self.model_kwargs.get("attention_mask"), self.generation_config.max_length
        check_target(self.model, self.cache, mask, max_length)
        self._rollback = Rollback(self.cache)
        self.num_owed = [0]
        self._num_fed = 0
        self._is_verifying = False

    def begin_rounds(self) -> None:
        """Called after the pass over the prompt."""
        self._begin_rollback()

    def verify(self, input_ids: list[torch.Tensor], draft_ids: list[torch.Tensor]) -> list[TargetOutput]:
        """
        Runs the target over the anchor and the drafts of one row.

        Args:
            input_ids: All committed tokens, the anchor last, `[1, L]`.
            draft_ids: `[1, N]`.

        Returns:
            Logits and features of these `N + 1` tokens.
        """
        num_drafts = draft_ids[0].shape[1]
        candidates = torch.cat([input_ids[0], draft_ids[0].to(input_ids[0].device)], dim=1)
        self._num_fed, self._is_verifying = self.num_owed[0] + 1 + num_drafts, True
        kwargs = extended_model_kwargs(self.model, self.model_kwargs, num_drafts + 1)
        if num_drafts:
            with self.mode():
                self._rollback.save()
        output = self.forward(candidates, self._num_fed, num_drafts + 1, kwargs)
        if self.cache is not self._rollback.cache:
            self._end_rollback()
            self._begin_rollback(is_fed=True)
        return [output]

    def commit(self, num_committed: list[int]) -> None:
        """
        Ends a round: removes the tokens from the cache that do not belong to the output, and the last one that does.

        As in plain `generate`, the last committed token is not in the cache: it is the next anchor.

        Args:
            num_committed: Tokens that the pass added to the output.
        """
        with stage("cache handling"):
            count = num_committed[0]
            num_rejected = self._num_fed - self.num_owed[0] - count
            with self.mode():
                self.num_owed = [self._rollback.take_back(self._num_fed, num_rejected)]
            self.model_kwargs = extended_model_kwargs(self.model, self.model_kwargs, count)
            self._is_verifying = False

    def keep_rows(self, rows: list[int]) -> None:
        """Does nothing, because there is only one row."""

    def finish(self, sequences: torch.Tensor, num_new: list[int]) -> Any:
        """
        The target's cache, as plain `generate` leaves it.

        Args:
            sequences: All tokens of the one row, `[1, L]`.
            num_new: Tokens after its prompt.
        """
        if self.keeps_cache:
            self.complete(sequences[:, :-1])
        self.end()
        return self.cache

    def end(self, input_ids: torch.Tensor | None = None) -> None:
        """
        Leaves the target as it was before the call.

        Args:
            input_ids: All committed tokens of a call that was interrupted, `[1, L]`: the caller's cache gets all but the last.
        """
        self.ending.close()
        if input_ids is not None and is_callers_cache(self.cache) and not self._is_verifying:
            self.complete(input_ids[:, :-1])
        self._end_rollback()
        make_ordinary(self.model, self.cache if self.keeps_cache else None)

    def complete(self, input_ids: torch.Tensor, num_more: int = 0) -> None:
        """
        Feeds what the cache lacks of a row, as no round follows that would.

        Args:
            input_ids: All that the cache is to hold, `[1, L]`.
            num_more: How many of them are padding behind a row that ended early, and the last token before it.
        """
        if num_fed := self.num_owed[0] + num_more:
            self.forward(input_ids, num_fed, 1, extended_model_kwargs(self.model, self.model_kwargs, num_more))
            with self.mode():
                self.num_owed = [self._rollback.take_back(num_fed, 0)]

    def _begin_rollback(self, is_fed: bool = False) -> None:
        if not is_compiled(self.model):  # A compiled one would be compiled again whenever the buffers grow.
            begin_growing(self.cache)
        self._rollback.begin(self.cache, is_fed)

    def _end_rollback(self) -> None:
        cache = self._rollback.cache
        self._rollback.end()
        end_growing(cache, self.keeps_cache)
