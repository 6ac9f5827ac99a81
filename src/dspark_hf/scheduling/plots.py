"""Plots of a throughput curve and of a calibration. They need matplotlib, which is optional."""

from __future__ import annotations

from typing import Any

from .calibration import Calibration
from .reliability import Reliability
from .throughput_curve import ThroughputCurve

PANELS_A_ROW = 4
MIN_BIN_ROUNDS = 5
# Distinguishable with all common kinds of colour vision (colours of Okabe and Ito), and by their shape.
BEFORE = {"color": "#D55E00", "marker": "s"}
AFTER = {"color": "#0072B2", "marker": "o"}


def plot_curve(curve: ThroughputCurve) -> Any:
    """
    Passes per second and milliseconds per pass, by tokens in the pass; dots are measurements, lines the values used.

    Returns:
        A matplotlib `Figure`; `.savefig(path)` writes it.

    Raises:
        ImportError: without matplotlib.
    """
    figure = _new_figure(10, 4)
    rate, seconds = figure.subplots(1, 2)
    rate.plot(curve.token_counts, 1 / curve.measured_s, "o", label="measured")
    rate.plot(curve.token_counts, 1 / curve.pass_s, "-", label="used")
    rate.set_ylabel("passes per second")
    rate.legend()
    seconds.plot(curve.token_counts, 1000 * curve.measured_s, "o")
    seconds.plot(curve.token_counts, 1000 * curve.pass_s, "-")
    seconds.set_ylabel("milliseconds per pass")
    for axes in (rate, seconds):
        axes.set_xlabel("tokens in the pass")
        axes.set_xscale("log", base=2)
    on = curve.measured_on
    if on:
        figure.suptitle(f"{on.get('model')}, {on.get('dtype')}, {on.get('device')}")
    return figure


def plot_reliability(calibration: Calibration) -> Any:
    """
    A reliability diagram for each slot, before and after calibration: observed against predicted survival of the prefix.

    Returns:
        A matplotlib `Figure`; `.savefig(path)` writes it.

    Raises:
        ImportError: without matplotlib.
    """
    num_slots = len(calibration.temperatures)
    columns = min(num_slots, PANELS_A_ROW)
    num_lines = -(-num_slots // columns)
    figure = _new_figure(1.9 * columns, 2.0 * num_lines + 0.3)
    panels = figure.subplots(num_lines, columns, squeeze=False, sharex=True, sharey=True).flat
    for slot, (axes, before, after) in enumerate(zip(panels, calibration.before, calibration.after)):
        axes.plot([0, 1], [0, 1], ":", color="gray", linewidth=1)
        _draw_bins(axes, before, "before", BEFORE)
        _draw_bins(axes, after, "after", AFTER)
        title = f"slot {slot + 1}, T = {calibration.temperatures[slot]:.2f}"
        axes.set_title(f"{title}\nECE {100 * before.ece:.1f} % to {100 * after.ece:.1f} %", fontsize=8)
        axes.set(xlim=(-0.03, 1.03), ylim=(-0.03, 1.03), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1))
    for axes in figure.axes[num_slots:]:
        axes.set_axis_off()
    handles = figure.axes[0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=2, frameon=False, fontsize=8)
    figure.supxlabel("predicted survival", fontsize=9)
    figure.supylabel("observed", fontsize=9)
    return figure


def _draw_bins(axes: Any, reliability: Reliability, label: str, style: dict[str, Any]) -> None:
    """Draws one dot per bin, with an area proportional to the bin's rounds; bins of a single round are left out."""
    bins = [b for b in reliability.bins if b.weight >= MIN_BIN_ROUNDS]
    heaviest = max((b.weight for b in bins), default=1)
    axes.scatter(
        [b.predicted for b in bins],
        [b.observed for b in bins],
        s=[5 + 50 * b.weight / heaviest for b in bins],
        label=label,
        linewidths=0,
        alpha=0.8,
        **style,
    )


def _new_figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Plots need matplotlib: pip install 'dspark-hf[plot]'.") from error
    return Figure(figsize=(width, height), layout="constrained")
