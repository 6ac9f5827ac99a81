"""The drafter's memory of the context: for each stage the rows of the tokens just before the anchor, and nothing older."""

from __future__ import annotations

import torch

from ...draft_cache import DraftCache

_NEVER = -1  # The position of places that hold nothing yet.


class WindowCache(DraftCache):
    """
    Context rows of every stage, for `B` rows of different lengths, in a ring of as many places as the window has tokens.

    A token's place is its position modulo the window, so a new token takes the place of the one that has left the window, and
    the memory does not grow with the context. A stage's rows are keys and values at once, and stay on the device of the stage.
    """

    def __init__(self, num_layers: int, num_rows: int, window: int):
        super().__init__(num_layers, num_rows)
        self.window = window
        self._rings: list[torch.Tensor] = []  # Of each stage `[B, 1, window, head_dim]`; made with the first tokens.

    def append(
        self,
        key_values: list[tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        counts: list[int] | None = None,
    ) -> None:
        """As in [`DraftCache`]; of each row the last tokens are kept, as many as the window has."""
        counts = [position_ids.shape[1]] * self.num_rows if counts is None else counts
        self._make([keys for keys, _ in key_values])
        for row, count in enumerate(counts):
            new = slice(max(count - self.window, 0), count)
            positions = position_ids[row, new].to(self.positions.device)
            places = positions % self.window
            self.positions[row, places] = positions
            for ring, (keys, _) in zip(self._rings, key_values, strict=True):
                ring[row, :, places.to(ring.device)] = keys[row, :, new]
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def with_block(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[B, 1, window + G, head_dim]`, those of the context in the order of their places, as keys and as values."""
        if not self._rings:  # Nothing is known of the context.
            return keys, values
        rows = torch.cat([self._rings[layer], keys], dim=2)
        return rows, rows

    def mask(self, query_positions: torch.Tensor) -> torch.Tensor:
        """What the slots of one block for each row see, `[B, 1, 1, window + G]`; their positions are `[B, G]`."""
        anchors, positions = query_positions[:, :1], self.positions.to(query_positions.device)
        # A cache that was taken back to an earlier token still holds later ones.
        context = (positions != _NEVER) & (positions < anchors) & (positions >= anchors - self.window)
        return torch.cat([context, context.new_ones(query_positions.shape)], dim=1)[:, None, None]

    def select_rows(self, rows: list[int]) -> None:
        super().select_rows(rows)
        self._rings = [ring[rows] for ring in self._rings]

    @property
    def num_bytes(self) -> int:
        return sum(ring.numel() * ring.element_size() for ring in self._rings)

    def _make(self, like: list[torch.Tensor]) -> None:
        """The rings, once it is known where the stages are and of which type their rows."""
        if self._rings:
            return
        # Made in inference mode, they could not be written to outside of it, where a later call may continue.
        with torch.inference_mode(False), torch.no_grad():
            self.positions = torch.full((self.num_rows, self.window), _NEVER, device=like[0].device)
            shapes = [(*rows.shape[:2], self.window, rows.shape[3]) for rows in like]
            self._rings = [torch.zeros(s, dtype=r.dtype, device=r.device) for s, r in zip(shapes, like, strict=True)]
