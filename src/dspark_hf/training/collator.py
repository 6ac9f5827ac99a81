"""Makes a padded batch with anchors from rows of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..configuration_drafter import DrafterConfig
from .anchors import counted_drafts, position_weights, row_generator, sample_anchors, stack_anchors

# Entries that a feature cache adds to a row; each is padded like the tokens.
FEATURE_KEYS = ("context_features", "last_hidden_states", "log_normalizers", "greedy_ids")


class DSparkCollator:
    """
    Pads rows on the right and samples their anchors.

    A row is `{"input_ids": [T], "loss_mask": [T]}`, plus the entries of `FEATURE_KEYS` if features are cached. Rows without
    possible anchors (no response, or one of a single token) are allowed: they get filler blocks that do not count.

    Args:
        config (`DrafterConfig`): The drafter's configuration, for the number of drafts per block.
        num_anchors (`int`): Most blocks per row.
        position_decay (`float`, *optional*): Draft `j` has weight `exp(-j / position_decay)`; with `None` or 0 all weights are 1.
        seed (`int`): Seed of the anchors, together with the epoch and each row's tokens.
        pad_token_id (`int`): Token id at padding; it is masked everywhere.
    """

    def __init__(
        self,
        config: DrafterConfig,
        num_anchors: int = 512,
        position_decay: float | None = 4.0,
        seed: int = 0,
        pad_token_id: int = 0,
    ):
        if num_anchors < 1:
            raise ValueError(f"num_anchors is {num_anchors}; a row needs at least one block to learn from.")
        self.num_anchors = num_anchors
        self.num_drafts = config.num_draft_tokens
        self.first_anchor = config.first_anchor
        self.weights = position_weights(self.num_drafts, position_decay)
        self.seed = seed
        self.pad_token_id = pad_token_id
        # Shared memory, so that persistent workers see the number of the next epoch.
        self._epoch = torch.zeros((), dtype=torch.long).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the anchors together with the seed."""
        self._epoch.fill_(epoch)

    def __call__(self, rows: list[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """
        Returns:
            `input_ids` and `attention_mask` `[B, T]`; `anchor_positions` and `keep_anchors` `[B, A]`; `draft_weights`
            `[B, A, J]`, 0 where a draft does not count; and the padded features `[B, T, ...]` where rows have them.
        """
        input_ids = [torch.as_tensor(row["input_ids"]).long() for row in rows]
        loss_masks = [torch.as_tensor(row["loss_mask"]).bool() for row in rows]
        for ids, mask in zip(input_ids, loss_masks, strict=True):
            if ids.shape != mask.shape:
                raise ValueError(f"A row has {len(ids)} input_ids but {len(mask)} entries in loss_mask.")
        found = [self._anchors(row, *pair) for row, *pair in zip(rows, input_ids, loss_masks)]
        anchors = stack_anchors([own[own >= self.first_anchor] for own in found])
        length = max(1, *(len(ids) for ids in input_ids))
        counted = counted_drafts(pad_rows(loss_masks, length), anchors, self.num_drafts)
        batch = {
            "input_ids": pad_rows(input_ids, length, self.pad_token_id),
            "attention_mask": pad_rows([torch.ones_like(mask) for mask in loss_masks], length),
            "anchor_positions": anchors.positions,
            "keep_anchors": anchors.keep,
            "draft_weights": counted * self.weights,
        }
        for key in FEATURE_KEYS:
            if all(key in row for row in rows):
                batch[key] = pad_rows([torch.as_tensor(row[key]) for row in rows], length)
        return batch

    def _anchors(self, row: Mapping[str, Any], ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        generator = row_generator(self.seed, int(self._epoch), ids)
        if row.get("anchor_mask") is None:
            return sample_anchors(loss_mask, self.num_anchors, generator)
        # The cached features are complete for these anchors only.
        fixed = torch.as_tensor(row["anchor_mask"]).bool().nonzero().squeeze(-1)
        if len(fixed) <= self.num_anchors:
            return fixed
        return fixed[torch.randperm(len(fixed), generator=generator)[: self.num_anchors].sort().values]


def pad_rows(rows: list[torch.Tensor], length: int, value: float = 0) -> torch.Tensor:
    """Rows `[T_i, ...]` -> `[B, length, ...]`, padded on the right."""
    padded = rows[0].new_full((len(rows), length, *rows[0].shape[1:]), value)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    return padded
