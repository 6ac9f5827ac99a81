"""Chain drafting with an EAGLE-3 drafter, as the candidates of any other drafter: warped, scheduled and verified alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import LogitsProcessor

from ..draft_cache import DraftCache
from ..drafter import Drafter
from ..embeddings import SharedEmbeddings
from ..modeling_eagle3 import Eagle3Drafter
from .candidate_generator import Draft, DSparkCandidateGenerator


class Eagle3LogitsProcessor(LogitsProcessor):
    """
    One step of the drafter a call, in the place of a block drafter's sequential head: all of a slot's logits are its bias.

    Call [`~Eagle3LogitsProcessor.begin_chain`] first.

    Args:
        drafter: The drafter.
        embeddings: What it speaks through.
    """

    def __init__(self, drafter: Eagle3Drafter, embeddings: SharedEmbeddings):
        self.drafter = drafter
        self.embeddings = embeddings

    def begin_chain(self, states: torch.Tensor, position_ids: torch.Tensor, cache: DraftCache) -> None:
        """Starts from the fused states `[B, D]` before the anchors, at `position_ids` `[B]`, behind the context in `cache`."""
        self._states, self._position_ids, self._cache = states, position_ids, cache
        cache.num_steps = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """`input_ids` `[B, L]`, of which the last token counts; `scores` `[B, V_draft]` -> `[B, V_draft]`."""
        drafter, step = self.drafter, self._cache.num_steps
        self._states = drafter.step(
            input_ids[:, -1],
            self._states,
            self._position_ids + step,
            self._cache,
            self.embeddings,
        )
        return scores + drafter.base_logits(drafter.norm(self._states), self.embeddings)


class Eagle3CandidateGenerator(DSparkCandidateGenerator):
    """
    Drafts for the rows of one `generate` call, each token from the drafter's own state at the one before it.

    What a token's context entry holds depends on the token after it. So the last final token of each row stays out of the
    cache until the next draft: its state is what that draft starts from.

    Arguments as in [`DSparkCandidateGenerator`].
    """

    drafter: Eagle3Drafter

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._head = Eagle3LogitsProcessor(self.drafter, self.embeddings)
        # Of each row the fused states of final tokens that are not in the cache, [n, D].
        empty = self.drafter.fc.weight.new_zeros(0, self.drafter.config.hidden_size)
        self._states = [empty for _ in self.rows]

    def catch_up(self) -> None:
        """Fuses the features that are still waiting for it."""
        for row, pending in enumerate(self._pending):
            if pending:
                features = torch.cat(pending).to(self.drafter.device)
                self._states[row] = torch.cat([self._states[row], self.drafter.project_context(features)])
        self._pending = [[] for _ in self._pending]

    def keep_rows(self, rows: list[int]) -> None:
        super().keep_rows(rows)
        self._states = [self._states[row] for row in rows]

    def settle(self, input_ids: Sequence[torch.Tensor]) -> DraftCache:
        self.catch_up()
        self._skip_tokens_without_id(input_ids)
        self._extend_cache(input_ids, [len(states) for states in self._states])
        return self.cache

    def _draft(self, input_ids: Sequence[torch.Tensor], num_drafts: int, max_drafts: Sequence[int]) -> Draft:
        self.catch_up()
        self._skip_tokens_without_id(input_ids)
        input_ids = [ids.to(self.drafter.device) for ids in input_ids]
        self._extend_cache(input_ids, [len(states) - 1 for states in self._states])
        states = torch.cat(self._states)  # [B, D]
        self._head.begin_chain(states, self._next_positions(1)[:, 0], self.cache)
        zeros = states.new_zeros((), dtype=torch.float32).expand(
            len(states), num_drafts, self.drafter.config.logits_size
        )
        return self._sequential_stage(input_ids, states[:, None], zeros, max_drafts)

    def _extend_cache(self, input_ids: Sequence[torch.Tensor], counts: list[int]) -> None:
        """Moves the first `counts` states of each row into the cache; the row's last tokens are those after its states."""
        if not any(counts):
            return
        following = [
            ids[0, ids.shape[1] - len(states) :][:count]
            for ids, states, count in zip(input_ids, self._states, counts, strict=True)
        ]
        moved = [states[:count] for states, count in zip(self._states, counts, strict=True)]
        pad = torch.nn.utils.rnn.pad_sequence
        positions = self._next_positions(max(counts))
        self.drafter.extend_cache(
            self.cache,
            pad(following, batch_first=True),
            pad(moved, batch_first=True),
            positions,
            counts,
            self.embeddings,
        )
        self._states = [states[count:] for states, count in zip(self._states, counts, strict=True)]

    def _skip_tokens_without_id(self, input_ids: Sequence[torch.Tensor]) -> None:
        """A prompt given as embeddings has states whose next token is unknown: the context starts behind them."""
        for row, (ids, states) in enumerate(zip(input_ids, self._states, strict=True)):
            if (num_unknown := len(states) - ids.shape[1]) > 0:
                self._states[row] = states[num_unknown:]
                self.first_positions[row] += num_unknown


def generator_of(drafter: Drafter) -> type[DSparkCandidateGenerator]:
    """What drafts with a drafter of this kind."""
    return Eagle3CandidateGenerator if drafter.config.is_autoregressive else DSparkCandidateGenerator
