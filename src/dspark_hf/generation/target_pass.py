"""Verification for one row: runs the target over the drafts and removes rejected ones from its cache."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..transformers_names import extended_model_kwargs, is_callers_cache, is_compiled
from .growing_cache import begin_growing, end_growing
from .pass_mode import make_ordinary
from .rollback import Rollback
from .rollback_trial import check_target
from .target_model import TargetModel, TargetOutput
from .telemetry import stage


class TargetPass(TargetModel):
    """
    Runs the target over the prompts (see [`~dspark_hf.generation.prompt_pass.feed_prompt`]) and then, for one row, over
    `[anchor, drafts]`.

    Args: as in [`TargetModel`].

    Attributes:
        num_owed (`int`):
            Committed tokens that left the cache with a rejected draft, because it holds states that cannot be cropped. They
            are fed again in front of the next anchor.

    Raises:
        ValueError: when the target's cache is off or cannot be rolled back.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ending = contextlib.ExitStack()  # What has to be undone when the call ends.
        check_target(self.model, self.cache, self.model_kwargs.get("attention_mask"))
        self._rollback = Rollback(self.cache)
        self.num_owed = 0
        self._num_fed = 1
        self._fed_ids = torch.empty(1, 0, dtype=torch.long)
        self._is_verifying = False
        self._owed_pass: tuple[torch.Tensor, dict[str, Any], int] | None = None

    def begin_rounds(self) -> None:
        """Called after the pass over the prompt."""
        self._begin_rollback()
        self.commit([1])

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
        self._num_fed, self._fed_ids, self._is_verifying = self.num_owed + 1 + num_drafts, candidates, True
        kwargs = extended_model_kwargs(self.model, self.model_kwargs, num_drafts)
        if num_drafts:
            with self.mode():
                self._rollback.save()
        output = self.forward(candidates, self._num_fed, num_drafts + 1, kwargs)
        if self.cache is not self._rollback.cache:
            self._end_rollback()
            self._begin_rollback()
        return [output]

    def commit(self, num_committed: list[int]) -> None:
        """
        Ends a round: removes the tokens from the cache that do not belong to the output, and the last one that does.

        As in plain `generate`, the last committed token is not in the cache: it is the next anchor.

        Args:
            num_committed: Tokens that the pass added to the output.
        """
        with stage("cache handling"):
            count, before = num_committed[0], self.model_kwargs
            num_rejected = self._num_fed - self.num_owed - count
            with self.mode():
                self.num_owed = self._rollback.take_back(self._num_fed, num_rejected)
            self.model_kwargs = extended_model_kwargs(self.model, before, count)
            if self.num_owed and count:  # Of a pass that added nothing, the tokens before it are still owed.
                self._owed_pass = self._fed_ids[:, : self._fed_ids.shape[1] - num_rejected], before, count - 1
            self._is_verifying = False

    def keep_rows(self, rows: list[int]) -> None:
        """Does nothing, because there is only one row."""

    def finish(self, num_new: int) -> Any:
        """The target's cache, as plain `generate` leaves it; `num_new` is the number of tokens after the prompt."""
        if self.generation_config.return_dict_in_generate:
            self._feed_owed()
        self.end()
        return self.cache

    def end(self) -> None:
        """Leaves the target as it was before the call, and its cache with all tokens but the last."""
        self.ending.close()
        if is_callers_cache(self.cache) and not self._is_verifying:
            self._feed_owed()
        self._end_rollback()
        make_ordinary(self.model, self.cache if self.keeps_cache else None)

    def _feed_owed(self) -> None:
        """Feeds the tokens that left the cache with a rejected draft, as no round follows that would."""
        if self.num_owed and self._owed_pass is not None:
            ids, kwargs, num_new = self._owed_pass
            self.forward(ids, self.num_owed, 1, extended_model_kwargs(self.model, kwargs, num_new))
            with self.mode():
                self.num_owed = self._rollback.take_back(self.num_owed, 0)

    def _begin_rollback(self) -> None:
        if not is_compiled(self.model):  # A compiled one would be compiled again whenever the buffers grow.
            begin_growing(self.cache)
        self._rollback.begin(self.cache)

    def _end_rollback(self) -> None:
        cache = self._rollback.cache
        self._rollback.end()
        end_growing(cache, self.keeps_cache)
