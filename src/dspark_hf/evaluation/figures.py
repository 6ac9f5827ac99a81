"""The figures of a run, drawn from its document with matplotlib, which is an optional dependency.

The colours are those of Okabe and Ito, which colour-blind readers can distinguish; markers and line styles differ as well.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
LINES = ("-", "--", "-.", ":")
WIDTH = 7.2  # inches; at 130 dots an inch a little wider than a README column


def figures_of(document: dict[str, Any]) -> dict[str, Any]:
    """
    Every figure for which `document` has numbers, by name.

    Raises:
        ImportError: without matplotlib.
    """
    drawn = {
        "acceptance": acceptance_figure(document),
        "conditional_acceptance": conditional_acceptance_figure(document),
        "threshold_sweep": threshold_figure(document),
        "reliability": reliability_figure(document),
        "speed": speed_figure(document),
        "profile": profile_figure(document),
    }
    return {name: figure for name, figure in drawn.items() if figure is not None}


def as_png(figure: Any, dots_per_inch: int = 130) -> bytes:
    """The figure as a PNG file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch)
    return buffer.getvalue()


# ---------------------------------------------------------------------- one figure each


def acceptance_figure(document: dict[str, Any]) -> Any:
    """Acceptance length of every drafting method on each task, with intervals (the numbers of Table 1)."""
    groups = _groups(document, "task")
    methods = [name for name in _method_names(document) if name != "plain"]
    if not groups or not methods:
        return None
    figure = new_figure(WIDTH, 3.2)
    axes = figure.subplots()
    width = 0.8 / len(methods)
    for i, method in enumerate(methods):
        estimates = [_estimate_of(document, "task", group, method, "acceptance_length") for group in groups]
        xs = [g + (i - (len(methods) - 1) / 2) * width for g in range(len(groups))]
        values = [e["value"] or 0.0 for e in estimates]
        axes.bar(xs, values, width * 0.92, color=_color(i), label=method)
        axes.errorbar(xs, values, yerr=_bars(estimates), fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel("tokens per target pass")
    axes.set_title("Acceptance length (1 = plain decoding)")
    _legend(figure, axes.get_legend_handles_labels()[0])
    return figure


def conditional_acceptance_figure(document: dict[str, Any]) -> Any:
    """Acceptance at each slot, given that all before it were accepted (as in Fig. 2), one panel per domain or task."""
    panels = _panels(document)
    results = [r for r in document["results"] if r["conditional_acceptance"] and (r["kind"], r["group"]) in panels]
    if not results:
        return None
    figure = new_figure(WIDTH, 3.2)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    methods = list(dict.fromkeys(r["method"] for r in results))
    for axes, (kind, group) in zip(all_axes, panels, strict=True):
        for result in (r for r in results if (r["kind"], r["group"]) == (kind, group)):
            i = methods.index(result["method"])
            curve = result["conditional_acceptance"]
            slots = [k + 1 for k, e in enumerate(curve) if e["value"] is not None]
            known = [e for e in curve if e["value"] is not None]
            axes.errorbar(
                slots,
                [e["value"] for e in known],
                yerr=_bars(known),
                color=_color(i),
                marker=MARKERS[i % len(MARKERS)],
                linestyle=LINES[i % len(LINES)],
                markersize=4,
                capsize=2,
                elinewidth=0.8,
                label=result["method"],
            )
        axes.set_title(group)
        axes.set_xlabel("slot")
        axes.set_ylim(0, 1.02)
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=8)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    all_axes[0].set_ylabel("accepted, if all before were")
    shown = {label: handle for axes in all_axes for handle, label in zip(*axes.get_legend_handles_labels())}
    _legend(figure, list(shown.values()))
    return figure


def threshold_figure(document: dict[str, Any]) -> Any:
    """Accepted and rejected drafts per round, and the acceptance rate, by confidence threshold (as in Fig. 5)."""
    panels = []
    for kind, group in _panels(document):
        swept = [
            r["threshold_sweep"]
            for r in document["results"]
            if (r["kind"], r["group"]) == (kind, group) and r.get("threshold_sweep")
        ]
        panels += [(group, sweep) for sweep in swept[:1]]  # Of several methods with whole blocks, the first.
    if not panels:
        return None
    figure = new_figure(WIDTH, 3.2)
    all_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    for i, (axes, (group, sweep)) in enumerate(zip(all_axes, panels, strict=True)):
        xs = [point["threshold"] for point in sweep]
        accepted = [point["accepted"] or 0.0 for point in sweep]
        total = [a + (point["rejected"] or 0.0) for a, point in zip(accepted, sweep)]
        axes.fill_between(xs, accepted, color=COLORS[0], alpha=0.75, linewidth=0, label="accepted")
        axes.fill_between(xs, accepted, total, color=COLORS[4], alpha=0.75, linewidth=0, hatch="//", label="rejected")
        axes.set_title(group)
        axes.set_xlabel("confidence threshold")
        rate = axes.twinx()
        rate.plot(
            xs, [_percent(point["rate"]) for point in sweep], color="black", marker="o", markersize=3, label="rate"
        )
        rate.set_ylim(0, 102)
        if i == len(panels) - 1:
            rate.set_ylabel("accepted / verified, %")
            _legend(figure, [*axes.get_legend_handles_labels()[0], *rate.get_legend_handles_labels()[0]])
        else:
            rate.tick_params(labelright=False)
    highest = max((p["accepted"] or 0.0) + (p["rejected"] or 0.0) for _, sweep in panels for p in sweep)
    all_axes[0].set_ylim(0, 1.05 * highest or 1.0)
    all_axes[0].set_ylabel("drafts per round")
    return figure


def reliability_figure(document: dict[str, Any]) -> Any:
    """Predicted and observed survival at each slot (as in Fig. 6), before and after the drafter's temperatures."""
    result = next((r for r in reversed(document["results"]) if r.get("reliability")), None)
    if result is None:
        return None
    before, after = result["reliability"]["before"], result["reliability"]["after"]
    rows = [("no temperatures", before)] if after is None else [("before", before), ("after", after)]
    num_slots = min(len(before), 4)
    slots = [round(i * (len(before) - 1) / max(num_slots - 1, 1)) for i in range(num_slots)]
    figure = new_figure(WIDTH, 2.3 * len(rows) + 0.2)
    grid = figure.subplots(len(rows), num_slots, sharex=True, sharey=True, squeeze=False)
    for row, (label, reliabilities) in enumerate(rows):
        for axes, slot in zip(grid[row], slots, strict=True):
            _draw_reliability(axes, reliabilities[slot], COLORS[1] if row == 0 and after is not None else COLORS[0])
            ece = reliabilities[slot]["ece"]
            axes.set_title(
                f"slot {slot + 1}, ECE {_percent(ece):.1f} %" if ece is not None else f"slot {slot + 1}", fontsize=9
            )
        grid[row][0].set_ylabel(f"{label}\nobserved", fontsize=9)
    for axes in grid[-1]:
        axes.set_xlabel("predicted survival", fontsize=9)
    return figure


def speed_figure(document: dict[str, Any]) -> Any:
    """Speed against acceptance length: each point is a method on a task, with intervals."""
    methods = [name for name in _method_names(document) if name != "plain"]
    groups = _groups(document, "task")
    points = [
        (
            i,
            j,
            _estimate_of(document, "task", group, method, "acceptance_length"),
            _estimate_of(document, "task", group, method, "speedup"),
        )
        for i, method in enumerate(methods)
        for j, group in enumerate(groups)
    ]
    points = [p for p in points if p[2]["value"] is not None and p[3]["value"] is not None]
    if not points:
        return None
    figure = new_figure(WIDTH, 3.6)
    axes = figure.subplots()
    for i, j, length, speed in points:
        axes.errorbar(
            [length["value"]],
            [speed["value"]],
            xerr=_bars([length]),
            yerr=_bars([speed]),
            color=_color(i),
            marker=MARKERS[j % len(MARKERS)],
            markersize=7,
            elinewidth=0.8,
            linestyle="none",
        )
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xlabel("tokens per target pass")
    axes.set_ylabel("times as fast as plain")
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=_color(i), linewidth=4, label=m) for i, m in enumerate(methods)]
    handles += [
        Line2D([], [], color="gray", marker=MARKERS[j % len(MARKERS)], linestyle="none", label=g)
        for j, g in enumerate(groups)
    ]
    figure.legend(handles=handles, fontsize=8, loc="outside right center", frameon=False)
    return figure


def profile_figure(document: dict[str, Any]) -> Any:
    """Milliseconds of a round, part by part."""
    profile = document.get("profile")
    if not profile:
        return None
    figure = new_figure(WIDTH, 1.6 + 0.5 * len(profile))
    axes = figure.subplots()
    parts = [p for p in next(iter(profile.values()))["parts"] if any(m["parts"][p]["ms"] for m in profile.values())]
    for row, method in enumerate(profile.values()):
        left = 0.0
        for i, part in enumerate(parts):
            ms = method["parts"][part]["ms"] or 0.0
            axes.barh(row, ms, left=left, color=_color(i), hatch=_hatch(i), edgecolor="white")
            left += ms
    axes.set_yticks(range(len(profile)), list(profile))
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per round")
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=_color(i), hatch=_hatch(i), edgecolor="white", label=part) for i, part in enumerate(parts)
    ]
    _legend(figure, handles)
    return figure


def sweep_figure(points: Sequence[dict[str, Any]], over: str) -> Any:
    """
    Acceptance length and speed over one field of the drafters (as in Figs. 3 and 4).

    Args:
        points: Dictionaries of `label` (one line per label), `x`, `acceptance_length` and `speedup` (estimates).
        over: Title of the x axis.
    """
    figure = new_figure(WIDTH, 3.2)
    labels = list(dict.fromkeys(point["label"] for point in points))
    for axes, (name, title) in zip(
        figure.subplots(1, 2), [("acceptance_length", "tokens per target pass"), ("speedup", "times as fast as plain")]
    ):
        for i, label in enumerate(labels):
            own = sorted(
                (p for p in points if p["label"] == label and p[name]["value"] is not None), key=lambda p: p["x"]
            )
            axes.errorbar(
                [p["x"] for p in own],
                [p[name]["value"] for p in own],
                yerr=_bars([p[name] for p in own]),
                color=_color(i),
                marker=MARKERS[i % len(MARKERS)],
                linestyle=LINES[i % len(LINES)],
                markersize=5,
                capsize=2,
                elinewidth=0.8,
                label=label,
            )
        axes.set_xlabel(over)
        axes.set_ylabel(title)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    _legend(figure, figure.axes[0].get_legend_handles_labels()[0])
    return figure


# ---------------------------------------------------------------------- helpers


def new_figure(width: float, height: float) -> Any:
    """
    An empty figure, in inches.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'dspark-hf[plot]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def _draw_reliability(axes: Any, reliability: dict[str, Any], color: str) -> None:
    axes.plot([0, 1], [0, 1], ":", color="gray", linewidth=1)
    bins = reliability["bins"]
    heaviest = max((b["weight"] for b in bins), default=1)
    axes.plot([b["predicted"] for b in bins], [b["observed"] for b in bins], "-", color=color, linewidth=1)
    # The area of a dot is its share of the rounds.
    sizes = [6 + 60 * b["weight"] / heaviest for b in bins]
    axes.scatter(
        [b["predicted"] for b in bins], [b["observed"] for b in bins], s=sizes, color=color, alpha=0.8, linewidth=0
    )
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])


def _legend(figure: Any, handles: Sequence[Any]) -> None:
    """Draws the legend below the panels, where it hides nothing."""
    figure.legend(handles=handles, fontsize=8, loc="outside lower center", ncols=4, frameon=False)


def _panels(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Up to four groups to show side by side: each domain, or its task if it has only one."""
    domains = list(dict.fromkeys(document["domains"].values()))
    panels = []
    for domain in domains:
        tasks = [task for task, d in document["domains"].items() if d == domain]
        panels += [("domain", domain)] if len(tasks) > 1 else [("task", tasks[0])]
    return panels[:4]


def _groups(document: dict[str, Any], kind: str) -> list[str]:
    return list(dict.fromkeys(r["group"] for r in document["results"] if r["kind"] == kind))


def _method_names(document: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(r["method"] for r in document["results"]))


def _estimate_of(document: dict[str, Any], kind: str, group: str, method: str, name: str) -> dict[str, Any]:
    for r in document["results"]:
        if (r["kind"], r["group"], r["method"]) == (kind, group, method):
            return r["estimates"][name]
    return {"value": None, "low": None, "high": None}


def _bars(estimates: Sequence[dict[str, Any]]) -> list[list[float]]:
    """Lengths of error bars below and above, `[2, N]`; 0 where there is no interval."""
    below = [max((e["value"] or 0) - e["low"], 0.0) if e["low"] is not None else 0.0 for e in estimates]
    above = [max(e["high"] - (e["value"] or 0), 0.0) if e["high"] is not None else 0.0 for e in estimates]
    return [below, above]


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100 * share


def _color(index: int) -> str:
    return COLORS[index % len(COLORS)]


def _hatch(index: int) -> str:
    """A hatch that distinguishes two parts of the same colour."""
    return "" if index < len(COLORS) else "//"
