"""The random numbers of a request: one race for each of its tokens, whatever shares its passes."""

from __future__ import annotations

from collections import deque

import torch
from transformers import LogitsProcessor


class Races:
    """
    Numbers from the exponential distribution for each coming token, drawn in the order of the tokens.

    Token `t` is the winner of race `t` among the target's probabilities: a draw from exactly these. A draft for token `t` is the
    winner of the same race among the drafter's probabilities. So drafts decide how many passes an output takes and never which
    tokens it has, and a seed gives the same output with any drafter, any scheduler and any other requests beside it.

    Args:
        seed: Of the request.
        vocab_size: Tokens in a race.
        device: Where the numbers are drawn. Each kind of device has its own sequence.
    """

    def __init__(self, seed: int, vocab_size: int, device: torch.device):
        self._generator = torch.Generator(device).manual_seed(seed)
        self._vocab_size = vocab_size
        self._coming: deque[torch.Tensor] = deque()

    def at(self, slot: int) -> torch.Tensor:
        """The race of the token `slot` places after the next one, `[V]`."""
        while len(self._coming) <= slot:
            race = torch.empty(self._vocab_size, device=self._generator.device)
            self._coming.append(race.exponential_(generator=self._generator))
        return self._coming[slot]

    def advance(self, num_tokens: int) -> None:
        """Drops the races of tokens that are final."""
        for _ in range(num_tokens):
            self._coming.popleft()


class RaceLogitsProcessor(LogitsProcessor):
    """
    Turns the scores of a round into the rates of its races, behind all other processors: the highest wins.

    See "Coupling without Communication and Drafter-Invariant Speculative Decoding" (Daliri et al., 2024).

    Args:
        races: Those of the request. The first call takes the first ones, the next call those that follow.
    """

    def __init__(self, races: Races):
        self._races = races
        self._num_taken = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores of `N` tokens that follow each other, `[N, V]` -> `[N, V]`."""
        slots = range(self._num_taken, self._num_taken + len(scores))
        self._num_taken += len(scores)
        rates = scores.softmax(-1) / torch.stack([self._races.at(slot) for slot in slots]).to(scores.device)
        if not bool((rates.amax(-1) > 0).all()):
            raise RuntimeError(
                "No token can be drawn: the scores, as the logits processors left them, hold NaN or rule out every token."
            )
        return rates
