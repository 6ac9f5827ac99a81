"""Chooses the tokens of a round from the target's logits: the accepted drafts, then one token of the target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import LogitsProcessorList

from ..sampling import NO_TOKEN, draw_or_none, passes, residual, verify_greedy, verify_sampled
from .candidate_generator import Draft
from .logits_process import processed
from .telemetry import stage


class TokenChoice:
    """
    Applies the user's processors to the target's logits and decides which drafts are accepted, in one of two ways.

    [`choose_at_once`] decides the whole round together, for processors whose result depends on the scores alone.
    [`~TokenChoice.one_by_one`] calls the processors once per committed token, in order, exactly as plain `generate` does, so
    that processors with state work too.

    Args:
        logits_processor: As `generate` prepared them.
        do_sample: Whether to use rejection sampling; otherwise drafts are accepted while they equal the most likely token.
        logits: The target's float32 logits at the anchor and each verified draft, `[1, L + 1, V]`.
        draft: The drafts verified, `ids` `[1, L]`.

    Attributes:
        num_accepted (`int`): Accepted drafts so far.
        tokens (`torch.Tensor` of shape `[1, N]`): The chosen tokens; `None` if they are chosen one by one.
        listed (`list[int]`): The same tokens as a list.
    """

    def __init__(self, logits_processor: LogitsProcessorList, do_sample: bool, logits: torch.Tensor, draft: Draft):
        self.num_slots = logits.shape[1]
        self.num_accepted = 0
        self.tokens: torch.Tensor | None = None
        self.listed: list[int] = []
        self._processor = logits_processor
        self._do_sample = do_sample
        self._logits = logits
        self._draft_ids = draft.ids[:, : self.num_slots - 1].to(logits.device)
        self._draft_probs = None if draft.probs is None else draft.probs[:, : self.num_slots - 1].to(logits.device)
        self._scores: list[torch.Tensor] = []

    def decide(self) -> torch.Tensor:
        """Decides the round on the device: `[L + 2]`, the number of accepted drafts, then the tokens of the slots."""
        scores = self._logits
        if self._processor:
            with stage("processors"):
                flat = scores.reshape(-1, scores.shape[-1]).clone()
                scores = processed(self._processor, self._draft_ids.new_zeros(len(flat), 0), flat).view_as(scores)
        self._scores = list(scores.unbind(1))
        if not self._do_sample:
            accepted, follow = verify_greedy(self._draft_ids, scores.argmax(-1))
        else:
            probs = scores.softmax(-1)
            draft_probs = self._draft_probs if self._draft_probs is not None else probs[:, :0]
            accepted, follow = verify_sampled(self._draft_ids, draft_probs, probs)
        # The target's token is written after the accepted drafts; the entries after it are unused.
        self.tokens = torch.nn.functional.pad(self._draft_ids, (0, 1)).scatter(1, accepted[:, None], follow[:, None])
        return torch.cat([accepted, self.tokens[0]])

    def settle(self, num_accepted: int, listed: list[int]) -> None:
        """Stores the result of [`~TokenChoice.decide`], once it has been copied from the device."""
        assert self.tokens is not None
        self.num_accepted, self.listed = num_accepted, checked(listed[: num_accepted + 1])
        self.tokens = self.tokens[:, : num_accepted + 1]

    def one_by_one(self, current_ids: Callable[[], torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
        """
        The tokens of the round, each as a tensor `[1]` and as a number, chosen only after the previous one is committed.

        Args:
            current_ids: Returns all tokens committed so far, `[1, L]`.
        """
        for slot in range(self.num_slots):
            with stage("processors"):
                scores = processed(self._processor, current_ids(), self._logits[:, slot].clone())
            self._scores.append(scores)
            with stage("acceptance"):
                decision = self._decide_slot(slot, scores)
                accepted, token = decision.tolist()
            self.num_accepted += accepted
            yield decision[1:], checked([token])[0]
            if not accepted:
                return

    def scores_at(self, slot: int) -> torch.Tensor:
        """Processed scores `[1, V]` from which the token at `slot` was chosen."""
        return self._scores[slot]

    def logits_at(self, slot: int) -> torch.Tensor:
        """The target's raw logits `[1, V]` at `slot`."""
        return self._logits[:, slot].clone()

    def _decide_slot(self, slot: int, scores: torch.Tensor) -> torch.Tensor:
        """Whether the draft at `slot` is accepted, and the token there: the draft, or one of the target; `[2]`."""
        has_draft = slot < self.num_slots - 1
        draft_ids = self._draft_ids[:, slot] if has_draft else None
        if not self._do_sample:
            token_ids = scores.argmax(-1)
            accepted = torch.zeros_like(token_ids) if draft_ids is None else token_ids == draft_ids
            return torch.cat([accepted, token_ids])
        probs = scores.softmax(-1)
        if draft_ids is None:
            token_ids = draw_or_none(probs)
            return torch.cat([torch.zeros_like(token_ids), token_ids])
        assert self._draft_probs is not None
        draft_probs = self._draft_probs[:, slot]
        accepted = passes(draft_ids, draft_probs, probs)
        token_ids = torch.where(accepted, draft_ids, draw_or_none(residual(probs, draft_probs)))
        return torch.cat([accepted, token_ids])


def checked(token_ids: list[int]) -> list[int]:
    """
    The tokens of a round, as read from the device.

    Raises:
        RuntimeError: when one could not be drawn; plain `generate` raises it as well.
    """
    if NO_TOKEN in token_ids:
        raise RuntimeError(
            "No token can be drawn: the target's scores, as the logits processors left them, hold NaN or rule out every token. "
            "Check the target's weights and dtype, and the processors."
        )
    return token_ids


def choose_at_once(choices: Sequence[TokenChoice]) -> None:
    """Decides the rounds of several rows and copies all decisions from the device at once."""
    with stage("acceptance"):
        decisions = [choice.decide() for choice in choices]
        read = torch.cat(decisions).tolist()
    start = 0
    for choice, decision in zip(choices, decisions, strict=True):
        num_accepted, *listed = read[start : start + len(decision)]
        choice.settle(num_accepted, listed)
        start += len(decision)
