"""`dspark-hf regenerate`: what is found before the target is loaded."""

import json

import pytest
import tiny_folders
from typer.testing import CliRunner

from dspark_hf_cli import loading
from dspark_hf_cli.app import app


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


def regenerate(folders, folder, *more):
    arguments = (
        "-t",
        folders.target,
        "-o",
        folder / "responses.jsonl",
        "--max-new-tokens",
        4,
        "--device",
        "cpu",
        *more,
    )
    return CliRunner().invoke(app, ["regenerate", *map(str, arguments)], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture
def answered(folders, tmp_path):
    """A folder with prompts and the responses to them."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1 + 1?"}\n')
    result = regenerate(folders, tmp_path, "--prompts", tmp_path / "prompts.jsonl", "--temperature", 0)
    assert result.exit_code == 0, result.output
    return tmp_path


def nothing_is_loaded(monkeypatch):
    def load_target(*arguments):
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(loading, "target_from_options", load_target)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--temperature", 0.5), "do_sample was False, now True"),
        (("--temperature", 0, "--seed", 1), "seed was 0, now 1"),
        (("--temperature", 0, "--dtype", "bfloat16"), "dtype was 'float32', now 'bfloat16'"),
        (("--temperature", 0, "--no-thinking"), "enable_thinking was None, now False"),
    ],
)
def test_other_settings_are_found_before_the_target_is_loaded(folders, answered, monkeypatch, options, told):
    nothing_is_loaded(monkeypatch)
    result = regenerate(folders, answered, "--prompts", answered / "prompts.jsonl", *options)
    assert isinstance(result.exception, ValueError) and told in str(result.exception)


def test_other_prompts_are_found_before_the_target_is_loaded(folders, answered, monkeypatch):
    nothing_is_loaded(monkeypatch)
    (answered / "prompts.jsonl").write_text('{"prompt": "2 + 2?"}\n')
    result = regenerate(folders, answered, "--prompts", answered / "prompts.jsonl", "--temperature", 0)
    assert isinstance(result.exception, ValueError) and "another prompt under id 0" in str(result.exception)


def test_prompts_written_with_another_seed_are_found_before_the_target_is_loaded(folders, tmp_path, monkeypatch):
    assert regenerate(folders, tmp_path, "--self-prompt", 1).exit_code == 0
    (tmp_path / "responses.jsonl").unlink()
    nothing_is_loaded(monkeypatch)
    result = regenerate(folders, tmp_path, "--self-prompt", 1, "--seed", 1)
    assert isinstance(result.exception, ValueError) and "seed was 0, now 1" in str(result.exception)


@pytest.mark.parametrize("text", ["", "\n\n"], ids=["empty", "blank lines"])
def test_a_file_without_prompts_is_an_error_and_leaves_nothing(folders, tmp_path, monkeypatch, text):
    nothing_is_loaded(monkeypatch)
    (tmp_path / "prompts.jsonl").write_text(text)
    result = regenerate(folders, tmp_path, "--prompts", tmp_path / "prompts.jsonl")
    assert isinstance(result.exception, ValueError) and "holds no rows" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_prompts_that_cannot_be_answered_leave_nothing(folders, tmp_path):
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": ""}) + "\n")
    result = regenerate(folders, tmp_path, "--prompts", tmp_path / "prompts.jsonl")
    assert isinstance(result.exception, ValueError) and "None of the 1 prompts could be answered" in str(
        result.exception
    )
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]
