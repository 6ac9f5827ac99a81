"""The document of a run as a terminal table and as one HTML file that needs nothing beside it."""

from __future__ import annotations

import base64
import html
import json
from pathlib import Path
from typing import Any

# Column title, field of the estimates, decimals.
COLUMNS = (
    ("tokens a pass", "acceptance_length", 2),
    ("accepted", "acceptance_rate", 2),
    ("drafted", "draft_length", 1),
    ("verified", "verify_length", 1),
    ("tokens/s", "tokens_per_second", 1),
    ("x plain", "speedup", 2),
    ("draft ms", "drafting_ms", 1),
    ("verify ms", "verifying_ms", 1),
    ("rest ms", "overhead_ms", 1),
    ("GiB", "peak_gib", 2),
)
WITH_INTERVAL = ("acceptance_length", "speedup")
CAPTIONS = {
    "acceptance": "Tokens that come out of one pass of the target, with 95 % bootstrap intervals over prompts.",
    "conditional_acceptance": "Share of drafts that pass at each slot, given that all before them did (95 % Wilson intervals).",
    "threshold_sweep": "What a static confidence threshold would have let through of the same rounds.",
    "reliability": "Predicted survival of a prefix against the share accepted. The area of a dot is its share of the rounds.",
    "speed": "Speed, with the time of prompts included, against tokens a pass. Colour is the method, marker the task.",
    "profile": "Where the time of a round goes.",
    "sweep": "Tokens a pass and speed over what was varied.",
}
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child, th:nth-child(2), td:nth-child(2) { text-align: left; }
td small { color: #666; }
img { max-width: 100%; height: auto; }
figure { margin: 2rem 0; }
figcaption { color: #555; font-size: 14px; }
pre { background: #f6f6f6; padding: .8rem; overflow-x: auto; font-size: 12px; }
"""


def rows_of(document: dict[str, Any]) -> list[list[str]]:
    """The main table as text, a row a group and method."""
    rows = []
    for result in document["results"]:
        cells = [f"{result['group']} ({result['num_prompts']})", result["method"]]
        for _, name, decimals in COLUMNS:
            cells.append(text_of(result["estimates"][name], decimals, name in WITH_INTERVAL))
        rows.append(cells)
    return rows


def text_of(estimate: dict[str, Any], decimals: int, with_interval: bool = False) -> str:
    """`"2.31 (2.20, 2.42)"`; `"-"` where there is nothing."""
    if estimate["value"] is None:
        return "-"
    text = f"{estimate['value']:.{decimals}f}"
    if with_interval and estimate["low"] is not None:
        text += f" ({estimate['low']:.{decimals}f}, {estimate['high']:.{decimals}f})"
    return text


def identity_lines(document: dict[str, Any]) -> list[str]:
    """One line a method, and one for each answer that differs from that of plain `generate`."""
    lines = []
    for method, identity in document["identity"].items():
        if not identity["checked"]:
            continue
        same = identity["checked"] - identity["different"]
        lines.append(f"{method}: {same} of {identity['checked']} greedy answers are those of plain generate.")
        lines += [f"  {difference_text(d)}" for d in identity["differences"]]
    return lines


def difference_text(difference: dict[str, Any]) -> str:
    """Where one answer departs, and whether that is a tie or a mistake."""
    d = difference
    where = f"{d['task']} {d['prompt']}, turn {d['turn'] + 1}, token {d['position']} ({d['method']})"
    if d["gap"] is None:
        return f"{where}: one answer ends, the other goes on ({d['expected']} against {d['got']})"
    return f"{where}: {d['got']} instead of {d['expected']}, logit gap {d['gap']:.2e}"


def confidence_rows(document: dict[str, Any]) -> list[list[str]]:
    """AUC, ECE and Brier score of each method that has a confidence head."""
    return [
        [result["group"], result["method"]]
        + [text_of({"value": result["confidence"][name], "low": None}, 3) for name in ("auc", "ece", "brier")]
        for result in document["results"]
        if result.get("confidence")
    ]


def profile_rows(document: dict[str, Any]) -> list[list[str]]:
    """Milliseconds a round and share of it, by method and part."""
    return [
        [method, part, f"{cost['ms']:.2f}", f"{100 * cost['share']:.1f} %"]
        for method, profile in (document.get("profile") or {}).items()
        for part, cost in profile["parts"].items()
        if cost["ms"] and cost["share"] is not None
    ]


# ---------------------------------------------------------------------- terminal


def print_report(document: dict[str, Any], console: Any) -> None:
    """Prints the tables to a `rich` console."""
    from rich.table import Table

    def show(title: str, header: list[str], rows: list[list[str]], num_text: int = 2) -> None:
        if not rows:
            return
        table = Table(title=title, title_justify="left", header_style="bold")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < num_text else "right", no_wrap=i >= num_text)
        previous = None
        for row in rows:
            if previous is not None and row[0] != previous:
                table.add_section()
            table.add_row(*row)
            previous = row[0]
        console.print(table)

    show("Results (95 % intervals)", ["task (prompts)", "method", *(c[0] for c in COLUMNS)], rows_of(document))
    show("Confidence", ["task", "method", "AUC", "ECE", "Brier"], confidence_rows(document))
    show("A round", ["method", "part", "ms", "share"], profile_rows(document))
    for line in identity_lines(document):
        console.print(line, highlight=False)


# ---------------------------------------------------------------------- HTML


def write_html(document: dict[str, Any], path: Path, pngs: dict[str, bytes]) -> None:
    """
    Writes the report.

    Args:
        document: As [`~dspark_hf.evaluation.document.build_document`] made it.
        path: The file to write.
        pngs: The figures, by the names of `CAPTIONS`; they become part of the file.
    """
    settings = document["settings"]
    parts = [
        "<!doctype html><html lang=en><head><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>DSpark on {_escaped(settings.get('target', 'a target'))}</title><style>{_STYLE}</style></head><body>",
        f"<h1>DSpark on {_escaped(settings.get('target', 'a target'))}</h1>",
        f"<p>{_escaped(_settings_line(settings))}</p>",
        "<h2>Results</h2>",
        _table(["task (prompts)", "method", *(c[0] for c in COLUMNS)], rows_of(document)),
    ]
    if rows := confidence_rows(document):
        parts += ["<h2>Confidence</h2>", _table(["task", "method", "AUC", "ECE", "Brier"], rows)]
    if rows := profile_rows(document):
        parts += ["<h2>A round</h2>", _table(["method", "part", "ms", "share"], rows)]
    if lines := identity_lines(document):
        parts += ["<h2>Same output as plain generate</h2>", f"<pre>{_escaped(chr(10).join(lines))}</pre>"]
    for name, png in pngs.items():
        data = base64.b64encode(png).decode()
        caption = _escaped(CAPTIONS.get(name, name))
        parts.append(
            f"<figure><img alt='{caption}' src='data:image/png;base64,{data}'><figcaption>{caption}</figcaption></figure>"
        )
    environment = json.dumps({"settings": settings, "environment": document["environment"]}, indent=2)
    parts += ["<h2>Environment</h2>", f"<pre>{_escaped(environment)}</pre>", "</body></html>"]
    path.write_text("\n".join(parts), encoding="utf-8")


def _settings_line(settings: dict[str, Any]) -> str:
    temperature = settings.get("temperature")
    how = "greedy" if temperature == 0 else f"temperature {temperature}"
    return f"{how}, up to {settings.get('max_new_tokens')} new tokens, {settings.get('dtype')} on {settings.get('device')}."


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{_escaped(name)}</th>" for name in header)
    body = "".join(f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _escaped(text: Any) -> str:
    return html.escape(str(text))
