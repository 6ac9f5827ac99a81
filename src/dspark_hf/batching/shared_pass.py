"""The target over a changing set of rows, with one cache whose rows are given from request to request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..generation.pass_mode import pass_mode
from ..generation.target_model import TargetOutput
from ..ragged.cache import RaggedCache
from ..ragged.supported import unsupported_reason
from ..ragged.target import RaggedTarget
from ..tapping import Tap
from ..transformers_names import GenerativeModel


class SharedPass:
    """
    Feeds new tokens of all rows in one pass.

    Args:
        target: The target.
        hidden_state_indices: Entries of `hidden_states` that feed the drafter; empty without one.

    Raises:
        ValueError: when rows of different lengths cannot share a pass of the target.
    """

    def __init__(self, target: GenerativeModel, hidden_state_indices: list[int]):
        if reason := unsupported_reason(target):
            raise ValueError(
                f"{type(target).__name__} cannot decode many requests in shared rows: {reason}. Call generate for each prompt."
            )
        self.cache = RaggedCache(target.config.get_text_config(decoder=True).num_hidden_layers, 1)
        self.ragged = RaggedTarget(target, self.cache)
        self.ragged.try_packing()
        self._mode = pass_mode(target)
        self._tap = Tap(target, hidden_state_indices) if hidden_state_indices else None

    def add_row(self, num_rows: int) -> None:
        """Adds an empty row to the `num_rows` in use."""
        if num_rows:
            self.cache.select([*range(num_rows), 0])
        self.cache.clear(num_rows)

    def keep_rows(self, places: list[int]) -> None:
        """Keeps only the rows at these places. One row stays for its buffers even if none is in use."""
        self.cache.select(places or [0])

    def feed_prompts(self, token_ids: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Feeds the tokens `[n]` of each row, possibly none, and keeps them. Returns their features, `[n, m * D_target]`."""
        counts = [len(ids) for ids in token_ids]
        _, features = self._feed(token_ids, counts, wants_logits=False)
        self.commit(counts)
        return features

    def verify(self, token_ids: Sequence[torch.Tensor]) -> list[TargetOutput]:
        """
        Feeds the anchor and drafts `[n]` of each row; [`~SharedPass.commit`] then says how many are kept.

        Returns:
            For each row the logits `[1, n, V]` and features `[1, n, m * D_target]` of these tokens.
        """
        logits, features = self._feed(token_ids, [len(ids) for ids in token_ids])
        rows = zip(logits, features, strict=True)
        empty = torch.empty(0)
        return [TargetOutput(own[None], empty if of_row is None else of_row[None], None) for own, of_row in rows]

    def commit(self, counts: Sequence[int]) -> None:
        """Keeps the first `counts[r]` tokens that were fed of each row."""
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, counts, strict=True)]

    def _feed(
        self, token_ids: Sequence[torch.Tensor], counts: list[int], wants_logits: bool = True
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        fed = torch.cat(list(token_ids))
        tap = self._tap
        with self.ragged.attention_in_place(), self._mode():
            if tap is None:
                raw = self.ragged.feed(fed, counts, wants_logits)
            else:
                with tap.reading():
                    raw = self.ragged.feed(fed, counts, wants_logits, output_hidden_states=tap.argument)
        logits: list[torch.Tensor] = []
        if wants_logits:
            logits = list(raw.logits[0].to(device=fed.device, dtype=torch.float32, copy=True).split(counts))
        if tap is None:
            return logits, [None] * len(counts)
        return logits, list(tap.features(raw)[0].split(counts))
