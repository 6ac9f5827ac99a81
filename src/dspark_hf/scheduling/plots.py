"""Diagrams of a throughput curve and of a calibration. Needs matplotlib, which is optional."""

from __future__ import annotations

from typing import Any

from .calibration import Calibration
from .reliability import Reliability
from .throughput_curve import ThroughputCurve


def plot_curve(curve: ThroughputCurve) -> Any:
    """
    Passes a second and seconds a pass, by tokens in the pass; dots as measured, lines as used.

    Returns:
        A matplotlib `Figure`; `.savefig(path)` writes it.

    Raises:
        ImportError: without matplotlib.
    """
    figure = _new_figure(10, 4)
    rate, seconds = figure.subplots(1, 2)
    rate.plot(curve.token_counts, 1 / curve.measured_s, "o", label="measured")
    rate.plot(curve.token_counts, 1 / curve.pass_s, "-", label="used")
    rate.set_ylabel("passes a second")
    rate.legend()
    seconds.plot(curve.token_counts, 1000 * curve.measured_s, "o")
    seconds.plot(curve.token_counts, 1000 * curve.pass_s, "-")
    seconds.set_ylabel("milliseconds a pass")
    for axes in (rate, seconds):
        axes.set_xlabel("tokens in the pass")
        axes.set_xscale("log", base=2)
    on = curve.measured_on
    if on:
        figure.suptitle(f"{on.get('model')}, {on.get('dtype')}, {on.get('device')}")
    return figure


def plot_reliability(calibration: Calibration) -> Any:
    """
    A reliability diagram for each slot, before and after: observed against predicted survival of the prefix.

    Returns:
        A matplotlib `Figure`; `.savefig(path)` writes it.

    Raises:
        ImportError: without matplotlib.
    """
    num_slots = len(calibration.temperatures)
    figure = _new_figure(3 * num_slots, 3.4)
    for slot, axes in enumerate(figure.subplots(1, num_slots, squeeze=False)[0]):
        before, after = calibration.before[slot], calibration.after[slot]
        axes.plot([0, 1], [0, 1], ":", color="gray")
        _draw_bins(axes, before, "before")
        _draw_bins(axes, after, f"T = {calibration.temperatures[slot]:.2f}")
        axes.set_title(f"slot {slot + 1}: ECE {100 * before.ece:.1f} % to {100 * after.ece:.1f} %", fontsize=9)
        axes.set_xlabel("predicted")
        axes.legend(fontsize=8)
    figure.axes[0].set_ylabel("observed")
    return figure


def _draw_bins(axes: Any, reliability: Reliability, label: str) -> None:
    axes.plot(
        [b.predicted for b in reliability.bins], [b.observed for b in reliability.bins], "o-", markersize=3, label=label
    )


def _new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'dspark-hf[plot]'.") from error
    return Figure(figsize=(width, height), layout="constrained")
