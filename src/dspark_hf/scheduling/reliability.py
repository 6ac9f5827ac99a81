"""How well predicted probabilities agree with outcomes: ECE, ROC-AUC, Brier score, reliability bins.

A value on the edge between two bins belongs to the upper one; 1 belongs to the last.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Predictions are kept this far from 0 and 1.
CLAMP = 1e-8
NUM_BINS = 20
NUM_AUC_BINS = 1000


@dataclass(frozen=True)
class ReliabilityBin:
    """
    One bar of a reliability diagram.

    Args:
        index: Index among the equal bins of [0, 1].
        weight: Number of predictions in the bin.
        predicted: Mean of the predictions.
        observed: Share of the predictions that came true.
    """

    index: int
    weight: int
    predicted: float
    observed: float


@dataclass(frozen=True)
class Reliability:
    """
    Agreement of predictions with outcomes. Figures are NaN without predictions.

    Args:
        weight: Number of predictions.
        ece: Expected calibration error: `|predicted - observed|` of each bin, averaged over predictions.
        auc: Area under the ROC curve; NaN when all outcomes are the same.
        brier: Mean squared error.
        predicted, observed: Means of predictions and outcomes.
        bins: The bins that are not empty.
    """

    weight: int
    ece: float
    auc: float
    brier: float
    predicted: float
    observed: float
    bins: tuple[ReliabilityBin, ...]


def measure_reliability(predicted: np.ndarray, outcome: np.ndarray, num_bins: int = NUM_BINS) -> Reliability:
    """
    Args:
        predicted: Probabilities, `[N]`.
        outcome: Whether each prediction came true, bool `[N]`.
        num_bins: Equal bins of [0, 1] for the ECE.
    """
    predicted, outcome = clamped(predicted), np.asarray(outcome, dtype=np.float64)
    if not len(predicted):
        nan = float("nan")
        return Reliability(weight=0, ece=nan, auc=nan, brier=nan, predicted=nan, observed=nan, bins=())
    return Reliability(
        weight=len(predicted),
        ece=expected_calibration_error(predicted, outcome, num_bins),
        auc=roc_auc(predicted, outcome),
        brier=float(((predicted - outcome) ** 2).mean()),
        predicted=float(predicted.mean()),
        observed=float(outcome.mean()),
        bins=_bins(predicted, outcome, num_bins),
    )


def clamped(predicted: np.ndarray) -> np.ndarray:
    """Float64 probabilities, limited to slightly above 0 and slightly below 1."""
    return np.asarray(predicted, dtype=np.float64).clip(CLAMP, 1 - CLAMP)


def expected_calibration_error(predicted: np.ndarray, outcome: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """`sum_b |sum of predictions in b - sum of outcomes in b| / N` for `N > 0` predictions, `[N]` and `[N]`."""
    index = _bin_index(predicted, num_bins)
    gaps = np.bincount(index, weights=predicted - outcome, minlength=num_bins)
    return float(np.abs(gaps).sum() / len(predicted))


def roc_auc(predicted: np.ndarray, outcome: np.ndarray, num_bins: int = NUM_AUC_BINS) -> float:
    """
    The probability that a prediction that came true is higher than one that did not, from a histogram: a pair in the same
    bin counts one half. NaN when all outcomes are the same.
    """
    # A histogram instead of scipy's rank statistic (mannwhitneyu), which also orders predictions within a bin: the tests
    # compare with the reference implementation, which uses this histogram. It also avoids an optional dependency.
    index = _bin_index(predicted, num_bins)
    positive = np.bincount(index, weights=outcome, minlength=num_bins)
    negative = np.bincount(index, weights=1 - outcome, minlength=num_bins)
    pairs = positive.sum() * negative.sum()
    if not pairs:
        return float("nan")
    negative_below = negative.cumsum() - negative
    return float((positive * (negative_below + negative / 2)).sum() / pairs)


def _bins(predicted: np.ndarray, outcome: np.ndarray, num_bins: int) -> tuple[ReliabilityBin, ...]:
    index = _bin_index(predicted, num_bins)
    weights = np.bincount(index, minlength=num_bins)
    predictions = np.bincount(index, weights=predicted, minlength=num_bins)
    outcomes = np.bincount(index, weights=outcome, minlength=num_bins)
    return tuple(
        ReliabilityBin(int(b), int(weights[b]), float(predictions[b] / weights[b]), float(outcomes[b] / weights[b]))
        for b in weights.nonzero()[0]
    )


def _bin_index(predicted: np.ndarray, num_bins: int) -> np.ndarray:
    return np.minimum((predicted * num_bins).astype(np.int64), num_bins - 1)
