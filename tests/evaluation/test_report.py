"""Tables, figures and the HTML page say what the document says, and cope with what is missing in it."""

import io
import json
import math

import numpy as np
import pytest

from dspark_hf.evaluation import Method, Prompt, Task
from dspark_hf.evaluation.document import build_document, identity_note, without_nan
from dspark_hf.evaluation.figures import as_png, figures_of, sweep_figure
from dspark_hf.evaluation.records import Difference, Record, RecordFile, Turn
from dspark_hf.evaluation.report import identity_lines, print_report, rows_of, text_of, write_html
from dspark_hf.generation.telemetry import Round

TASKS = [
    Task(name, domain, [Prompt(["a"])] * 12)
    for name, domain in (("sums", "math"), ("talk", "chat"), ("<chat>", "chat"))
]
SETTINGS = {"target": "tiny <target>", "temperature": 0, "max_new_tokens": 12, "dtype": "float32", "device": "cpu"}


class Drafter:
    class config:
        confidence_temperatures = [1.2, 1.1, 1.0, 0.9]


def records(rng):
    for task in TASKS:
        chance = 0.8 if task.domain == "math" else 0.5
        for prompt in range(12):
            yield Record(task.name, prompt, "plain", [Turn([1] * 60, rng.uniform(3, 4), 0.2, [1] * 59, 2**30)])
            rounds = []
            for _ in range(20):
                confidence = np.clip(chance + rng.normal(0, 0.15, 4), 0.05, 0.98)
                accepted = next((k for k, c in enumerate(confidence) if rng.random() > c), 4)
                rounds.append(Round(4, 4, accepted, accepted + 1, confidence.tolist(), 0.01, 0.05, 0.002))
            tokens = 1 + sum(r.committed for r in rounds)
            yield Record(task.name, prompt, "dspark", [Turn([1] * tokens, 1.5, 0.2, [5] * 20, 2**30, rounds)])


@pytest.fixture
def document(tmp_path):
    file = RecordFile(tmp_path / "records.jsonl", SETTINGS)
    for record in records(np.random.default_rng(0)):
        file.add(record)
    file.add_check(("sums", 0, "dspark"), None)
    file.add_check(("sums", 1, "dspark"), Difference("sums", 1, "dspark", 0, 7, 5, 6, 2e-6))
    file.close()
    profile = {"dspark": {"num_rounds": 1, "round_ms": 3.0, "parts": {"target pass": {"ms": 3.0, "share": 1.0}}}}
    methods = [Method("plain"), Method("dspark", {}, Drafter())]
    return build_document(methods, TASKS, SETTINGS, file, profile)


def test_the_document_is_json(document):
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert [r["group"] for r in document["results"]][::2] == ["sums", "talk", "<chat>", "chat", "all"]


def test_the_table_says_what_the_document_says(document):
    rows = rows_of(document)
    result = document["results"][1]
    assert rows[1][:2] == ["sums (12)", "dspark"]
    assert rows[1][2] == text_of(result["estimates"]["acceptance_length"], 2, with_interval=True)
    low, high = (result["estimates"]["acceptance_length"][end] for end in ("low", "high"))
    assert low < result["estimates"]["acceptance_length"]["value"] < high
    assert rows[0][8] == "-"  # Plain decoding drafts nothing.


def test_differences_are_reported_with_their_gap(document):
    lines = identity_lines(document)
    assert lines[0] == "The answers are greedy, and each was compared with that of plain generate."
    assert lines[1] == "dspark: 1 of 2 greedy answers equal those of plain generate."
    assert "token 7" in lines[2] and "2.00e-06" in lines[2]


def test_what_was_not_checked_is_said(document, tmp_path):
    rich = pytest.importorskip("rich.console")
    document["identity_note"] = identity_note({"temperature": 1.0}, RecordFile(tmp_path / "none.jsonl", {}))
    document["identity"]["dspark"] = {"checked": 0, "different": 0, "differences": []}
    text = "Not checked: no greedy answers were compared"
    assert identity_lines(document)[0].startswith(text)
    console = rich.Console(file=io.StringIO(), width=180)
    print_report(document, console)
    write_html(document, tmp_path / "report.html", {})
    assert text in console.file.getvalue() and text in (tmp_path / "report.html").read_text()


def test_the_terminal_shows_every_row(document):
    rich = pytest.importorskip("rich.console")
    console = rich.Console(file=io.StringIO(), width=180)
    print_report(document, console)
    text = console.file.getvalue()
    assert text.count("dspark") >= 5 and "AUC" in text and "target pass" in text


def test_every_figure_is_drawn(document):
    pytest.importorskip("matplotlib")
    figures = figures_of(document)
    assert set(figures) == {
        "acceptance",
        "conditional_acceptance",
        "threshold_sweep",
        "reliability",
        "speed",
        "profile",
    }
    assert all(as_png(figure, 40).startswith(b"\x89PNG") for figure in figures.values())


def test_figures_without_numbers_are_left_out(document):
    pytest.importorskip("matplotlib")
    document["results"] = [r for r in document["results"] if r["method"] == "plain"]
    document["profile"] = None
    assert figures_of(document) == {}


def test_the_sweep_figure(document):
    pytest.importorskip("matplotlib")
    estimate = {"value": 2.0, "low": 1.5, "high": 2.5}
    missing = {"value": None, "low": None, "high": None}
    points = [
        {"label": "math", "x": 2, "acceptance_length": estimate, "speedup": missing},
        {"label": "math", "x": 1, "acceptance_length": estimate, "speedup": estimate},
    ]
    assert as_png(sweep_figure(points, "tokens"), 40).startswith(b"\x89PNG")


def test_the_page_needs_nothing_beside_it(document, tmp_path):
    path = tmp_path / "report.html"
    write_html(document, path, {"acceptance": b"\x89PNG"})
    page = path.read_text()
    assert "data:image/png;base64," in page and "tiny &lt;target&gt;" in page and "<target>" not in page
    assert "http" not in page.replace("https://", "http").split("<pre>")[0]


def test_numbers_that_json_cannot_hold_become_none():
    assert without_nan({"a": [math.nan, 1.0, math.inf], "b": (2,)}) == {"a": [None, 1.0, None], "b": [2]}
