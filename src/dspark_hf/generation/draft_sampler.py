"""Draws drafts with those of the user's logits processors that may be applied to drafts, over the drafter's vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import LogitsProcessorList

from ..sampling import draw
from .logits_process import is_rowwise, names_tokens, processed
from .telemetry import stage


class PositionRaces(Protocol):
    """Random numbers for each coming token of one row."""

    def at(self, slot: int) -> torch.Tensor:
        """Those of the token `slot` places after the next one, `[V]`."""


class DraftSampler:
    """
    Draws the tokens of one round, slot after slot.

    Args:
        processors: For each row, the result of [`~dspark_hf.generation.logits_process.drafting_processors`].
        input_ids: For each row all tokens so far, `[1, L_row]`.
        do_sample: Draw the tokens, or take the most likely ones.
        draft_token_ids: Target ids of a reduced draft vocabulary, `[V_draft]`; `None` for the full vocabulary.
        vocab_size: Size of the target's vocabulary.
        races: For each row the random numbers of its coming tokens, or `None` for the most likely tokens. In place of
            `do_sample`, for rows of requests that have nothing in common. Such drafts are verified without their probabilities.

    Attributes:
        last_ids (`torch.Tensor` of shape `[B, 1]`): The token of each row before the coming slot.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessorList],
        input_ids: Sequence[torch.Tensor],
        do_sample: bool,
        draft_token_ids: torch.Tensor | None,
        vocab_size: int,
        races: Sequence[PositionRaces | None] | None = None,
    ):
        self.last_ids = torch.cat([ids[:, -1:] for ids in input_ids])
        self._processors = processors
        self._races = races
        self._are_rowwise = races is None and all(is_rowwise(row) for row in processors)
        self._sequences = [] if self._are_rowwise else list(input_ids)
        self._do_sample = do_sample
        self._draft_token_ids = draft_token_ids
        self._vocab_size = vocab_size
        # If the processors allow it, probabilities are computed over the draft vocabulary, which can be many times smaller.
        self._always_leaves_tokens = not any(names_tokens(row) for row in processors)
        self._is_reduced = draft_token_ids is not None and self._always_leaves_tokens and races is None
        self._ids: list[torch.Tensor] = []
        self._probs: list[torch.Tensor] = []

    def draw(self, scores: torch.Tensor) -> None:
        """
        Draws the token of the next slot in each row.

        Args:
            scores: The drafter's scores over its vocabulary, `[B, V_draft]`.
        """
        if not self._is_reduced:
            scores = self._over_full_vocabulary(scores, float("-inf"))
        scores = self._processed(scores)
        if self._races is not None:
            self.last_ids = self._winners(scores, self._races)
        elif self._do_sample:
            self._probs.append(scores.softmax(-1) if self._always_leaves_tokens else drafting_distribution(scores))
            self.last_ids = draw(self._probs[-1])[:, None]
        else:
            self.last_ids = scores.argmax(-1, keepdim=True)
        if self._is_reduced:
            assert self._draft_token_ids is not None
            self.last_ids = self._draft_token_ids[self.last_ids]
        self._ids.append(self.last_ids)
        if not self._are_rowwise:
            pairs = zip(self._sequences, self.last_ids.split(1), strict=True)
            self._sequences = [torch.cat([ids, token], dim=1) for ids, token in pairs]

    def ids(self) -> torch.Tensor:
        """The tokens drawn, `[B, G]`."""
        return torch.cat(self._ids, dim=1) if self._ids else self.last_ids[:, :0]

    def probs(self) -> torch.Tensor | None:
        """The distribution each was drawn from, over the target's vocabulary, `[B, G, V]`; `None` for greedy drafts."""
        if not self._probs:
            return None
        probs = torch.stack(self._probs, dim=1)
        return self._over_full_vocabulary(probs, 0.0) if self._is_reduced else probs

    def _winners(self, scores: torch.Tensor, races: Sequence[PositionRaces | None]) -> torch.Tensor:
        """The token of each row at the coming slot, `[B, 1]`, from its processed scores `[B, V]`."""
        tokens = [
            row.argmax(-1)
            if race is None
            else (drafting_distribution(row) / race.at(len(self._ids)).to(row.device)).argmax(-1)
            for row, race in zip(scores.split(1), races, strict=True)
        ]
        return torch.cat(tokens)[:, None]

    def _processed(self, scores: torch.Tensor) -> torch.Tensor:
        """Applies each row's processors to its scores, `[B, V]` -> `[B, V]`."""
        if not any(self._processors):
            return scores
        with stage("processors"):
            if self._are_rowwise:  # Then they are the same for all rows.
                no_ids = torch.zeros(len(scores), 0, dtype=torch.long, device=scores.device)
                return processed(self._processors[0], no_ids, scores)
            rows = zip(self._processors, self._sequences, scores.split(1), strict=True)
            return torch.cat([processed(processors, ids, row) for processors, ids, row in rows])

    def _over_full_vocabulary(self, values: torch.Tensor, outside: float) -> torch.Tensor:
        """`[..., V_draft]` -> `[..., V]`; tokens outside the draft vocabulary get the value `outside`."""
        if self._draft_token_ids is None:
            return values
        full = values.new_full((*values.shape[:-1], self._vocab_size), outside)
        return full.index_copy_(-1, self._draft_token_ids, values)


def drafting_distribution(scores: torch.Tensor) -> torch.Tensor:
    """
    The probabilities to draft with, `[..., V]`, from processed scores `[..., V]`.

    Verification is exact for any distribution that the draft was really drawn from. So when processors exclude every token
    of a reduced vocabulary, or turn its missing tokens into NaN, the draft is drawn from the remaining tokens, or uniformly
    from all of them.
    """
    scores = scores.nan_to_num(nan=float("-inf"), posinf=torch.finfo(scores.dtype).max, neginf=float("-inf"))
    is_possible = scores.amax(-1, keepdim=True) > float("-inf")
    return scores.masked_fill(~is_possible, 0.0).softmax(-1)
