"""How many drafts each row sends to the target, decided in every round. One interface, four implementations (paper section 4).

None of them may let a drafted token decide whether it is verified itself: `c_k` is computed before `x_k` is drawn, so a
decision about slot `k` may use the confidences of slots up to `k`, and those of other rows, which know nothing of `x_k`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from .admission import Ranking, admitted_lengths, count_of_best, count_until_no_gain, rank_candidates, throughputs
from .survival import confident_lengths


class CostTable(Protocol):
    """What the throughput schedulers ask of a [`ThroughputCurve`]."""

    def table(self, max_tokens: int, num_rows: int) -> np.ndarray:
        """
        Rounds a second with `B` tokens in the target's pass at index `B`, `[max_tokens + 1]`; index 0 is unused.

        Args:
            max_tokens: The highest index needed.
            num_rows: Rows that were drafted for.
        """


class VerifyScheduler:
    """
    Decides the verify lengths of a round. This base class verifies everything.

    A scheduler with state belongs to one `generate` call at a time; [`~VerifyScheduler.start`] makes it ready for the next.
    """

    needs_confidence = False

    def start(self) -> None:
        """Forgets the rounds of an earlier call."""

    def schedule(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None = None
    ) -> list[int]:
        """
        Called once a round, after drafting and before the target's pass.

        Args:
            confidence: Calibrated `c_k` of each draft, `[R, G]`; may be `None` unless `needs_confidence`.
            max_lengths: Drafts of each row that exist and are of use, `[R]`, 0 .. `G`.
            rows: What identifies each of the `R` rows from round to round, where rows leave or join; their order by default.

        Returns:
            Leading drafts of each row to verify, `[R]`.

        Raises:
            ValueError: when confidences are needed and missing, or the shapes disagree.
        """
        return self._lengths(self._checked(confidence, max_lengths), max_lengths, rows)

    def keeps_drafting(
        self, confidence: torch.Tensor, max_lengths: Sequence[int], rows: Sequence[int] | None = None
    ) -> bool:
        """
        Whether any row would verify the last slot of `confidence`, asked before a token is drawn there. If not, no later
        slot can be verified either, and drafting may end.

        Args:
            confidence: `c_1 .. c_k` of each row, `[R, k]`.
            max_lengths, rows: As in [`~VerifyScheduler.schedule`].
        """
        num_slots = confidence.shape[1]
        capped = [min(length, num_slots) for length in max_lengths]
        return num_slots in self._lengths(self._checked(confidence, capped), capped, rows)

    # ------------------------------------------------------------------ helpers

    def _lengths(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None
    ) -> list[int]:
        """The decision itself; changes no state."""
        return list(max_lengths)

    def _checked(self, confidence: torch.Tensor | None, max_lengths: Sequence[int]) -> torch.Tensor | None:
        if confidence is None:
            if self.needs_confidence:
                raise ValueError(
                    f"{type(self).__name__} decides by confidence, but this drafter gives none (enable_confidence_head=False). "
                    "Use FixedLength, or a drafter with a confidence head."
                )
        elif (
            confidence.dim() != 2
            or len(confidence) != len(max_lengths)
            or max(max_lengths, default=0) > confidence.shape[1]
        ):
            raise ValueError(
                f"Confidences of shape {list(confidence.shape)} do not fit {len(max_lengths)} rows with "
                f"{max(max_lengths, default=0)} drafts at most: they must be [rows, slots]."
            )
        return confidence


class FixedLength(VerifyScheduler):
    """
    Every row verifies the same number of drafts.

    Args:
        length: As many as there are when `None`.
    """

    def __init__(self, length: int | None = None):
        if length is not None and length < 0:
            raise ValueError(f"length={length} drafts cannot be verified; 0 is plain decoding.")
        self.length = length

    def _lengths(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None
    ) -> list[int]:
        return [longest if self.length is None else min(self.length, longest) for longest in max_lengths]


class ConfidenceThreshold(VerifyScheduler):
    """
    A row's drafts end before its first slot less confident than a threshold (static threshold, paper section 3.3).

    Args:
        threshold: 0 verifies everything; above 1, nothing.
    """

    needs_confidence = True

    def __init__(self, threshold: float):
        if not threshold >= 0:
            raise ValueError(f"threshold={threshold} must be 0 (verify everything) or more.")
        self.threshold = threshold

    def _lengths(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None
    ) -> list[int]:
        assert confidence is not None
        confident = confident_lengths(confidence, self.threshold).tolist()
        return [min(pair) for pair in zip(confident, max_lengths, strict=True)]


class ThroughputScheduler(VerifyScheduler):
    """
    Verifies drafts, the likeliest first, while each raises the expected tokens per second (Algorithm 1, with its early stop).

    It finds the best choice of all when the throughput rises, then falls, as drafts are added: with a smooth cost curve. On
    a curve with steps it stops in front of a step that might have paid; [`AsyncThroughputScheduler`] does not.

    Args:
        curve: What a pass costs, such as a [`ThroughputCurve`].
    """

    needs_confidence = True

    def __init__(self, curve: CostTable):
        self.curve = curve

    def _lengths(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None
    ) -> list[int]:
        ranking = _ranked(confidence, max_lengths)
        return admitted_lengths(ranking, self._count(ranking, _row_ids(rows, max_lengths)), len(max_lengths))

    def _count(self, ranking: Ranking, row_ids: np.ndarray) -> int:
        """How many of the ranked candidates are admitted."""
        return count_until_no_gain(self._throughputs(ranking, len(row_ids)))

    def _throughputs(self, ranking: Ranking, num_rows: int) -> np.ndarray:
        return throughputs(ranking, num_rows, self.curve.table(num_rows + len(ranking.rows), num_rows))


class _PastRound(NamedTuple):
    ranking: Ranking
    row_ids: np.ndarray  # of each candidate, [M]


class AsyncThroughputScheduler(ThroughputScheduler):
    """
    The form for cost curves with steps, and for engines that prepare a round ahead (paper section 4, asynchronous form).

    How MANY drafts the coming round verifies in all is searched without restriction, over the confidences of two rounds
    earlier: none of the current tokens existed then, so nothing can leak. WHICH ones is decided by their own current
    survival, the best first. The first two rounds of a call use Algorithm 1.

    Args:
        curve: What a pass costs, such as a [`ThroughputCurve`].
    """

    def __init__(self, curve: CostTable):
        super().__init__(curve)
        self._past: deque[_PastRound] = deque(maxlen=2)

    def start(self) -> None:
        self._past.clear()

    def schedule(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None = None
    ) -> list[int]:
        ranking, row_ids = _ranked(self._checked(confidence, max_lengths), max_lengths), _row_ids(rows, max_lengths)
        lengths = admitted_lengths(ranking, self._count(ranking, row_ids), len(max_lengths))
        self._past.append(_PastRound(ranking, row_ids[ranking.rows]))
        return lengths

    def _count(self, ranking: Ranking, row_ids: np.ndarray) -> int:
        if len(self._past) < 2:
            return super()._count(ranking, row_ids)
        past = self._past[0]
        still_there = np.isin(past.row_ids, row_ids)
        known = Ranking(past.ranking.rows[still_there], past.ranking.survival[still_there])
        return count_of_best(self._throughputs(known, len(row_ids)))


SCHEDULERS = ("fixed", "threshold", "throughput", "async_throughput")


def build_scheduler(name: str, *, threshold: float = 0.0, curve: CostTable | None = None) -> VerifyScheduler:
    """
    A scheduler by name, for configurations and command lines.

    Args:
        name: One of `SCHEDULERS`.
        threshold: For `"threshold"`.
        curve: For `"throughput"` and `"async_throughput"`.

    Raises:
        ValueError: for another name, or without the curve that the scheduler needs.
    """
    if name not in SCHEDULERS:
        raise ValueError(f"Unknown verify scheduler {name!r}: use one of {SCHEDULERS}.")
    if name == "fixed":
        return FixedLength()
    if name == "threshold":
        return ConfidenceThreshold(threshold)
    if curve is None:
        raise ValueError(
            f"The {name!r} scheduler weighs drafts against what a target pass costs here: measure that once with `dspark-hf "
            "profile`, or set drafter.throughput_curve = ThroughputCurve.measure(target)."
        )
    return ThroughputScheduler(curve) if name == "throughput" else AsyncThroughputScheduler(curve)


def _ranked(confidence: torch.Tensor | None, max_lengths: Sequence[int]) -> Ranking:
    assert confidence is not None
    return rank_candidates(confidence.detach().to("cpu", torch.float64).numpy(), np.asarray(max_lengths))


def _row_ids(rows: Sequence[int] | None, max_lengths: Sequence[int]) -> np.ndarray:
    return np.arange(len(max_lengths)) if rows is None else np.asarray(rows)
