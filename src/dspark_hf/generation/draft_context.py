"""The drafter's context: keys and values in its cache, and target features that are not projected yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..draft_cache import DraftCache
from ..drafter import Drafter
from .pass_mode import pass_mode
from .telemetry import stage

_FEW_TOKENS = 64  # Up to this many tokens per row, context is projected for all layers together, where the drafter can.
_MAX_PENDING = 256  # Rounds whose features are kept before they are projected.


class DraftContext:
    """
    The context of the rows of one `generate` call.

    Features are collected first and projected together when a draft needs them. So rounds without drafts cost nothing here.

    Args:
        drafter: The drafter.
        num_rows: Rows of the call.

    Attributes:
        cache (`DraftCache`): Keys and values of the tokens whose features are projected.
        first_positions (`list[int]`):
            Position of each row's first context token. Not 0 when the target's cache holds tokens whose features are not
            available.
        mode (`PassMode`): The context for what the drafter computes.
    """

    def __init__(self, drafter: Drafter, num_rows: int = 1):
        self.drafter = drafter
        self.cache = drafter.new_cache(num_rows)
        self.first_positions = [0] * num_rows
        self.mode = pass_mode(drafter)
        self._projection = drafter.context_projection()
        self._pending: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]

    def add(self, context_features: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """
        Adds the features of final tokens: those of the prompt, then those that each round committed.

        Args:
            context_features: The tapped hidden states of each row, `[T_row, m * D_target]`.
            counts: How many leading ones of each row are final.
        """
        for pending, features, count in zip(self._pending, context_features, counts, strict=True):
            pending.append(features[:count])
        if len(self._pending[0]) >= _MAX_PENDING:
            self.project()

    def add_prompt(self, context_features: torch.Tensor, attended: torch.Tensor | None) -> None:
        """
        Adds the features of a prompt, or of a chunk of it, leaving out padding.

        Args:
            context_features: `[B, T, m * D_target]`.
            attended: False at padding, `[B, T]`; `None` without padding.
        """
        rows = list(context_features)
        if attended is not None:
            attended = attended.to(context_features.device)
            rows = [row[keep] for row, keep in zip(rows, attended, strict=True)]
        self.add(rows, [len(row) for row in rows])
        self.project()  # Now, because the features of a long prompt are larger than its keys and values.

    def project(self) -> None:
        """Projects the collected features."""
        if not any(self._pending):
            return
        with stage("context features"), self.mode():
            self._project([torch.cat(pending).to(self.drafter.device) for pending in self._pending])
        self._pending = [[] for _ in self._pending]

    def get_ready(self, input_ids: Sequence[torch.Tensor]) -> None:
        """
        Extends the cache up to the anchor of the coming draft.

        Args:
            input_ids: All tokens of each row, the anchor last, `[1, L_row]`.
        """
        self.project()

    def complete(self, input_ids: Sequence[torch.Tensor]) -> DraftCache:
        """The cache over all tokens of each row `[1, L_row]` but the last, for a later call that continues the row."""
        self.project()
        return self.cache

    def next_positions(self, num_tokens: int) -> torch.Tensor:
        """Absolute positions of the `num_tokens` tokens after each row's context, `[B, num_tokens]`."""
        lengths, device = zip(self.cache.lengths, self.first_positions, strict=True), self.drafter.device
        starts = [length + first for length, first in lengths]
        if len(set(starts)) == 1:
            return torch.arange(starts[0], starts[0] + num_tokens, device=device).expand(len(starts), -1)
        starts_there = torch.tensor(starts).to(device, non_blocking=True)  # Waits for nothing, unlike `device=`.
        return starts_there[:, None] + torch.arange(num_tokens, device=device)

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows."""
        self.cache.select_rows(rows)
        self.first_positions = [self.first_positions[row] for row in rows]
        self._pending = [list(self._pending[row]) for row in rows]

    def of_new_row(self) -> DraftContext:
        """An empty context of one row."""
        return DraftContext(self.drafter)

    def replace_row(self, row: int, other: DraftContext) -> None:
        """Gives a row the context of a context of one row."""
        self.project()
        other.project()
        self.cache.replace_row(row, other.cache)
        self.first_positions[row] = other.first_positions[0]

    def _project(self, rows: list[torch.Tensor]) -> None:
        """Adds the features of each row, `[T_row, m * D_target]`, to the cache."""
        counts = [len(row) for row in rows]
        features = rows[0][None] if len(rows) == 1 else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        arguments = self.cache, features, self.next_positions(features.shape[1]), counts
        # For a prompt, one product per layer is large enough, and a joint one would hold all keys and values twice for a moment.
        if self._projection is None or features.shape[1] > _FEW_TOKENS:
            self.drafter.extend_cache(*arguments)
        else:
            self.drafter.extend_cache(*arguments, projection=self._projection)
