"""Keys and values of rows that have different lengths and grow at different speeds.

Each layer holds one buffer `[B, H_kv, capacity, d]`. Every row starts at column 0, whatever its length, and a pass writes
each token at the next free column of its row. Rejected tokens are removed by lowering a row's length, and a row is given
to another request by setting its length to 0, so nothing is copied, cropped or concatenated.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .plan import RaggedPlan

_GROWTH = 128  # Buffers get this many columns more than needed, so that few passes have to enlarge them.

KeyValues = tuple[torch.Tensor, torch.Tensor]


class RaggedLayer(CacheLayerMixin):
    """The buffers of one layer. `plan` is the plan of the current pass, and `pads` says whether its rows are padded."""

    is_croppable = True
    is_sliding = False

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.num_rows = num_rows
        self.capacity = 0
        self.plan: RaggedPlan | None = None
        self.pads = False

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Creates buffers for states `[..., H_kv, N, d]` of this dtype and device."""
        self.keys, self.values = (
            states.new_zeros(self.num_rows, states.shape[1], self.capacity, states.shape[3])
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> KeyValues:
        """
        Writes the new states of the pass.

        Args:
            key_states, value_states: `[1, H_kv, N, d]` for packed tokens, `[R, H_kv, Q, d]` for padded rows.

        Returns:
            The columns that the pass reads, `[B, H_kv, S, d]` of all rows, or `[R, H_kv, S, d]` of the padded rows.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan, keys, values = self.plan, self.keys, self.values
        assert plan is not None and keys is not None and values is not None
        plan = plan.on(keys.device)
        for buffer, states in ((keys, key_states), (values, value_states)):
            by_token = states[0].transpose(0, 1) if not self.pads else plan.groups[0].unpad(states.transpose(1, 2))
            buffer[plan.rows, :, plan.columns] = by_token
        if self.pads:
            return plan.groups[0].columns_of(keys), plan.groups[0].columns_of(values)
        return keys[:, :, : plan.span], values[:, :, : plan.span]

    def reserve(self, num_columns: int) -> None:
        """Makes room for `num_columns` columns in each row."""
        if num_columns <= self.capacity:
            return
        extra = (0, 0, 0, num_columns + _GROWTH - self.capacity)
        self.capacity = num_columns + _GROWTH
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (torch.nn.functional.pad(b, extra) for b in (self.keys, self.values))

    def take_over(self, prompt: KeyValues, sources: torch.Tensor, num_columns: int) -> None:
        """
        Fills the buffers from the layer of an ordinary cache.

        Args:
            prompt: Its keys and values `[B, H_kv, L, d]`: the last `L` of `num_columns` columns. Sliding-window layers keep no
                others, and no later token attends to those.
            sources: For each row and each column to fill, the column of the ordinary cache, `[B, C]`.
            num_columns: Tokens that the ordinary cache has seen per row.
        """
        self.lazy_initialization(*prompt)
        index = (sources - (num_columns - prompt[0].shape[2])).clamp(min=0).to(prompt[0].device)
        rows = torch.arange(len(index), device=index.device)[:, None]
        for buffer, states in zip((self.keys, self.values), prompt, strict=True):
            assert buffer is not None
            buffer[:, :, : index.shape[1]] = states[rows, :, index].transpose(1, 2)

    def select(self, rows: torch.Tensor) -> None:
        """Keeps these rows `[R]`, in this order."""
        self.num_rows = len(rows)
        if self.keys is not None and self.values is not None:
            index = rows.to(self.keys.device, non_blocking=True)
            self.keys, self.values = self.keys.index_select(0, index), self.values.index_select(0, index)

    def get_seq_length(self) -> int:
        """The length that models see: as if the tokens of the pass were the last ones of a single row."""
        return 0 if self.plan is None else max(self.plan.span - len(self.plan.rows), 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.plan is None else self.plan.span), 0

    def get_max_length(self) -> int:
        return -1


class RaggedCache(Cache):
    """
    The keys and values of `B` rows of different lengths.

    Args:
        num_layers: Layers of the target that keep keys and values.
        num_rows: `B`.

    Attributes:
        lengths (`list[int]`): Columns in use of each row. After a pass, the caller raises it by the tokens to keep.
        position_offsets (`torch.Tensor`): A token's position minus its column, `[B]`, or `[axes, B]` for positions that
            have several axes.
        key_mask (`torch.Tensor`, *optional*): False at columns that no token attends to, `[B, C]`. Columns from `C` on
            are not masked.
        pads (`bool`): Whether the input of a pass is padded rows instead of packed tokens.
    """

    layers: list[RaggedLayer]  # type: ignore[assignment]

    def __init__(self, num_layers: int, num_rows: int) -> None:
        super().__init__(layers=[RaggedLayer(num_rows) for _ in range(num_layers)])
        self.lengths = [0] * num_rows
        self.position_offsets = torch.zeros(num_rows, dtype=torch.long)
        self.key_mask: torch.Tensor | None = None
        self.pads = False
        self._padding = [0] * num_rows  # Padding columns before each row's first token in the ordinary cache.

    @classmethod
    def of_prompts(cls, cache: Cache, attended: torch.Tensor | None, position_ids: torch.Tensor) -> RaggedCache:
        """
        Takes over the rows of an ordinary cache that holds their prompts.

        Args:
            cache: The ordinary cache. Its layers hold keys and values, or nothing if they use those of another layer.
            attended: False at padding, `[B, T]`; `None` for no padding. Padding before a row's first token is not copied.
            position_ids: Positions of the columns, `[B, T]` or `[axes, B, T]`; those of the last column are enough.
        """
        layers: list[Any] = cache.layers
        num_columns = int(cache.get_seq_length())
        own = cls(len(layers), num_rows=layers[0].keys.shape[0])
        if attended is not None:
            attended = attended.bool().cpu()
            own._padding = attended.int().argmax(dim=1).tolist()
        own.lengths = [num_columns - padding for padding in own._padding]
        columns = torch.arange(max(own.lengths))
        sources = (columns + torch.tensor(own._padding)[:, None]).clamp(max=num_columns - 1)  # [B, longest row]
        for layer, filled in zip(own.layers, layers, strict=True):
            layer.reserve(len(columns))
            if filled.keys is not None:  # Otherwise the layer uses the keys and values of another.
                layer.take_over(
                    (filled.keys[:, :, :num_columns], filled.values[:, :, :num_columns]), sources, num_columns
                )
        if attended is not None:
            mask = attended.gather(1, sources) | (columns >= torch.tensor(own.lengths)[:, None])
            own.key_mask = None if mask.all() else mask
        own.position_offsets = position_ids[..., -1].cpu() + 1 - torch.tensor(own.lengths)
        return own

    def plan(self, counts: list[int]) -> RaggedPlan:
        """Makes room for `counts[r]` new tokens of row `r` in the next pass, and returns its plan."""
        plan = RaggedPlan.of(self.lengths, counts, self.key_mask, in_one_group=self.pads)
        for layer in self.layers:
            layer.reserve(plan.span)
            layer.plan, layer.pads = plan, self.pads
        return plan

    def positions(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Positions of the tokens at `columns` of `rows`, in the same shape, with the axes of positions in front if any."""
        return columns + self.position_offsets[..., rows]

    def reserve(self, num_columns: int) -> None:
        """Makes room for rows of `num_columns` columns now, instead of gradually."""
        for layer in self.layers:
            layer.reserve(num_columns)

    def select(self, rows: list[int]) -> None:
        """Keeps only the given rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long)
        for layer in self.layers:
            index = index if layer.keys is None else index.to(layer.keys.device, non_blocking=True)
            layer.select(index)
        self.lengths = [self.lengths[row] for row in rows]
        self._padding = [self._padding[row] for row in rows]
        self.position_offsets = self.position_offsets[..., rows]
        self.key_mask = None if self.key_mask is None else self.key_mask[rows]

    def clear(self, row: int) -> None:
        """Empties a row, so that it can be given to another request."""
        self.lengths[row] = self._padding[row] = 0
        self.position_offsets[..., row] = 0
        if self.key_mask is not None:
            self.key_mask[row] = True

    def extract(self, row: int) -> dict[int, KeyValues]:
        """A copy of one row's keys and values `[H_kv, T, d]` per layer, with the columns of an ordinary cache."""
        padding, length = (0, 0, self._padding[row], 0), self.lengths[row]
        pad, extracted = torch.nn.functional.pad, {}
        for index, layer in enumerate(self.layers):
            keys, values = layer.keys, layer.values
            if keys is not None and values is not None:  # Otherwise the layer uses the keys and values of another.
                extracted[index] = pad(keys[row, :, :length], padding), pad(values[row, :, :length], padding)
        return extracted

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        buffers = [b for layer in self.layers for b in (layer.keys, layer.values) if b is not None]
        return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


def fill(cache: Cache, rows: dict[int, dict[int, KeyValues]], num_columns: int) -> None:
    """
    Puts rows that ended at different times into an ordinary cache.

    Args:
        cache: The cache of the pass over the prompts. Its contents are replaced.
        rows: By index in the batch, the result of [`RaggedCache.extract`] when the row ended. Padding columns, before a
            row and after one that ended early, become zeros, where plain `generate` has the states of padding tokens.
        num_columns: Columns of the cache afterwards; longer rows are cut.
    """
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):  # Older versions of transformers only fill it with zeros.
            layer.is_initialized = False
    for index in rows[0]:
        keys, values = (
            torch.stack([_filled(rows[row][index][part], num_columns) for row in sorted(rows)]) for part in (0, 1)
        )
        cache.update(keys, values, index)


def _filled(states: torch.Tensor, num_columns: int) -> torch.Tensor:
    """`[H_kv, T, d]`, padded with zeros at the end or cut to `[H_kv, num_columns, d]`."""
    return torch.nn.functional.pad(states, (0, 0, 0, num_columns - states.shape[1]))
