"""How many drafts to verify: calibrated confidence, the measured cost of a pass, and schedulers that combine the two."""

from .backoff import DraftingBackoff, NoBackoff, RowsBackoff
from .calibration import Calibration, ConfidenceRounds, fit_temperatures, measure_calibration, weighted_mean
from .plots import plot_curve, plot_reliability
from .reliability import Reliability, ReliabilityBin, measure_reliability
from .schedulers import (
    AsyncThroughputScheduler,
    ConfidenceThreshold,
    FixedLength,
    ThroughputScheduler,
    VerifyScheduler,
    build_scheduler,
)
from .survival import calibrated_confidence, confident_lengths, prefix_survival
from .throughput_curve import ThroughputCurve

__all__ = [
    "AsyncThroughputScheduler",
    "Calibration",
    "ConfidenceRounds",
    "ConfidenceThreshold",
    "DraftingBackoff",
    "FixedLength",
    "NoBackoff",
    "Reliability",
    "ReliabilityBin",
    "RowsBackoff",
    "ThroughputCurve",
    "ThroughputScheduler",
    "VerifyScheduler",
    "build_scheduler",
    "calibrated_confidence",
    "confident_lengths",
    "fit_temperatures",
    "measure_calibration",
    "measure_reliability",
    "plot_curve",
    "plot_reliability",
    "prefix_survival",
    "weighted_mean",
]
