"""What happened in each round, kept for whoever asks: `with record_speculation() as stats: target.generate(...)`."""

from __future__ import annotations

import contextlib
import contextvars
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .candidate_generator import Draft
    from .token_choice import TokenChoice


@dataclass
class Round:
    """
    One draft-verify-commit of one row.

    Args:
        drafted: Tokens the drafter proposed.
        verified: Of those, tokens sent to the target. Where the output ends inside the drafts, those after its end do
            not count.
        accepted: Of those, tokens that passed (bonus not counted).
        committed: Tokens added to the output: accepted ones and the one that follows, unless the output ended.
        confidence: The confidence head's probability for each drafted slot, and for the one that ended the draft early;
            empty without a head.
        drafting_s, verifying_s, elsewhere_s: Wall-clock seconds in the drafter, in the target's pass, in all else; the
            rows of a batch share them equally.
        row: Row of the batch.
        skipped: Whether drafting paused because it had not paid: a step of plain decoding.
    """

    drafted: int
    verified: int
    accepted: int
    committed: int
    confidence: list[float] = field(default_factory=list)
    drafting_s: float = 0.0
    verifying_s: float = 0.0
    elsewhere_s: float = 0.0
    row: int = 0
    skipped: bool = False

    @classmethod
    def of(cls, row: int, drafted: int, draft: Draft, choice: TokenChoice, committed: int) -> Round:
        """
        The record of one row's round, without its times.

        Args:
            row: Row of the batch.
            drafted: Tokens the drafter proposed.
            draft: What of it was sent to the target, `[1, L]`.
            choice: What the target made of it.
            committed: Tokens added to the output.
        """
        ended_in_drafts = committed <= choice.num_accepted
        skipped = not all(draft.wanted)
        return cls(
            drafted=0 if skipped else drafted,
            verified=committed if ended_in_drafts else choice.num_slots - 1,
            accepted=min(choice.num_accepted, committed),
            committed=committed,
            confidence=[] if draft.confidence is None else draft.confidence[0].tolist(),
            row=row,
            skipped=skipped,
        )


@dataclass
class SpeculationStats:
    """
    The rounds of every `generate` call inside [`record_speculation`], and totals derived from them.

    Args:
        rounds: In the order they happened.
        prefill_s: Wall-clock seconds spent on prompts.
    """

    rounds: list[Round] = field(default_factory=list)
    prefill_s: float = 0.0

    def add(self, rounds: list[Round], clock: list[float]) -> None:
        """
        Adds one round of each row.

        Args:
            rounds: Of the rows that were decoded together.
            clock: Seconds on a clock at the start, after drafting, after the target's pass and at the end.
        """
        drafting_s, verifying_s, elsewhere_s = ((b - a) / len(rounds) for a, b in itertools.pairwise(clock))
        for record in rounds:
            record.drafting_s, record.verifying_s, record.elsewhere_s = drafting_s, verifying_s, elsewhere_s
        self.rounds += rounds

    @property
    def acceptance_length(self) -> float:
        """Tokens committed a target pass, the target's own included, averaged over rounds; NaN without rounds."""
        return _ratio(self.num_committed, len(self.rounds))

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafts sent to the target; NaN when none was sent."""
        return _ratio(sum(r.accepted for r in self.rounds), sum(r.verified for r in self.rounds))

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each slot: of the drafts verified there whose predecessors all passed, the share that passed."""
        longest = max((r.verified for r in self.rounds), default=0)
        reached = [sum(r.verified > k and r.accepted >= k for r in self.rounds) for k in range(longest)]
        passed = [sum(r.accepted > k for r in self.rounds) for k in range(longest)]
        return [_ratio(p, n) for p, n in zip(passed, reached, strict=True)]

    @property
    def num_committed(self) -> int:
        """Tokens the rounds added to the output."""
        return sum(r.committed for r in self.rounds)


# A context variable: each thread and each asyncio task records its own calls only.
_recorder: contextvars.ContextVar[SpeculationStats | None] = contextvars.ContextVar("dspark_hf_stats", default=None)


@contextlib.contextmanager
def record_speculation() -> Iterator[SpeculationStats]:
    """
    Records every round of the `generate` calls made inside, in this thread.

    ```python
    >>> with record_speculation() as stats:  # doctest: +SKIP
    ...     target.generate(**inputs, assistant_model=drafter)
    >>> stats.acceptance_length  # doctest: +SKIP
    3.64
    ```
    """
    stats = SpeculationStats()
    token = _recorder.set(stats)
    try:
        yield stats
    finally:
        _recorder.reset(token)


def current_recorder() -> SpeculationStats | None:
    """The statistics being recorded in this context, if any."""
    return _recorder.get()


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
