"""The drafter's key/value cache: context features are projected once and kept in preallocated buffers.

Only context is kept (paper section 3.1). The keys and values of a block are written after it for the one pass that needs
them, and the next block overwrites them. So nothing is concatenated or cropped, and the memory depends on the number of
committed tokens alone.
"""

from __future__ import annotations

import torch

_GROWTH = 256  # Buffers grow in steps of this many positions.


class DraftCache:
    """
    Context keys and values of every draft layer, for `B` rows of different lengths.

    Attributes:
        lengths (`list[int]`): Context tokens held for each row.
        positions (`torch.Tensor` of shape `[B, capacity]`): Absolute position of each held token.
        num_steps (`int`): Slots of the current block that earlier passes wrote, for drafters that need several passes per block.
    """

    def __init__(self, num_layers: int, num_rows: int = 1):
        self.num_rows = num_rows
        self.lengths = [0] * num_rows
        self.num_steps = 0
        self.positions = torch.zeros(num_rows, 0, dtype=torch.long)
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    @property
    def max_length(self) -> int:
        """Context tokens of the longest row; the block is written from this index on in every row."""
        return max(self.lengths)

    def append(
        self,
        key_values: list[tuple[torch.Tensor, torch.Tensor]],
        position_ids: torch.Tensor,
        counts: list[int] | None = None,
    ) -> None:
        """
        Adds context: the first `counts[r]` of the given tokens to row `r`.

        Args:
            key_values: For each layer its rotated keys and its values, `[B, H_kv, T, head_dim]`.
            position_ids: Their absolute positions, `[B, T]`.
            counts: Tokens to keep of each row; all of them by default.
        """
        num_new = position_ids.shape[1]
        counts = [num_new] * self.num_rows if counts is None else counts
        self._reserve(max(n + c for n, c in zip(self.lengths, counts, strict=True)), key_values)
        for row, (start, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if not count:
                continue
            self.positions[row, start : start + count] = position_ids[row, :count]
            for layer, (keys, values) in enumerate(key_values):
                self._keys[layer][row, :, start : start + count] = keys[row, :, :count]  # type: ignore[index]
                self._values[layer][row, :, start : start + count] = values[row, :, :count]  # type: ignore[index]
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def with_block(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Writes the block's keys and values after the context and returns views over both, without keeping the block.

        Args:
            layer: Index of the draft layer.
            keys, values: The block's, `[B, H_kv, G, head_dim]`.

        Returns:
            Keys and values `[B, H_kv, max_length + num_steps + G, head_dim]`. Columns `lengths[r]` to `max_length` of row
            `r` are unused, so the attention mask has to exclude them.
        """
        start, size = self.max_length + self.num_steps, keys.shape[2]
        if self._keys[layer] is None or self._keys[layer].shape[2] < start + size:  # type: ignore[union-attr]
            self._reserve(start + size, [(keys, values)] * len(self._keys))
        key_buffer, value_buffer = self._keys[layer], self._values[layer]
        assert key_buffer is not None and value_buffer is not None
        key_buffer[:, :, start : start + size] = keys
        value_buffer[:, :, start : start + size] = values
        return key_buffer[:, :, : start + size], value_buffer[:, :, : start + size]

    def select_rows(self, rows: list[int]) -> None:
        """Keeps only the given rows, in the given order."""
        index = torch.tensor(rows, dtype=torch.long, device=self.positions.device)
        self.positions = self.positions.index_select(0, index)
        self._keys = [None if k is None else k.index_select(0, index.to(k.device)) for k in self._keys]
        self._values = [None if v is None else v.index_select(0, index.to(v.device)) for v in self._values]
        self.lengths = [self.lengths[row] for row in rows]
        self.num_rows = len(rows)

    @property
    def num_bytes(self) -> int:
        """Bytes held by the key and value buffers."""
        return sum(t.numel() * t.element_size() for t in (*self._keys, *self._values) if t is not None)

    def _reserve(self, needed: int, like: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        if needed <= self.positions.shape[1]:
            return
        # Growing by half as well keeps the cost of all copies linear in the final length.
        capacity = max(needed + _GROWTH, self.positions.shape[1] * 3 // 2)
        self.positions = _grown(self.positions, capacity, 1, like[0][0].device)
        for layer, (keys, values) in enumerate(like):
            self._keys[layer] = _grown_like(self._keys[layer], keys, capacity)
            self._values[layer] = _grown_like(self._values[layer], values, capacity)


def _grown(old: torch.Tensor, capacity: int, dim: int, device: torch.device) -> torch.Tensor:
    shape = list(old.shape)
    shape[dim] = capacity
    # Made in inference mode, they could not be written to outside of it, where a later call may continue.
    with torch.inference_mode(False), torch.no_grad():
        new = torch.zeros(shape, dtype=old.dtype, device=device)
        new.narrow(dim, 0, old.shape[dim]).copy_(old)
    return new


def _grown_like(old: torch.Tensor | None, like: torch.Tensor, capacity: int) -> torch.Tensor:
    if old is None:
        old = like.new_zeros(like.shape[0], like.shape[1], 0, like.shape[3])
    return _grown(old, capacity, 2, old.device)
