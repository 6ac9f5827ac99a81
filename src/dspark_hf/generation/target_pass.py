"""Verification for one row: runs the target over the drafts and removes rejected ones from its cache."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ..transformers_names import extended_model_kwargs
from .pass_mode import make_ordinary
from .rollback import Rollback
from .target_model import TargetModel, TargetOutput
from .telemetry import stage


class TargetPass(TargetModel):
    """
    Runs the target over the prompts (see [`~dspark_hf.generation.prompt_pass.feed_prompt`]) and then, for one row, over
    `[anchor, drafts]`.

    Args: as in [`TargetModel`].

    Raises:
        ValueError: when the target's cache is off or cannot be rolled back.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.ending = contextlib.ExitStack()  # What has to be undone when the call ends.
        self._rollback = Rollback(self.model, self.cache)
        self._num_fed = 1

    def begin_rounds(self) -> None:
        """Called after the pass over the prompt."""
        self._rollback.begin(self.cache)
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
        candidates = torch.cat([input_ids[0], draft_ids[0].to(input_ids[0].device)], dim=1)
        self._num_fed = candidates.shape[1] - input_ids[0].shape[1] + 1
        kwargs = extended_model_kwargs(self.model, self.model_kwargs, self._num_fed - 1)
        output = self.forward(candidates, self._num_fed, self._num_fed, kwargs)
        if self.cache is not self._rollback.cache:
            self._rollback.end()
            self._rollback.begin(self.cache)
        return [output]

    def commit(self, num_committed: list[int]) -> None:
        """
        Ends a round: removes the tokens from the cache that do not belong to the output, and the last one that does.

        As in plain `generate`, the last committed token is not in the cache: it is the next anchor.

        Args:
            num_committed: Tokens that the pass added to the output.
        """
        with stage("cache handling"):
            with self.mode():
                self._rollback.take_back(self._num_fed - num_committed[0])
            self.model_kwargs = extended_model_kwargs(self.model, self.model_kwargs, num_committed[0])

    def keep_rows(self, rows: list[int]) -> None:
        """Does nothing, because there is only one row."""

    def finish(self, num_new: int) -> Any:
        """The target's cache, as plain `generate` leaves it; `num_new` is the number of tokens after the prompt."""
        self.end()
        return self.cache

    def end(self) -> None:
        """Leaves the target and its cache as they were before the call."""
        self.ending.close()
        self._rollback.end()
        make_ordinary(self.model, self.cache if self.keeps_cache else None)
