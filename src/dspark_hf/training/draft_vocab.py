"""A reduced draft vocabulary of the most frequent tokens, which makes the drafter's logits several times cheaper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..drafter import Drafter


def select_draft_vocabulary(
    rows: Iterable[Mapping[str, Any]], vocab_size: int, draft_vocab_size: int, required_ids: Iterable[int] = ()
) -> torch.Tensor:
    """
    The most frequent response tokens.

    Args:
        rows: Rows with `input_ids` and `loss_mask`; only tokens in the loss mask count.
        vocab_size: Size of the full vocabulary.
        draft_vocab_size: How many tokens to select. If the rows contain fewer, the lowest other ids are added, because
            byte-pair vocabularies are roughly ordered by frequency.
        required_ids: Always selected. Pass the ids that end a turn.

    Returns:
        `[draft_vocab_size]`, ascending.

    Raises:
        ValueError: when more tokens are required than selected, or the size exceeds the vocabulary.
    """
    if not 0 < draft_vocab_size <= vocab_size:
        raise ValueError(f"draft_vocab_size={draft_vocab_size} does not fit a vocabulary of {vocab_size}.")
    required = torch.tensor(sorted(set(required_ids)), dtype=torch.long)
    if len(required) > draft_vocab_size:
        raise ValueError(f"{len(required)} tokens are required, but draft_vocab_size is {draft_vocab_size}.")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        ids, mask = torch.as_tensor(row["input_ids"]).long(), torch.as_tensor(row["loss_mask"]).bool()
        counts += torch.bincount(ids[mask], minlength=vocab_size)
    counts[required] = torch.iinfo(torch.long).max
    ranked = torch.sort(counts, descending=True, stable=True).indices  # Ties: lower ids first.
    return ranked[:draft_vocab_size].sort().values


def set_draft_vocabulary(drafter: Drafter, token_ids: torch.Tensor) -> None:
    """
    Makes `token_ids` the drafter's draft vocabulary. Only for a drafter that has not been trained: the rows of its heads stay the
    same but stand for other tokens afterwards.

    Raises:
        ValueError: when the number of different ids is not the configured one.
    """
    size, vocab_size = drafter.config.draft_vocab_size, drafter.config.vocab_size
    token_ids = token_ids.unique()
    if size is None or len(token_ids) != size or token_ids[0] < 0 or token_ids[-1] >= vocab_size:
        raise ValueError(
            f"The drafter's configuration has draft_vocab_size={size} of {vocab_size} tokens; given were "
            f"{len(token_ids)} different ids from {int(token_ids[0])} to {int(token_ids[-1])}."
        )
    assert drafter.draft_token_ids is not None, "draft_vocab_size is set"
    drafter.draft_token_ids.copy_(token_ids)
