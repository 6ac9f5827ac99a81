"""What the drafter knows of the tokens so far: keys and values in its cache, and features that still have to be projected."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..draft_cache import DraftCache
from ..drafter import Drafter
from .telemetry import stage

_MAX_PENDING = 256  # Rounds whose features are kept before they are projected.


class DraftContext:
    """
    The context of the rows of one `generate` call.

    Features are only kept when they come and are projected together once a draft needs them: while drafting pauses, they cost
    nothing.

    Args:
        drafter: The drafter.
        num_rows: Rows of the call.

    Attributes:
        cache (`DraftCache`): Keys and values of the tokens whose features are projected.
        first_positions (`list[int]`):
            Position of each row's first context token. It is not 0 when the target's cache holds tokens that the drafter
            cannot know.
    """

    def __init__(self, drafter: Drafter, num_rows: int = 1):
        self.drafter = drafter
        self.cache = drafter.new_cache(num_rows)
        self.first_positions = [0] * num_rows
        self._pending: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]

    def add(self, context_features: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """
        Takes in the features of tokens that are final: of the prompt, then of what each round committed.

        Args:
            context_features: Of each row its tapped hidden states, `[T_row, m * D_target]`.
            counts: How many of them, from the first, are final.
        """
        for pending, features, count in zip(self._pending, context_features, counts, strict=True):
            pending.append(features[:count])
        if len(self._pending[0]) >= _MAX_PENDING:
            self.project()

    def add_prompt(self, context_features: torch.Tensor, attended: torch.Tensor | None) -> None:
        """
        Takes in the features of a prompt, or of a chunk of it, without padding.

        Args:
            context_features: `[B, T, m * D_target]`.
            attended: False at padding, `[B, T]`; `None` when there is none.
        """
        rows = list(context_features)
        if attended is not None:
            attended = attended.to(context_features.device)
            rows = [row[keep] for row, keep in zip(rows, attended, strict=True)]
        self.add(rows, [len(row) for row in rows])
        self.project()  # At once: the features of a long prompt are larger than its keys and values.

    def project(self) -> None:
        """Projects the features that still have to be."""
        if not any(self._pending):
            return
        with stage("context features"):
            self._project([torch.cat(pending).to(self.drafter.device) for pending in self._pending])
        self._pending = [[] for _ in self._pending]

    def get_ready(self, input_ids: Sequence[torch.Tensor]) -> None:
        """
        Brings the cache up to where the coming draft starts.

        Args:
            input_ids: All tokens of each row, the anchor last, `[1, L_row]`.
        """
        self.project()

    def complete(self, input_ids: Sequence[torch.Tensor]) -> DraftCache:
        """The cache over all tokens of each row `[1, L_row]` but the last, for a later call to resume from."""
        self.project()
        return self.cache

    def next_positions(self, num_tokens: int) -> torch.Tensor:
        """Absolute positions of the `num_tokens` tokens after each row's context, `[B, num_tokens]`."""
        lengths = zip(self.cache.lengths, self.first_positions, strict=True)
        starts = torch.tensor([length + first for length, first in lengths], device=self.drafter.device)
        return starts[:, None] + torch.arange(num_tokens, device=starts.device)

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows."""
        self.cache.select_rows(rows)
        self.first_positions = [self.first_positions[row] for row in rows]
        self._pending = [self._pending[row] for row in rows]

    def _project(self, rows: list[torch.Tensor]) -> None:
        """Adds the features of each row, `[T_row, m * D_target]`, to the cache."""
        counts = [len(row) for row in rows]
        features = rows[0][None] if len(rows) == 1 else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        positions = self.next_positions(features.shape[1])
        self.drafter.extend_cache(self.cache, features, positions, counts)
