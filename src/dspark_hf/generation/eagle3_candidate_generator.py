"""Drafting with an EAGLE-3 drafter: one pass of the drafter per draft."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from ..draft_cache import DraftCache
from ..embeddings import SharedEmbeddings
from ..kinds.eagle3.modeling_eagle3 import Eagle3Drafter
from .candidate_generator import DrafterCandidateGenerator
from .draft_context import DraftContext


class Eagle3LogitsProcessor(LogitsProcessor):
    """
    Runs one step of the drafter per call and adds its logits to the scores, which are 0. It takes the place of a block
    drafter's sequential head.

    Call [`~Eagle3LogitsProcessor.begin_chain`] first.

    Args:
        drafter: The drafter.
        embeddings: The embedding and LM head it uses.
    """

    def __init__(self, drafter: Eagle3Drafter, embeddings: SharedEmbeddings):
        self.drafter = drafter
        self.embeddings = embeddings

    def begin_chain(self, states: torch.Tensor, position_ids: torch.Tensor, cache: DraftCache) -> None:
        """Starts from the fused states `[B, D]` before the anchors, at `position_ids` `[B]`, with the context in `cache`."""
        self._states, self._position_ids, self._cache = states, position_ids, cache
        cache.num_steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Only the last token of `input_ids` `[B, L]` is used; `scores` `[B, V_draft]` -> `[B, V_draft]`."""
        drafter, step = self.drafter, self._cache.num_steps
        states = drafter.step(input_ids[:, -1], self._states, self._position_ids + step, self._cache, self.embeddings)
        self._states = drafter.handed_on(states)
        return scores + drafter.base_logits(drafter.norm(states), self.embeddings)


class Eagle3Context(DraftContext):
    """
    The context of an EAGLE-3 drafter.

    The cache entry of a token depends on the token after it. So the last final token of each row has no entry until the next
    draft, which starts from its fused state.

    Args:
        drafter: The drafter.
        embeddings: The embedding it uses.
        num_rows: Rows of the call.

    Attributes:
        states (`list[torch.Tensor]`): For each row the fused states of final tokens that are not in the cache, `[n, D]`.
    """

    drafter: Eagle3Drafter

    def __init__(self, drafter: Eagle3Drafter, embeddings: SharedEmbeddings, num_rows: int = 1):
        super().__init__(drafter, num_rows)
        self.embeddings = embeddings
        empty = drafter.norm.weight.new_zeros(0, drafter.config.hidden_size)
        self.states = [empty for _ in range(num_rows)]

    def get_ready(self, input_ids: Sequence[torch.Tensor]) -> None:
        """Moves all states into the cache except that of the token before each anchor."""
        self.project()
        self._skip_tokens_without_id(input_ids)
        self._move_states(input_ids, [len(states) - 1 for states in self.states])

    def complete(self, input_ids: Sequence[torch.Tensor]) -> DraftCache:
        self.project()
        self._skip_tokens_without_id(input_ids)
        with self.mode():
            self._move_states(input_ids, [len(states) for states in self.states])
        return self.cache

    def keep_rows(self, rows: list[int]) -> None:
        super().keep_rows(rows)
        self.states = [self.states[row] for row in rows]

    def of_new_row(self) -> DraftContext:
        return Eagle3Context(self.drafter, self.embeddings)

    def replace_row(self, row: int, other: DraftContext) -> None:
        super().replace_row(row, other)
        assert isinstance(other, Eagle3Context)
        self.states[row] = other.states[0]

    def _project(self, rows: list[torch.Tensor]) -> None:
        fused = [self.drafter.project_context(features) for features in rows]
        self.states = [torch.cat(pair) for pair in zip(self.states, fused, strict=True)]

    def _move_states(self, input_ids: Sequence[torch.Tensor], counts: list[int]) -> None:
        """Moves the first `counts` states of each row into the cache. Each row's last tokens are those that follow its states."""
        if not any(counts):
            return
        following = [
            ids[0, ids.shape[1] - len(states) :][:count]
            for ids, states, count in zip(input_ids, self.states, counts, strict=True)
        ]
        moved = [states[:count] for states, count in zip(self.states, counts, strict=True)]
        pad = torch.nn.utils.rnn.pad_sequence
        self.drafter.extend_cache(
            self.cache,
            pad(following, batch_first=True),
            pad(moved, batch_first=True),
            self.next_positions(max(counts)),
            counts,
            self.embeddings,
        )
        self.states = [states[count:] for states, count in zip(self.states, counts, strict=True)]

    def _skip_tokens_without_id(self, input_ids: Sequence[torch.Tensor]) -> None:
        """Drops states of a prompt given as embeddings, whose next token is unknown: the context starts after them."""
        for row, (ids, states) in enumerate(zip(input_ids, self.states, strict=True)):
            if (num_unknown := len(states) - ids.shape[1]) > 0:
                self.states[row] = states[num_unknown:]
                self.first_positions[row] += num_unknown


class Eagle3CandidateGenerator(DrafterCandidateGenerator):
    """
    Drafts for the rows of one `generate` call, each token from the drafter's state at the previous one.

    Arguments as in [`DrafterCandidateGenerator`].
    """

    drafter: Eagle3Drafter
    context: Eagle3Context
    head: Eagle3LogitsProcessor

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.head = Eagle3LogitsProcessor(self.drafter, self.embeddings)
        self.context = Eagle3Context(self.drafter, self.embeddings, len(self.rows))

    def backbone_pass(self, input_ids: Sequence[torch.Tensor], num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The states before the anchors `[B, 1, D]`; there are no base logits, so they are 0, `[B, G, V_draft]`."""
        states = torch.cat(self.context.states)  # [B, D]
        self.head.begin_chain(states, self.context.next_positions(1)[:, 0], self.context.cache)
        zeros = states.new_zeros((), dtype=torch.float32)
        return states[:, None], zeros.expand(len(states), num_drafts, self.drafter.config.logits_size)
