"""`serve-bench` measures batches of rising size and writes the document, the table and the figures."""

import json

import pytest
import tiny_folders

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from dspark_hf.evaluation.serving import ASYNC, FIXED, THROUGHPUT
from dspark_hf.evaluation.serving_report import markdown_of
from dspark_hf_cli.app import app

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


def serve_bench(folders, output, *more):
    questions = folders.target.parent / "questions.jsonl"
    questions.write_text('{"turns": ["1 + 1?"]}\n{"turns": ["and 2 + 22?"]}\n')
    models = ("--target", folders.target, "--drafter", folders.perfect, "--prompts", questions, "--output", output)
    limits = ("--max-new-tokens", 6, "--repeats", 1, "--device", "cpu")
    return CliRunner().invoke(app, [str(a) for a in ("serve-bench", *models, *limits, *more)], env=WIDE)


def test_the_document_the_table_and_the_figures_are_written(folders, tmp_path):
    pytest.importorskip("matplotlib")
    output = tmp_path / "out"
    result = serve_bench(folders, output, "--batches", "1,2")
    assert result.exit_code == 0, result.output
    document = json.loads((output / "serving.json").read_text())
    assert {(r["batch"], r["method"]) for r in document["results"]} == {
        (batch, method) for batch in (1, 2) for method in ("plain", FIXED, "threshold 0.5", THROUGHPUT, ASYNC)
    }
    assert set(document["curve"]["drafting"]) == {"1", "2"} and document["environment"]["cpu"]
    assert (output / "serving.md").read_text() == markdown_of(document) == result.stdout.removesuffix("\n")
    assert all((output / f"{name}.png").exists() for name in ("throughput", "budget"))

    lines = (output / "loads.jsonl").read_text()
    again = serve_bench(folders, output, "--batches", "1,2", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["results"] == document["results"]
    assert (output / "loads.jsonl").read_text() == lines, "a finished run measures nothing again"


def test_other_settings_are_found_before_a_model_is_loaded(folders, tmp_path, monkeypatch):
    assert serve_bench(folders, tmp_path / "out", "--batches", "1").exit_code == 0
    monkeypatch.setattr("dspark_hf_cli.loading.load_drafter", lambda name: pytest.fail("a model was loaded"))
    result = serve_bench(folders, tmp_path / "out", "--batches", "1", "--temperature", 1)
    assert "temperature was 0.0, now 1.0" in str(result.exception)


@pytest.mark.parametrize("batches", ["0,2", "two"], ids=["zero rows", "not a number"])
def test_batches_that_are_not_row_counts_are_refused(folders, tmp_path, batches):
    result = serve_bench(folders, tmp_path / "out", "--batches", batches)
    assert result.exit_code == 2 and "--batches must be" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()
