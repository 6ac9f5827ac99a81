"""The results of a speed-under-load run as a document, a Markdown table and two figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from ..scheduling import ThroughputCurve
from .environment import environment
from .figures import COLORS, LINES, MARKERS, WIDTH, new_figure
from .methods import PLAIN
from .serving import FIXED, THROUGHPUT, Load

COLUMNS = (
    "batch",
    "method",
    "tokens/s",
    "per row",
    "x plain",
    "verified per row",
    "accepted",
    "tokens per pass",
    "drafted",
)


def serving_document(loads: Sequence[Load], settings: dict[str, Any], curve: ThroughputCurve) -> dict[str, Any]:
    """
    Everything that a run says, as one JSON-ready dictionary: `settings`, `environment`, `curve`, `results`, `margins`.

    Args:
        loads: The measurements.
        settings: What they depend on, by name.
        curve: The cost curve that the schedulers used.
    """
    results = results_of(loads)
    return {
        "settings": settings,
        "environment": environment(),
        "curve": curve.to_dict(),
        "results": results,
        "margins": margins_of(results),
    }


def results_of(loads: Sequence[Load]) -> list[dict[str, Any]]:
    """Medians over the repeats of each batch and method, sorted by batch."""
    groups: dict[tuple[int, str], list[Load]] = {}
    for load in sorted(loads, key=lambda load: load.batch):
        groups.setdefault((load.batch, load.method), []).append(load)
    results = [_result(batch, method, group) for (batch, method), group in groups.items()]
    plain = {r["batch"]: r["tokens_per_second"] for r in results if r["method"] == PLAIN}
    for result in results:
        result["speedup"] = result["tokens_per_second"] / plain[result["batch"]] if result["batch"] in plain else None
    return results


def _result(batch: int, method: str, loads: list[Load]) -> dict[str, Any]:
    rates = [load.tokens / load.seconds for load in loads]
    median = statistics.median(rates)
    accepted = [load.acceptance_rate for load in loads if load.acceptance_rate is not None]
    return {
        "batch": batch,
        "method": method,
        "tokens_per_second": median,
        "tokens_per_second_range": [min(rates), max(rates)],
        "per_row": median / batch,
        "verify_length": statistics.median(load.verify_length for load in loads),
        "acceptance_rate": statistics.median(accepted) if accepted else None,
        "tokens_per_pass": statistics.median(load.tokens / load.passes / batch for load in loads),
        "drafted_share": statistics.median(load.drafted_share for load in loads),
        "num_repeats": len(loads),
    }


def margins_of(results: Sequence[dict[str, Any]]) -> dict[int, float]:
    """The throughput scheduler's gain over the better of plain decoding and whole blocks, by batch: 0.1 is 10 % faster."""
    rates = {(r["batch"], r["method"]): r["tokens_per_second"] for r in results}
    return {
        batch: rate / max(rates[batch, other] for other in (PLAIN, FIXED) if (batch, other) in rates) - 1
        for (batch, method), rate in rates.items()
        if method == THROUGHPUT
    }


def table_of(results: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """The results as rows of text, one cell for each of `COLUMNS`."""
    for r in results:
        accepted, speedup = r["acceptance_rate"], r["speedup"]
        yield [
            str(r["batch"]),
            r["method"],
            f"{r['tokens_per_second']:.1f}",
            f"{r['per_row']:.2f}",
            "-" if speedup is None else f"{speedup:.2f}",
            f"{r['verify_length']:.2f}",
            "-" if accepted is None else f"{accepted:.0%}",
            f"{r['tokens_per_pass']:.2f}",
            f"{r['drafted_share']:.0%}",
        ]


def markdown_of(document: dict[str, Any]) -> str:
    """The table and where it was measured."""
    env, settings = document["environment"], document["settings"]
    packages = env["packages"]
    device = ", ".join(env["accelerators"]) if settings["device"] != "cpu" else env["cpu"]
    where = (
        f"{settings['target']} with {settings['drafter']}, {settings['dtype']}, on {device} ({env['threads']} threads), "
        f"torch {packages['torch']}, transformers {packages['transformers']}. {settings['num_new_tokens']} new tokens per row, "
        f"medians of {settings['num_repeats']}."
    )
    lines = [
        where,
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in table_of(document["results"])),
        "",
        "Gain of the throughput scheduler over the better of plain decoding and whole blocks: "
        + ", ".join(f"{margin:+.1%} with {batch} rows" for batch, margin in document["margins"].items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def throughput_figure(results: Sequence[dict[str, Any]]) -> Any:
    """Tokens per second in total against those of one row: one line per method, through its batches (as in Fig. 7)."""
    figure, axes, styles = _figure(results)
    for method, style in styles.items():
        own = [r for r in results if r["method"] == method]
        axes.plot([r["per_row"] for r in own], [r["tokens_per_second"] for r in own], label=method, **style)
        for r in own:
            axes.annotate(str(r["batch"]), (r["per_row"], r["tokens_per_second"]), fontsize=7, alpha=0.7)
    axes.set_xlabel("tokens/s of one row")
    axes.set_ylabel("tokens/s of all rows")
    axes.set_title("Throughput against speed per user (numbers: rows)")
    axes.legend(fontsize=8)
    return figure


def budget_figure(results: Sequence[dict[str, Any]]) -> Any:
    """Drafts verified per row and round against the rows decoded together (as in Fig. 8)."""
    figure, axes, styles = _figure(results)
    for method, style in styles.items():
        own = [r for r in results if r["method"] == method and method != PLAIN]
        if own:
            axes.plot([r["batch"] for r in own], [r["verify_length"] for r in own], label=method, **style)
    axes.set_xscale("log", base=2)
    batches = sorted({r["batch"] for r in results})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("drafts verified per row and round")
    axes.set_title("Verification budget")
    axes.legend(fontsize=8)
    return figure


def _figure(results: Sequence[dict[str, Any]]) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    figure = new_figure(WIDTH, 3.6)
    axes = figure.subplots()
    axes.grid(color="#dddddd", linewidth=0.6)
    methods = dict.fromkeys(r["method"] for r in results)
    styles = {
        method: {"color": COLORS[i], "marker": MARKERS[i], "linestyle": LINES[i % len(LINES)], "markersize": 4}
        for i, method in enumerate(methods)
    }
    return figure, axes, styles
