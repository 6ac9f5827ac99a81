"""Figures of merit with their uncertainty. Prompts are the random sample, so prompts are resampled."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..generation.telemetry import Round, SpeculationStats
from ..scheduling import ConfidenceRounds, Reliability, measure_calibration, weighted_mean
from .records import Record

NUM_RESAMPLES = 2000
CONFIDENCE_LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """
    Args:
        value: The estimate; NaN where nothing was measured.
        low, high: Ends of the bootstrap 95 % interval; NaN with fewer than two prompts.
    """

    value: float
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Counts:
    """
    Sums over the answers to one prompt, from which all figures of merit are computed.

    Args:
        tokens: New tokens, including the one from the pass over the prompt.
        seconds: Wall-clock time, including the pass over the prompt.
        decode_s: The same without the pass over the prompt.
        passes: Passes of the target after the one over the prompt.
        drafted: Drafts made; for methods that do not report it, drafts sent to the target.
        verified: Drafts sent to the target.
        accepted: Drafts accepted.
        committed: Tokens that these passes gave.
        drafting_s, verifying_s, elsewhere_s: Time of the stages of rounds; NaN for methods that do not report it.
        peak_bytes: Peak memory; NaN where unknown.
    """

    tokens: float
    seconds: float
    decode_s: float
    passes: float
    drafted: float
    verified: float
    accepted: float
    committed: float
    drafting_s: float
    verifying_s: float
    elsewhere_s: float
    peak_bytes: float


def counts_of(record: Record) -> Counts:
    """The sums of one record."""
    rounds = record.rounds
    tokens = sum(len(turn.output_ids) for turn in record.turns)
    seconds = sum(turn.seconds for turn in record.turns)
    committed = tokens - len(record.turns)  # The pass over a prompt gives the first token of an answer.
    peak = max((turn.peak_bytes for turn in record.turns if turn.peak_bytes is not None), default=math.nan)
    decode_s = seconds - sum(turn.prefill_s for turn in record.turns)
    if rounds:
        return Counts(
            tokens=tokens,
            seconds=seconds,
            decode_s=decode_s,
            passes=len(rounds),
            drafted=sum(r.drafted for r in rounds),
            verified=sum(r.verified for r in rounds),
            accepted=sum(r.accepted for r in rounds),
            committed=sum(r.committed for r in rounds),
            drafting_s=sum(r.drafting_s for r in rounds),
            verifying_s=sum(r.verifying_s for r in rounds),
            elsewhere_s=sum(r.elsewhere_s for r in rounds),
            peak_bytes=peak,
        )
    passes = sum(len(turn.passes) for turn in record.turns)
    verified = sum(fed - 1 for turn in record.turns for fed in turn.passes)
    return Counts(
        tokens=tokens,
        seconds=seconds,
        decode_s=decode_s,
        passes=passes,
        drafted=verified,
        verified=verified,
        accepted=max(committed - passes, 0),
        committed=committed,
        drafting_s=math.nan,
        verifying_s=math.nan,
        elsewhere_s=math.nan,
        peak_bytes=peak,
    )


# Each figure of merit is a ratio of two sums over prompts, and a factor.
RATIOS: dict[str, tuple[str, str, float]] = {
    "acceptance_length": ("committed", "passes", 1.0),
    "acceptance_rate": ("accepted", "verified", 1.0),
    "draft_length": ("drafted", "passes", 1.0),
    "verify_length": ("verified", "passes", 1.0),
    "tokens_per_second": ("tokens", "seconds", 1.0),
    "decode_tokens_per_second": ("committed", "decode_s", 1.0),
    "drafting_ms": ("drafting_s", "passes", 1e3),
    "verifying_ms": ("verifying_s", "passes", 1e3),
    "overhead_ms": ("elsewhere_s", "passes", 1e3),
    "round_ms": ("decode_s", "passes", 1e3),
}


def summarize(records: Iterable[Record], plain: Iterable[Record] = (), seed: int = 0) -> dict[str, Estimate]:
    """
    All figures of merit of one method over some prompts.

    Args:
        records: Records of the method.
        plain: Records of plain `generate`; `speedup` compares with its answers to the same prompts.
        seed: Seed of the resampling.

    Returns:
        `RATIOS`, `speedup` (seconds per token of plain `generate` over those of the method) and `peak_gib`.
    """
    by_prompt = {record.key[:2]: counts_of(record) for record in records}
    counts = list(by_prompt.values())
    estimates = {
        name: ratio_of_sums(_column(counts, top), _column(counts, bottom), factor, seed)
        for name, (top, bottom, factor) in RATIOS.items()
    }
    base = {record.key[:2]: counts_of(record) for record in plain}
    shared = [key for key in by_prompt if key in base]
    estimates["speedup"] = speedup([by_prompt[key] for key in shared], [base[key] for key in shared], seed)
    peaks = _column(counts, "peak_bytes")
    estimates["peak_gib"] = Estimate(float(np.nanmax(peaks)) / 2**30 if np.isfinite(peaks).any() else math.nan)
    return estimates


def ratio_of_sums(top: np.ndarray, bottom: np.ndarray, factor: float = 1.0, seed: int = 0) -> Estimate:
    """`factor * sum(top) / sum(bottom)` over prompts, `[N]` and `[N]`; NaN where the bottom is 0."""

    def statistic(t: np.ndarray, b: np.ndarray, axis: int = -1) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return factor * t.sum(axis) / b.sum(axis)

    return bootstrap((top, bottom), statistic, seed)


def speedup(counts: list[Counts], base: list[Counts], seed: int = 0) -> Estimate:
    """Tokens per second over those of `base`, for the same prompts in the same order."""
    columns = [_column(c, name) for c in (counts, base) for name in ("tokens", "seconds")]

    def statistic(
        tokens: np.ndarray, seconds: np.ndarray, base_tokens: np.ndarray, base_seconds: np.ndarray, axis: int = -1
    ) -> Any:
        with np.errstate(divide="ignore", invalid="ignore"):
            return tokens.sum(axis) / seconds.sum(axis) / (base_tokens.sum(axis) / base_seconds.sum(axis))

    return bootstrap(tuple(columns), statistic, seed)


def bootstrap(columns: tuple[np.ndarray, ...], statistic: Callable[..., Any], seed: int = 0) -> Estimate:
    """
    A statistic and its percentile bootstrap interval. Prompts are resampled, all columns alike.

    Args:
        columns: Values by prompt, each `[N]`.
        statistic: A function of the columns and `axis`.
        seed: Seed of the resampling.

    Raises:
        ImportError: without scipy.
    """
    stats = _scipy_stats()
    if not len(columns[0]):
        return Estimate(math.nan)
    value = float(statistic(*columns))
    if len(columns[0]) < 2 or not math.isfinite(value):
        return Estimate(value)
    result = stats.bootstrap(
        columns,
        statistic,
        n_resamples=NUM_RESAMPLES,
        confidence_level=CONFIDENCE_LEVEL,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
        # All at once would need this many times the memory of the data.
        batch=max(1, 2_000_000 // len(columns[0])),
    )
    return Estimate(value, float(result.confidence_interval.low), float(result.confidence_interval.high))


def conditional_acceptance(rounds: list[Round]) -> list[Estimate]:
    """
    For each slot: of the drafts verified there whose predecessors were all accepted, the share that was accepted, with its
    95 % Wilson interval (rounds are taken as independent).

    Raises:
        ImportError: without scipy.
    """
    estimates = []
    for slot, share in enumerate(SpeculationStats(rounds).conditional_acceptance):
        reached = sum(r.verified > slot and r.accepted >= slot for r in rounds)
        accepted = sum(r.verified > slot and r.accepted > slot for r in rounds)
        estimates.append(Estimate(share, *wilson_interval(accepted, reached)))
    return estimates


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """
    The 95 % interval of a share; NaN without trials.

    Raises:
        ImportError: without scipy.
    """
    stats = _scipy_stats()
    if not trials:
        return math.nan, math.nan
    interval = stats.binomtest(successes, trials).proportion_ci(CONFIDENCE_LEVEL, method="wilson")
    return float(interval.low), float(interval.high)


def _scipy_stats() -> Any:
    try:
        from scipy import stats
    except ImportError as error:
        raise ImportError("Intervals are computed with scipy: pip install 'dspark-hf[eval]'.") from error
    return stats


# ---------------------------------------------------------------------- confidence


@dataclass(frozen=True)
class ConfidenceQuality:
    """
    How well the survival `a_k` predicted which drafts were accepted, slot by slot.

    Args:
        before, after: Without temperatures and with those of the drafter; `after` is `None` where it has none.
    """

    before: list[Reliability]
    after: list[Reliability] | None

    def means(self) -> dict[str, float]:
        """AUC, ECE and Brier score over all slots, of the confidence as the drafter uses it."""
        in_use = self.before if self.after is None else self.after
        return {name: weighted_mean(in_use, name) for name in ("auc", "ece", "brier")}


def confidence_quality(rounds: list[Round], temperatures: list[float] | None) -> ConfidenceQuality | None:
    """
    Quality of the confidences recorded in `rounds`; `None` where there are none.

    Args:
        rounds: Rounds that verified whole blocks; other schedules show the outcome of some drafts only.
        temperatures: The temperatures in use when the rounds were recorded.
    """
    num_slots = max((len(r.confidence) for r in rounds), default=0)
    if not num_slots:
        return None
    in_use = temperatures[:num_slots] if temperatures else None
    data = ConfidenceRounds.from_records(rounds, num_slots, in_use)
    after = measure_calibration(data, in_use) if in_use else None
    return ConfidenceQuality(measure_calibration(data), after)


@dataclass(frozen=True)
class SweepPoint:
    """
    What the rounds of a run would have been with a static threshold.

    Args:
        threshold: The threshold.
        accepted, rejected: Drafts per round.
        rate: Accepted over verified.
    """

    threshold: float
    accepted: float
    rejected: float
    rate: float


def threshold_sweep(rounds: list[Round], thresholds: Iterable[float]) -> list[SweepPoint]:
    """
    What rounds that verified whole blocks would have been under each static threshold.

    A threshold changes neither the drafts before the cut nor whether the target accepts them, so this is exact for each
    round. It would only change where the later rounds start, which affects the averages little.
    """
    usable = [r for r in rounds if r.confidence and r.verified]
    points = []
    for threshold in thresholds:
        verified = [min(confident_prefix(r.confidence, threshold), r.verified) for r in usable]
        accepted = [min(r.accepted, length) for r, length in zip(usable, verified, strict=True)]
        num, total = len(usable) or math.nan, sum(verified)
        rate = sum(accepted) / total if total else math.nan
        points.append(SweepPoint(threshold, sum(accepted) / num, (total - sum(accepted)) / num, rate))
    return points


def confident_prefix(confidence: list[float], threshold: float) -> int:
    """The number of slots before the first one below `threshold`."""
    return next((k for k, c in enumerate(confidence) if c < threshold), len(confidence))


def _column(counts: list[Counts], name: str) -> np.ndarray:
    return np.array([vars(c)[name] for c in counts], dtype=np.float64)
