"""The document of a run as tables on the terminal and as one HTML file."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ..storage.atomic import write_text

# Column title, field of the estimates, decimals.
COLUMNS = (
    ("tokens per pass", "acceptance_length", 2),
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
    "acceptance": "Tokens per pass of the target, with 95 % bootstrap intervals over prompts.",
    "conditional_acceptance": "Share of drafts accepted at each slot, given that all before it were (95 % Wilson intervals).",
    "threshold_sweep": "Drafts that a static confidence threshold would have verified in the same rounds.",
    "reliability": "Predicted survival of a prefix against the accepted share. The area of a dot is its share of the rounds.",
    "speed": "Speed, prompt processing included, against tokens per pass. Colour: method; marker: task.",
    "profile": "Where the time of a round goes.",
    "sweep": "Tokens per pass and speed over the varied setting.",
}
TEMPLATE = Path(__file__).parent / "templates" / "report.html"


def rows_of(document: dict[str, Any]) -> list[list[str]]:
    """The main table as text, one row per group and method."""
    rows = []
    for result in document["results"]:
        cells = [f"{result['group']} ({result['num_prompts']})", result["method"]]
        for _, name, decimals in COLUMNS:
            cells.append(text_of(result["estimates"][name], decimals, name in WITH_INTERVAL))
        rows.append(cells)
    return rows


def text_of(estimate: dict[str, Any], decimals: int, with_interval: bool = False) -> str:
    """`"2.31 (2.20, 2.42)"`; `"-"` where nothing was measured."""
    if estimate["value"] is None:
        return "-"
    text = f"{estimate['value']:.{decimals}f}"
    if with_interval and estimate["low"] is not None:
        text += f" ({estimate['low']:.{decimals}f}, {estimate['high']:.{decimals}f})"
    return text


def identity_lines(document: dict[str, Any]) -> list[str]:
    """What was checked, one line per method, and one for each answer that differs from that of plain `generate`."""
    lines = [document["identity_note"]]
    for method, identity in document["identity"].items():
        if not identity["checked"]:
            continue
        same = identity["checked"] - identity["different"]
        lines.append(f"{method}: {same} of {identity['checked']} greedy answers equal those of plain generate.")
        lines += [f"  {difference_text(d)}" for d in identity["differences"]]
    return lines


def difference_text(difference: dict[str, Any]) -> str:
    """Where one answer diverges, and how close the two tokens were."""
    d = difference
    where = f"{d['task']} {d['prompt']}, turn {d['turn'] + 1}, token {d['position']} ({d['method']})"
    if d["gap"] is None:
        return f"{where}: one answer ends, the other continues ({d['expected']} against {d['got']})"
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
    """Milliseconds per round and share of the round, by method and part."""
    return [
        [method, part, f"{cost['ms']:.2f}", f"{100 * cost['share']:.1f} %"]
        for method, profile in (document.get("profile") or {}).items()
        for part, cost in profile["parts"].items()
        if cost["ms"] and cost["share"] is not None
    ]


def tables_of(document: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Every table of the report: title, column titles, rows; a table may have no rows."""
    return [
        ("Results (95 % intervals)", ["task (prompts)", "method", *(c[0] for c in COLUMNS)], rows_of(document)),
        ("Confidence", ["task", "method", "AUC", "ECE", "Brier"], confidence_rows(document)),
        ("Time of a round", ["method", "part", "ms", "share"], profile_rows(document)),
    ]


# ---------------------------------------------------------------------- terminal


def print_report(document: dict[str, Any], console: Any) -> None:
    """Prints the tables to a `rich` console."""
    from rich.table import Table

    for title, header, rows in tables_of(document):
        if not rows:
            continue
        table = Table(title=title, title_justify="left", header_style="bold")
        for i, name in enumerate(header):
            table.add_column(name, justify="left" if i < 2 else "right", no_wrap=i >= 2)
        previous = None
        for row in rows:
            if previous is not None and row[0] != previous:
                table.add_section()
            table.add_row(*row)
            previous = row[0]
        console.print(table)
    for line in identity_lines(document):
        console.print(line, highlight=False)


# ---------------------------------------------------------------------- HTML


def write_html(document: dict[str, Any], path: Path, pngs: dict[str, bytes]) -> None:
    """
    Writes the report as one self-contained HTML file.

    Args:
        document: As [`~dspark_hf.evaluation.document.build_document`] made it.
        path: The file to write.
        pngs: The figures, by the names of `CAPTIONS`; they become part of the file.
    """
    settings = document["settings"]
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(TEMPLATE.read_text(encoding="utf-8"))
    page = template.render(
        target=settings.get("target", "a target"),
        settings=_settings_line(settings),
        tables=tables_of(document),
        identity=identity_lines(document),
        figures=[
            {"caption": CAPTIONS.get(name, name), "data": base64.b64encode(png).decode()} for name, png in pngs.items()
        ],
        environment=json.dumps({"settings": settings, "environment": document["environment"]}, indent=2),
    )
    write_text(path, page)


def _settings_line(settings: dict[str, Any]) -> str:
    temperature = settings.get("temperature")
    how = "greedy" if temperature == 0 else f"temperature {temperature}"
    return f"{how}, up to {settings.get('max_new_tokens')} new tokens, {settings.get('dtype')} on {settings.get('device')}."
