"""Verification schedulers, which decide in every round how many drafts of each row are verified (paper section 4).

To keep the output distribution exact, a drafted token must not influence whether it is verified. `c_k` is computed before `x_k`
is drawn, so a decision about slot `k` may use the confidences of slots up to `k`, and those of other rows, which do not
depend on `x_k`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from .admission import (
    Ranking,
    admitted_lengths,
    best_from,
    count_of_best,
    count_until_no_gain,
    filled_up,
    rank_candidates,
    throughputs,
)
from .survival import confident_lengths


class CostTable(Protocol):
    """The method of a [`ThroughputCurve`] that throughput schedulers use."""

    def table(self, max_tokens: int, num_rows: int) -> np.ndarray:
        """
        Rounds per second, by the number of tokens `B` in the target's pass as index, `[max_tokens + 1]`; index 0 is unused.

        Args:
            max_tokens: The highest index needed.
            num_rows: Rows with drafts, whose drafting time counts.
        """


# A pass over more tokens has to be cheaper by this part before a round fills up to it, so that noise alone is not followed.
_WORTH_FILLING = 0.02


class VerifyScheduler:
    """
    Decides the verify lengths of a round. This base class verifies everything.

    A scheduler may have state, so it serves one `generate` call at a time; [`~VerifyScheduler.start`] resets it for the next.

    Attributes:
        num_fed_again (`int`):
            Tokens that the coming pass feeds besides anchors and drafts, because drafts before them were rejected. Set before
            each round; only targets with recurrent state have any.
        most_drafts (`int`, *optional*):
            Drafts that all rows together could verify in the coming round if none was ended early. Set before each round;
            `None` means the sum of `max_lengths`.
    """

    needs_confidence = False
    num_fed_again = 0
    most_drafts: int | None = None

    def start(self) -> None:
        """Resets the state at the start of a call."""

    def schedule(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None = None
    ) -> list[int]:
        """
        Called once per round, after drafting and before the target's pass.

        Args:
            confidence: Calibrated `c_k` of each draft, `[R, G]`; may be `None` unless `needs_confidence`.
            max_lengths: The most drafts that may be verified of each row, `[R]`, 0 .. `G`.
            rows: An identifier of each of the `R` rows that stays the same when other rows leave or join; the index by default.

        Returns:
            How many leading drafts of each row to verify, `[R]`.

        Raises:
            ValueError: when confidences are needed and missing, or the shapes disagree.
        """
        return self._lengths(self._checked(confidence, max_lengths), max_lengths, rows)

    def keeps_drafting(
        self, confidence: torch.Tensor, max_lengths: Sequence[int], rows: Sequence[int] | None = None
    ) -> bool:
        """
        Whether any row would verify the last slot of `confidence`. Called before a token is drawn there. If not, later slots
        would not be verified either, and drafting ends.

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
        """The decision; does not change the state."""
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
        length: Drafts per row; `None` verifies all.
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
    Verifies each row up to its first slot below a confidence threshold (static threshold, paper section 3.3).

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
    Verifies the likeliest drafts, as long as each more raises the expected tokens per second (Algorithm 1 with its early stop).

    The result is optimal if the throughput first rises and then falls as drafts are added, as with a smooth cost curve. On
    a curve with steps it stops before a step that might have paid; [`AsyncThroughputScheduler`] does not. Where a pass over
    more tokens is cheaper (12 tokens may cost more than 16), the round is filled up to them with the next best drafts.

    Args:
        curve: What a pass costs, such as a [`ThroughputCurve`].
    """

    needs_confidence = True

    def __init__(self, curve: CostTable):
        self.curve = curve

    def _lengths(
        self, confidence: torch.Tensor | None, max_lengths: Sequence[int], rows: Sequence[int] | None
    ) -> list[int]:
        return self._admitted(_ranked(confidence, max_lengths), max_lengths, _row_ids(rows, max_lengths))

    def _admitted(self, ranking: Ranking, max_lengths: Sequence[int], row_ids: np.ndarray) -> list[int]:
        """
        The lengths, filled up to a cheaper pass.

        This stays exact. The cost curve and the number of drafts that could be verified decide how far a count is filled up,
        not the confidences, and a slot ranks behind all that its row has before it. So whether a slot is among those filled
        in depends on candidates down to it alone, as in Algorithm 1.
        """
        num_rows = len(row_ids)
        # Not the number of ranked drafts: how many there are may depend on tokens that are being decided about.
        most_tokens = num_rows + max(self.most_drafts or 0, sum(max_lengths))
        rates = self.curve.table(most_tokens + self.num_fed_again, num_rows)[self.num_fed_again :][: most_tokens + 1]
        count = self._count(ranking, row_ids, best_from(rates))
        return admitted_lengths(ranking, filled_up(count, num_rows, rates, _WORTH_FILLING), num_rows)

    def _count(self, ranking: Ranking, row_ids: np.ndarray, rates: np.ndarray) -> int:
        """How many of the ranked candidates are admitted, given the rounds per second by tokens, which never rise."""
        return count_until_no_gain(throughputs(ranking, len(row_ids), rates))


class _PastRound(NamedTuple):
    ranking: Ranking
    row_ids: np.ndarray  # of each candidate, [M]


class AsyncThroughputScheduler(ThroughputScheduler):
    """
    For cost curves with steps, and for engines that prepare a round in advance (paper section 4, asynchronous form).

    The total number of drafts that a round verifies is the best number for the confidences of two rounds earlier. None of the
    current tokens existed then, so they cannot influence it, and an early stop is not necessary. Which drafts are verified
    is then decided by their current survival, best first. The first two rounds of a call use Algorithm 1.

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
        lengths = self._admitted(ranking, max_lengths, row_ids)
        self._past.append(_PastRound(ranking, row_ids[ranking.rows]))
        return lengths

    def _count(self, ranking: Ranking, row_ids: np.ndarray, rates: np.ndarray) -> int:
        if len(self._past) < 2:
            return super()._count(ranking, row_ids, rates)
        past = self._past[0]
        still_there = np.isin(past.row_ids, row_ids)
        most = len(rates) - 1 - len(row_ids)
        known = Ranking(past.ranking.rows[still_there][:most], past.ranking.survival[still_there][:most])
        return count_of_best(throughputs(known, len(row_ids), rates))


SCHEDULERS = ("fixed", "threshold", "throughput", "async_throughput")


def build_scheduler(name: str, *, threshold: float = 0.0, curve: CostTable | None = None) -> VerifyScheduler:
    """
    Makes a scheduler from its name, for configurations and command lines.

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
