"""The plan of a pass: its tokens, the rows they belong to, and the rows whose attention is computed together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

# Rows with at most this many tokens may form one group. Among longer rows, padding at most doubles a row's tokens.
_FEW_TOKENS = 16


@dataclass(frozen=True)
class Group:
    """
    `R` rows whose attention is computed together, padded to `Q` queries each, over their first `S` columns.

    Args:
        rows: Its rows of the buffers: a slice, or their indices `[R]`.
        tokens: Indices of its tokens among all tokens of the pass, `[n]`.
        places: For each token the index of its row within the group, `[n]`.
        slots: For each token its index among the row's tokens of this pass, `[n]`.
        query_columns: The column of each query, `[R, Q]`. Unused queries repeat the row's last token, or column 0 if the
            row has no tokens in this pass.
        span: `S`: columns of the longest row that has tokens in this pass, including these.
        is_even: Whether every row has `Q` tokens, so that there are no unused queries.
        is_new: Whether no row that has tokens in this pass had any before.
    """

    rows: slice | torch.Tensor
    tokens: torch.Tensor
    places: torch.Tensor
    slots: torch.Tensor
    query_columns: torch.Tensor
    span: int
    is_even: bool
    is_new: bool

    @property
    def num_queries(self) -> int:
        return self.query_columns.shape[1]

    def pad(self, states: torch.Tensor) -> torch.Tensor:
        """From one entry per token `[n, ...]` to `[R, Q, ...]`, with zeros at unused queries."""
        shape = (*self.query_columns.shape, *states.shape[1:])
        if self.is_even:
            return states.reshape(shape)
        padded = states.new_zeros(shape)
        padded[self.places, self.slots] = states
        return padded

    def unpad(self, states: torch.Tensor) -> torch.Tensor:
        """From `[R, Q, ...]` to one entry per token, `[n, ...]`."""
        return states.flatten(0, 1) if self.is_even else states[self.places, self.slots]

    def columns_of(self, buffer: torch.Tensor) -> torch.Tensor:
        """Its rows' columns `[R, H, S, d]` of a buffer `[B, H, capacity, d]`: a view if its rows are contiguous."""
        return buffer[self.rows, :, : self.span]

    @property
    def indices(self) -> dict[str, torch.Tensor]:
        """Its tensors, by the names of their fields."""
        return {name: value for name, value in vars(self).items() if isinstance(value, torch.Tensor)}


@dataclass(frozen=True)
class RaggedPlan:
    """
    The tokens of one pass, ordered by row.

    Args:
        rows, columns: Row and column of each of the `N` tokens, `[N]`.
        groups: The rows whose attention is computed together.
        span: Columns of the longest row that has tokens in this pass, including these.
        counts: How many tokens each row has in this pass.
        key_mask: False at columns that no token attends to, `[B, C]`; `None` if there are none.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    groups: list[Group]
    span: int
    counts: list[int]
    key_mask: torch.Tensor | None = None
    _elsewhere: dict[torch.device, RaggedPlan] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        lengths: list[int],
        counts: list[int],
        key_mask: torch.Tensor | None = None,
        in_one_group: bool = False,
    ) -> RaggedPlan:
        """
        The plan of a pass, with its indices on the CPU.

        Args:
            lengths: Columns in use of each of the `B` rows before the pass.
            counts: New tokens of each row. Some rows may have none, but not all.
            key_mask: As above.
            in_one_group: Whether all rows form one group, however much padding that takes.
        """
        # In numpy, whose operations cost less than torch's on so few numbers.
        sizes = np.asarray(counts)
        rows = np.arange(len(counts)).repeat(sizes)
        slots = np.arange(len(rows)) - (sizes.cumsum() - sizes)[rows]
        columns = np.asarray(lengths)[rows] + slots
        fed = [row for row, count in enumerate(counts) if count]
        alike = [fed] if in_one_group else _alike(fed, counts)
        groups = [_group_of(members, lengths, counts, rows, slots) for members in alike]
        span = max(group.span for group in groups)
        return cls(torch.from_numpy(rows), torch.from_numpy(columns), groups, span, list(counts), key_mask)

    def on(self, device: torch.device) -> RaggedPlan:
        """The same plan with its indices on `device`, copied there once and together."""
        if device == self.rows.device:
            return self
        if device not in self._elsewhere:
            parts = [self.rows, self.columns, *(index for group in self.groups for index in group.indices.values())]
            together = torch.cat([part.flatten() for part in parts]).to(device, non_blocking=True)
            split = together.split([part.numel() for part in parts])
            moved = iter([there.view(part.shape) for there, part in zip(split, parts, strict=True)])
            rows, columns = next(moved), next(moved)
            groups = [replace(group, **{name: next(moved) for name in group.indices}) for group in self.groups]
            self._elsewhere[device] = replace(self, rows=rows, columns=columns, groups=groups)
        return self._elsewhere[device]


def _alike(fed: list[int], counts: list[int]) -> list[list[int]]:
    """Groups rows with similar numbers of tokens, so that a block of drafts is not padded to the length of a prompt."""
    groups: list[list[int]] = []
    for row in sorted(fed, key=lambda row: counts[row]):
        if groups and counts[row] <= max(_FEW_TOKENS, 2 * counts[groups[-1][0]]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _group_of(
    members: list[int], lengths: list[int], counts: list[int], token_rows: np.ndarray, token_slots: np.ndarray
) -> Group:
    # If these are at least half of all rows, including the others costs less than copying the columns of these.
    members = sorted(members)
    rows = list(range(len(counts))) if 2 * len(members) >= len(counts) else members
    is_contiguous = rows[-1] - rows[0] == len(rows) - 1
    own_counts = {row: counts[row] for row in members}
    place_of = np.full(len(counts), -1)
    place_of[members] = [place for place, row in enumerate(rows) if row in own_counts]
    tokens = np.flatnonzero(place_of[token_rows] >= 0)
    sizes = np.array([own_counts.get(row, 0) for row in rows])[:, None]
    num_queries = max(counts[row] for row in members)
    ahead = np.minimum(np.arange(num_queries), sizes - 1)  # [R, Q]
    query_columns = np.array([lengths[row] for row in rows])[:, None] + ahead
    return Group(
        rows=slice(rows[0], rows[-1] + 1) if is_contiguous else torch.tensor(rows),
        tokens=torch.from_numpy(tokens),
        places=torch.from_numpy(place_of[token_rows[tokens]]),
        slots=torch.from_numpy(token_slots[tokens]),
        query_columns=torch.from_numpy(np.where(sizes > 0, query_columns, 0)),
        span=max(lengths[row] + counts[row] for row in members),
        is_even=bool((sizes == num_queries).all()),
        is_new=all(lengths[row] == 0 for row in members),
    )
