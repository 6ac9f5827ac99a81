"""`dspark-hf adapt`: a table, a card and one line."""

import json

import pytest
import tiny_folders

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from dspark_hf_cli.app import app

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


def adapt(folders, folder, *more):
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + {i}?"}) + "\n" for i in range(60)))
    paths = ("--target", folders.target, "--drafter", folders.random, "--prompts", folder / "prompts.jsonl")
    short = ("--general-prompts", 0, "--held-out", 0.5, "--max-new-tokens", 12, "--temperature", 0, "--max-steps", 4)
    run = ("adapt", *paths, *short, "--output", folder / "out", "--device", "cpu", *more)
    return CliRunner().invoke(app, [str(a) for a in run], env=WIDE)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_is_printed_and_written(folders, tmp_path, as_json):
    pytest.importorskip("matplotlib")
    result = adapt(folders, tmp_path, *(["--json"] if as_json else []), "--set", "weight_decay=0.1")
    assert result.exit_code == 0, result.output
    out = tmp_path / "out"
    document = json.loads((out / "adaptation.json").read_text())
    if as_json:
        assert json.loads(result.stdout) == document
    else:
        assert document["verdict"] in " ".join(result.stdout.split()) and "your prompts" in result.stdout
    assert document["settings"]["training"] == {"weight_decay": 0.1}
    card = (out / "drafter" / "README.md").read_text()
    assert "dspark-hf adapt" in card and "your prompts" in card and str(tmp_path) not in card
    assert (out / "drafter" / "adaptation.png").stat().st_size > 1000


def test_an_unknown_training_argument_is_one_line(folders, tmp_path):
    result = adapt(folders, tmp_path, "--set", "wait_decay=0.1")
    assert result.exit_code == 1 and "weight_decay" in str(result.exception)
    assert not (tmp_path / "out").exists()  # Found before the target answers anything.
