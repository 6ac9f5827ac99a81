"""The plan of a pass: its tokens, the rows they belong to, and the rows whose attention is computed together."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

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

    def to(self, device: torch.device) -> Group:
        """The same group with its indices on `device`."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            n: v.to(device, non_blocking=True) for n, v in values.items() if isinstance(v, torch.Tensor)
        }
        return replace(self, **moved)


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
        sizes = torch.tensor(counts)
        rows = torch.arange(len(counts)).repeat_interleave(sizes)
        slots = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[rows]
        columns = torch.tensor(lengths)[rows] + slots
        fed = [row for row, count in enumerate(counts) if count]
        alike = [fed] if in_one_group else _alike(fed, counts)
        groups = [_group_of(members, lengths, counts, rows, slots) for members in alike]
        return cls(rows, columns, groups, max(group.span for group in groups), list(counts), key_mask)

    def on(self, device: torch.device) -> RaggedPlan:
        """The same plan with its indices on `device`, copied there once."""
        if device == self.rows.device:
            return self
        if device not in self._elsewhere:
            groups = [group.to(device) for group in self.groups]
            rows, columns = (indices.to(device, non_blocking=True) for indices in (self.rows, self.columns))
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
    members: list[int], lengths: list[int], counts: list[int], token_rows: torch.Tensor, token_slots: torch.Tensor
) -> Group:
    # If these are at least half of all rows, including the others costs less than copying the columns of these.
    members = sorted(members)
    rows = list(range(len(counts))) if 2 * len(members) >= len(counts) else members
    is_contiguous = rows[-1] - rows[0] == len(rows) - 1
    own_counts = {row: counts[row] for row in members}
    place_of = torch.full((len(counts),), -1)
    place_of[members] = torch.tensor([place for place, row in enumerate(rows) if row in own_counts])
    tokens = (place_of[token_rows] >= 0).nonzero()[:, 0]
    sizes = torch.tensor([own_counts.get(row, 0) for row in rows])[:, None]
    num_queries = max(counts[row] for row in members)
    ahead = torch.arange(num_queries).minimum(sizes - 1)  # [R, Q]
    query_columns = torch.tensor([lengths[row] for row in rows])[:, None] + ahead
    return Group(
        rows=slice(rows[0], rows[-1] + 1) if is_contiguous else torch.tensor(rows),
        tokens=tokens,
        places=place_of[token_rows[tokens]],
        slots=token_slots[tokens],
        query_columns=query_columns.where(sizes > 0, 0),
        span=max(lengths[row] + counts[row] for row in members),
        is_even=bool((sizes == num_queries).all()),
        is_new=all(lengths[row] == 0 for row in members),
    )
