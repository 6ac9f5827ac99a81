"""Which tokens come out of one target pass: accepted drafts, then the target's own token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import LogitsProcessorList

from ..sampling import draw, passes, residual, verify_greedy, verify_sampled
from .candidate_generator import Draft
from .logits_process import is_rowwise


class TokenChoice:
    """
    Applies the user's processors to the target's logits and decides which drafts pass.

    Processors that look at the scores alone see all positions of a round in one call. Any other sees exactly the calls
    that plain `generate` makes, one for each committed token in order, so processors with state are right too.

    Args:
        logits_processor: As `generate` prepared them.
        do_sample: Rejection sampling, or greedy agreement.
        logits: The target's float32 logits at the anchor and each verified draft, `[B, L + 1, V]`.
        draft: The drafts verified, `ids` `[B, L]`.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool, logits: torch.Tensor, draft: Draft):
        self.is_rowwise = is_rowwise(logits_processor)
        self.num_slots = logits.shape[1]
        self.num_accepted = 0
        self._processor = logits_processor
        self._do_sample = do_sample
        self._logits = logits
        self._draft_ids = draft.ids[:, : self.num_slots - 1].to(logits.device)
        self._draft_probs = None if draft.probs is None else draft.probs[:, : self.num_slots - 1].to(logits.device)
        self._scores: list[torch.Tensor] = []

    def all_tokens(self) -> torch.Tensor:
        """The tokens of the round at once, `[1, N]`: drafts that pass and the one that follows. Row-wise processors only."""
        scores = self._logits
        if self._processor:
            flat = scores.reshape(-1, scores.shape[-1]).clone()
            no_ids = self._draft_ids.new_zeros(len(flat), 0)
            scores = self._processor(no_ids, flat).view_as(scores)
        self._scores = list(scores.unbind(1))
        if not self._do_sample:
            accepted, follow = verify_greedy(self._draft_ids, scores.argmax(-1))
        else:
            probs = scores.softmax(-1)
            draft_probs = self._draft_probs if self._draft_probs is not None else probs[:, :0]
            accepted, follow = verify_sampled(self._draft_ids, draft_probs, probs)
        self.num_accepted = int(accepted[0])
        return torch.cat([self._draft_ids[:, : self.num_accepted], follow[:, None]], dim=1)

    def one_by_one(self, current_ids: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
        """
        The tokens of the round, each chosen only once the one before it is committed.

        Args:
            current_ids: Gives all tokens committed so far, `[1, L]`, when called.
        """
        for slot in range(self.num_slots):
            scores = self._processor(current_ids(), self._logits[:, slot].clone())
            self._scores.append(scores)
            accepted, token_ids = self._verify_slot(slot, scores)
            self.num_accepted += accepted
            yield token_ids
            if not accepted:
                return

    def scores_at(self, slot: int) -> torch.Tensor:
        """Processed scores `[B, V]` that gave the token at `slot`."""
        return self._scores[slot]

    def logits_at(self, slot: int) -> torch.Tensor:
        """The target's raw logits `[B, V]` at `slot`."""
        return self._logits[:, slot].clone()

    def _verify_slot(self, slot: int, scores: torch.Tensor) -> tuple[bool, torch.Tensor]:
        """Whether the draft at `slot` passes, and the token there: the draft, or the target's own."""
        has_draft = slot < self.num_slots - 1
        if not self._do_sample:
            chosen = scores.argmax(-1)
            return has_draft and bool(chosen == self._draft_ids[:, slot]), chosen
        probs = scores.softmax(-1)
        if not has_draft:
            return False, draw(probs)
        assert self._draft_probs is not None
        draft_ids, draft_probs = self._draft_ids[:, slot], self._draft_probs[:, slot]
        if bool(passes(draft_ids, draft_probs, probs)):
            return True, draft_ids
        return False, draw(residual(probs, draft_probs))
