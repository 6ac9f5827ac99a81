"""Verification for several rows of a target with recurrent state, in one pass for all of them."""

from __future__ import annotations

from typing import Any

import torch

from .shared_states import SharedStates
from .target_model import TargetOutput
from .target_pass import TargetPass
from .telemetry import stage

_MOST_OWED = 8  # Where a row is to feed more tokens again, a pass without drafts brings the rows up to date.


class SharedRowsTargetPass:
    """
    Verifies several rows at once; takes over from a [`TargetPass`] that has fed their prompts.

    Args:
        prompt: The pass that fed the prompts. Its cache must not outlive the call.

    Attributes:
        num_owed (`list[int]`): Of each row, the committed tokens that are to be fed again.
    """

    def __init__(self, prompt: TargetPass):
        self._prompt = prompt
        attended = prompt.attended_columns(0, prompt.past_length)
        self._shared = SharedStates(prompt.model, prompt.cache, attended, prompt.last_positions())
        self.num_owed = [0] * prompt.num_rows

    def verify(self, input_ids: list[torch.Tensor], draft_ids: list[torch.Tensor]) -> list[TargetOutput]:
        """
        Runs the target over each row's anchor and drafts.

        Args:
            input_ids: For each row all committed tokens, the anchor last, `[1, L_row]`.
            draft_ids: For each row its drafts, `[1, N_row]`.

        Returns:
            For each row the logits `[1, N_row + 1, V]` and features of these tokens.
        """
        rows = [ids[0] for ids in input_ids]
        with self._prompt.mode():
            if max(self.num_owed) > _MOST_OWED:
                self._catch_up(rows)
            parts = zip(rows, self.num_owed, draft_ids, strict=True)
            fed = [torch.cat([ids[len(ids) - 1 - owed :], drafts[0].to(ids.device)]) for ids, owed, drafts in parts]
            tap = self._prompt.tap
            with stage("target pass"), tap.reading():
                num_drafts = [drafts.shape[1] for drafts in draft_ids]
                output, _ = self._shared.feed(fed, any(num_drafts), output_hidden_states=tap.argument)
        logits = output.logits.to(device=rows[0].device, dtype=torch.float32, copy=True)
        features = tap.features(output)
        found = []
        for row, (ids, count) in enumerate(zip(fed, num_drafts, strict=True)):
            own = slice(len(ids) - count - 1, len(ids))
            found.append(TargetOutput(logits[row : row + 1, own], features[row : row + 1, own], None))
        return found

    def commit(self, num_committed: list[int]) -> None:
        """Ends a round: each row keeps its committed tokens but the last, which is the next anchor."""
        with stage("cache handling"), self._prompt.mode():
            kept = [owed + max(count, 0) for owed, count in zip(self.num_owed, num_committed, strict=True)]
            self.num_owed = self._shared.keep(kept)

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows still being decoded."""
        if rows:
            with self._prompt.mode():
                self._shared.select(rows)
        self.num_owed = [self.num_owed[row] for row in rows]

    def finish(self, sequences: torch.Tensor, num_new: list[int]) -> Any:
        """The cache of the prompts, which nobody will use."""
        self._prompt.end()
        return self._prompt.cache

    def _catch_up(self, rows: list[torch.Tensor]) -> None:
        """
        Feeds tokens that are owed, without drafts: as many of each row as the row that owes fewest of those that owe much.

        Rows that owe less are padded and return to where they were.
        """
        count = min(owed for owed in self.num_owed if owed > _MOST_OWED // 2)
        starts = [len(ids) - 1 - owed for ids, owed in zip(rows, self.num_owed, strict=True)]
        fed = [ids[start : start + min(count, max(owed, 1))] for ids, start, owed in zip(rows, starts, self.num_owed)]
        with stage("target pass"):
            self._shared.feed(fed, may_reject=False)
        kept = [min(count, owed) for owed in self.num_owed]
        left = self._shared.keep(kept)
        self.num_owed = [owed - (keeps - again) for owed, keeps, again in zip(self.num_owed, kept, left, strict=True)]
