"""The drafter's memory of the context: for each stage the rows of the tokens just before the anchor, and nothing older."""

from __future__ import annotations

import torch

from ...draft_cache import DraftCache

_NEVER = -1  # The position of places that hold nothing yet.


class WindowCache(DraftCache):
    """
    Context rows of every stage, for `B` rows of different lengths, in a ring of as many places as the window has tokens.

    A token's place is its position modulo the window, so a new token takes the place of the one that has left the window, and
    the memory does not grow with the context. A row is key and value at once: only keys are kept.
    """

    def __init__(self, num_layers: int, num_rows: int, window: int):
        super().__init__(num_layers, num_rows)
        self.window = window
        self.positions = torch.full((num_rows, window), _NEVER)

    def append(
        self,
        key_values: list[tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        counts: list[int] | None = None,
    ) -> None:
        """As in [`DraftCache`]; of each row the last tokens are kept, as many as the window has."""
        counts = [position_ids.shape[1]] * self.num_rows if counts is None else counts
        self._make(key_values)
        for row, count in enumerate(counts):
            new = slice(max(count - self.window, 0), count)
            positions = position_ids[row, new]
            places = positions % self.window
            self.positions[row, places] = positions
            for buffer, (keys, _) in zip(self._keys, key_values, strict=True):
                assert buffer is not None
                buffer[row, :, places.to(buffer.device)] = keys[row, :, new]
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def with_block(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows `[B, 1, window + G, head_dim]`, the context's in the order of their places, twice."""
        self._make([(keys, values)] * len(self._keys))
        context = self._keys[layer]
        assert context is not None
        rows = torch.cat([context, keys], dim=2)
        return rows, rows

    def mask(self, query_positions: torch.Tensor) -> torch.Tensor:
        """What the slots of one block for each row see, `[B, 1, 1, window + G]`; their positions are `[B, G]`."""
        anchors, positions = query_positions[:, :1], self.positions.to(query_positions.device)
        # A cache that was taken back to an earlier token still holds later ones.
        context = (positions != _NEVER) & (positions < anchors) & (positions >= anchors - self.window)
        return torch.cat([context, context.new_ones(query_positions.shape)], dim=1)[:, None, None]

    def _make(self, like: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The buffers, once it is known where the drafter's layers are and of which type its states."""
        if self._keys[0] is not None:
            return
        self.positions = self.positions.to(like[0][0].device)
        for layer, (keys, _) in enumerate(like):
            self._keys[layer] = keys.new_zeros(keys.shape[0], keys.shape[1], self.window, keys.shape[3])
