"""The drafter's key/value cache: context features are projected once and kept in preallocated buffers.

Only context is kept (paper section 3.1). The keys and values of a block are written after it for the one pass that needs
them, and the next block overwrites them. So nothing is concatenated or cropped, and the memory depends on the number of
committed tokens alone.
"""

from __future__ import annotations

import torch

_GROWTH = 256  # Buffers grow in steps of this many positions.
_ROOM = 32  # Free positions after the context, so that it grows before a block is written, outside of what is compiled.


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
        # Views of one buffer `[2, L, B, H_kv, capacity, head_dim]`.
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers
        self._buffer: torch.Tensor | None = None

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
        keys, values = (torch.stack(states) for states in zip(*key_values, strict=True))
        self.append_stacked(keys, values, position_ids, counts)

    def append_stacked(
        self, keys: torch.Tensor, values: torch.Tensor, position_ids: torch.Tensor, counts: list[int] | None = None
    ) -> None:
        """
        Adds context, given of all layers together.

        Args:
            keys, values: `[L, B, H_kv, T, head_dim]`.
            position_ids, counts: As in [`~DraftCache.append`].
        """
        counts = [position_ids.shape[1]] * self.num_rows if counts is None else counts
        self._reserve(max(n + c for n, c in zip(self.lengths, counts, strict=True)) + _ROOM, keys[0])
        assert self._buffer is not None
        for row, (start, count) in enumerate(zip(self.lengths, counts, strict=True)):
            if count:
                end = start + count
                self.positions[row, start:end] = position_ids[row, :count]
                self._buffer[0, :, row, :, start:end] = keys[:, row, :, :count]
                self._buffer[1, :, row, :, start:end] = values[:, row, :, :count]
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
        self._reserve(start + size, keys)
        key_buffer, value_buffer = self._keys[layer], self._values[layer]
        assert key_buffer is not None and value_buffer is not None
        key_buffer[:, :, start : start + size] = keys
        value_buffer[:, :, start : start + size] = values
        return key_buffer[:, :, : start + size], value_buffer[:, :, : start + size]

    def select_rows(self, rows: list[int]) -> None:
        """Keeps only the given rows, in the given order."""
        index = torch.tensor(rows, dtype=torch.long).to(self.positions.device, non_blocking=True)
        self.positions = self.positions.index_select(0, index)
        if self._buffer is not None:
            self._use(self._buffer.index_select(2, index))
        self.lengths = [self.lengths[row] for row in rows]
        self.num_rows = len(rows)

    def replace_row(self, row: int, other: DraftCache) -> None:
        """Gives a row what the only row of another cache holds."""
        count, self.lengths[row] = other.lengths[0], 0
        if other._buffer is not None:
            of_layers = other._buffer[..., :count, :]
            self._reserve(count, of_layers[0, 0].expand(self.num_rows, -1, -1, -1))
            assert self._buffer is not None
            self._buffer[:, :, row, :, :count] = of_layers[:, :, 0]
            self.positions[row, :count] = other.positions[0, :count]
        self.lengths[row] = count

    @property
    def num_bytes(self) -> int:
        """Bytes held by the key and value buffers."""
        return 0 if self._buffer is None else self._buffer.numel() * self._buffer.element_size()

    def _reserve(self, needed: int, like: torch.Tensor) -> None:
        """Makes room for `needed` tokens in each row; keys and values are like those given, `[B, H_kv, T, head_dim]`."""
        capacity = self.positions.shape[1]
        if needed <= capacity:
            return
        # Growing by half as well keeps the cost of all copies linear in the final length.
        new_capacity = max(needed + _GROWTH, capacity * 3 // 2)
        rows, heads, _, head_dim = like.shape
        # Made in inference mode, they could not be written to outside of it, where a later call may continue.
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.zeros(rows, new_capacity, dtype=torch.long, device=like.device)
            positions[:, :capacity] = self.positions
            shape = (2, len(self._keys), rows, heads, new_capacity, head_dim)
            buffer = torch.zeros(shape, dtype=like.dtype, device=like.device)
            if self._buffer is not None:
                buffer[..., :capacity, :] = self._buffer
        self.positions = positions
        self._use(buffer)

    def _use(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._keys, self._values = (list(of_all_layers.unbind(0)) for of_all_layers in buffer)
