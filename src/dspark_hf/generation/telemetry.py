"""Statistics of each round: `with record_speculation() as stats: target.generate(...)`."""

from __future__ import annotations

import contextlib
import contextvars
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

# The prompts, the three parts of a round, and what happens inside them.
Stage = Literal["prompt", "draft", "verify", "commit"]
InnerStage = Literal[
    "target pass",
    "backbone",
    "draft LM head",
    "sequential stage",
    "confidence",
    "processors",
    "context features",
    "acceptance",
    "cache handling",
]


@dataclass
class Round:
    """
    Statistics of one round of one row.

    Args:
        drafted: Tokens the drafter proposed.
        verified: Drafts sent to the target. Drafts after the end of the output are not counted.
        accepted: Drafts that were accepted. The token of the target that follows them is not counted.
        committed: Tokens added to the output: the accepted drafts and the target's token, unless the output ended before.
        confidence: The confidence head's probability for each drafted slot, and for the slot at which drafting stopped;
            empty without a head.
        drafting_s, verifying_s, elsewhere_s: Wall-clock seconds in the drafter, in the target's pass and elsewhere; the
            rows of a batch share them equally.
        row: Index of the row in the batch.
        skipped: Whether back-off skipped drafting, so that the round was a step of plain decoding.
        fed: Tokens that went through the target: the anchor, the drafts, and with recurrent state those fed again.
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
    fed: int = 0

    @classmethod
    def cut_to_output(cls, *, verified: int, accepted: int, committed: int, **others: Any) -> Round:
        """
        The statistics of a round in which the output may have ended.

        Args:
            verified: Drafts sent to the target.
            accepted: Drafts that were accepted.
            committed: Tokens added to the output: fewer than `accepted + 1` if it ended inside the drafts.
            others: The other fields.
        """
        ended_inside_drafts = committed <= accepted
        return cls(
            verified=committed if ended_inside_drafts else verified,
            accepted=min(accepted, committed),
            committed=committed,
            **others,
        )


class StageClock:
    """
    Sums the time of the stages of decoding.

    The time of a stage inside another stage is not counted for the outer one.

    Args:
        synchronize: Waits until the device has finished; called before each reading of the clock. Without it, the times of an
            accelerator are those of launching work, not of finishing it.

    Attributes:
        seconds (`dict[tuple[str, str], float]`): Seconds by the outermost stage and the stage itself.
    """

    def __init__(self, synchronize: Callable[[], None] = lambda: None):
        self.seconds: dict[tuple[str, str], float] = {}
        self._synchronize = synchronize
        self._running: list[str] = []
        self._last_reading = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times what runs inside."""
        self._read()
        self._running.append(name)
        try:
            yield
        finally:
            self._read()
            self._running.pop()

    def total(self, outermost: Stage) -> float:
        """Seconds of an outermost stage with everything inside it."""
        return sum(seconds for (outer, _), seconds in self.seconds.items() if outer == outermost)

    def _read(self) -> None:
        """Adds the time since the last reading to the innermost running stage."""
        self._synchronize()
        now = time.perf_counter()
        if self._running:
            key = (self._running[0], self._running[-1])
            self.seconds[key] = self.seconds.get(key, 0.0) + now - self._last_reading
        self._last_reading = now


@dataclass
class SpeculationStats:
    """
    The rounds of every `generate` call inside [`record_speculation`], and totals derived from them.

    Args:
        rounds: All rounds, in order.
        clock: The time that each stage took.
    """

    rounds: list[Round] = field(default_factory=list)
    clock: StageClock = field(default_factory=StageClock)

    def __post_init__(self) -> None:
        self._prompts_before_s = self.clock.total("prompt")
        self._counted_s = self._rounds_s()

    def add(self, rounds: list[Round]) -> None:
        """
        Adds one round of each row, with the time on the clock since the rounds before.

        Args:
            rounds: One per row that was decoded.
        """
        rounds_s = self._rounds_s()
        shares = [(now - before) / len(rounds) for now, before in zip(rounds_s, self._counted_s, strict=True)]
        for record in rounds:
            record.drafting_s, record.verifying_s, record.elsewhere_s = shares
        self._counted_s = rounds_s
        self.rounds += rounds

    @property
    def prefill_s(self) -> float:
        """Wall-clock seconds spent on prompts."""
        return self.clock.total("prompt") - self._prompts_before_s

    @property
    def acceptance_length(self) -> float:
        """Tokens committed per target pass, the bonus token included, averaged over rounds; NaN without rounds."""
        return _ratio(self.num_committed, len(self.rounds))

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafts sent to the target; NaN when none was sent."""
        return _ratio(sum(r.accepted for r in self.rounds), sum(r.verified for r in self.rounds))

    @property
    def conditional_acceptance(self) -> list[float]:
        """For each slot, the share of accepted drafts among those verified there whose predecessors were all accepted."""
        longest = max((r.verified for r in self.rounds), default=0)
        reached = [sum(r.verified > k and r.accepted >= k for r in self.rounds) for k in range(longest)]
        passed = [sum(r.accepted > k for r in self.rounds) for k in range(longest)]
        return [_ratio(p, n) for p, n in zip(passed, reached, strict=True)]

    @property
    def num_committed(self) -> int:
        """Tokens that the rounds added to the outputs."""
        return sum(r.committed for r in self.rounds)

    @property
    def num_fed(self) -> int:
        """Tokens that went through the target in the rounds."""
        return sum(r.fed for r in self.rounds)

    def _rounds_s(self) -> tuple[float, ...]:
        return self.clock.total("draft"), self.clock.total("verify"), self.clock.total("commit")


# A context variable, so that each thread and each asyncio task records only its own calls.
_recorder: contextvars.ContextVar[SpeculationStats | None] = contextvars.ContextVar("dspark_hf_stats", default=None)
_UNTIMED = contextlib.nullcontext()


@contextlib.contextmanager
def record_speculation(clock: StageClock | None = None) -> Iterator[SpeculationStats]:
    """
    Records every round of the `generate` calls made inside, in this thread.

    ```python
    >>> with record_speculation() as stats:  # doctest: +SKIP
    ...     target.generate(**inputs, assistant_model=drafter)
    >>> stats.acceptance_length  # doctest: +SKIP
    3.64
    ```

    Args:
        clock (*optional*): Times the stages. A clock that synchronizes makes the times of all stages exact, and decoding
            slower.
    """
    stats = SpeculationStats(clock=clock if clock is not None else StageClock())
    token = _recorder.set(stats)
    try:
        yield stats
    finally:
        _recorder.reset(token)


def current_recorder() -> SpeculationStats | None:
    """The statistics being recorded in this context, if any."""
    return _recorder.get()


def stage(name: Stage | InnerStage) -> contextlib.AbstractContextManager[None]:
    """Times the code inside as this stage. Without an active recorder it does almost nothing."""
    recorder = None if torch.compiler.is_compiling() else _recorder.get()
    return _UNTIMED if recorder is None else recorder.clock.stage(name)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else float("nan")
