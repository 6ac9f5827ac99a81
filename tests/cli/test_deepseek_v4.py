"""The commands with a target whose drafter is in its own checkpoint."""

import json
from pathlib import Path

import pytest
import tiny_folders

pytest.importorskip("typer")
pytest.importorskip("rich")

import tiny_deepseek_v4 as v4
from typer.testing import CliRunner

import tiny
from dspark_hf_cli.app import app

pytestmark = pytest.mark.integration

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """`target` in transformers' format with a tokenizer, and `embedded`, the checkpoint that holds the drafter."""
    folder = tmp_path_factory.mktemp("deepseek")
    v4.target().save_pretrained(folder / "target")
    tiny_folders.tokenizer().save_pretrained(folder / "target")
    v4.write(folder / "embedded", shards=3)
    rows = [
        {"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "abc " * 4}]}
        for i in range(8)
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{i} + {i}?"}) + "\n" for i in range(2)))
    return folder


def run(*arguments) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env=WIDE)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_inspect_and_convert(models: Path, tmp_path: Path):
    shown = run("inspect", models / "embedded")
    assert "DeepSeek-V4" in shown and "6 experts" in shown and "odd:" not in shown
    assert "deepseek-v4" in run("convert", models / "embedded", tmp_path / "drafter", "--format", "deepseek-v4")
    again = run("inspect", tmp_path / "drafter")
    assert again.splitlines()[2:] == shown.splitlines()[2:]
    assert json.loads(run("inspect", tmp_path / "drafter", "--json"))["config"]["num_experts_per_tok"] == 2


def test_bench(models: Path, tmp_path: Path):
    named = ("--target", models / "target", "--drafter", models / "embedded", "--tasks", models / "prompts.jsonl")
    limits = ("--max-new-tokens", 8, "--temperature", 0, "--device", "cpu", "--dtype", "float32")
    shown = run("bench", *named, "--output", tmp_path / "out", *limits)
    assert "2 of 2 greedy answers" in shown
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {r["method"] for r in document["results"]} == {"plain", "dspark fixed"}


def test_train_and_calibrate(models: Path, tmp_path: Path):
    data = ("--data", models / "data.jsonl", "--target", models / "target", "--output", tmp_path / "run")
    own = ("--kind", "deepseek-v4", "--mask-token-id", tiny.MASK_ID, "--markov-rank", 8, "--num-anchors", 4)
    run("train", *data, *own, "--max-steps", 1)
    named = ("--target", models / "target", "--drafter", tmp_path / "run", "--tasks", models / "prompts.jsonl")
    limits = ("--max-new-tokens", 8, "--min-rounds", 1, "--device", "cpu")
    run("calibrate", *named, "--output", tmp_path / "calibrated", *limits)
    config = json.loads((tmp_path / "calibrated" / "drafter" / "config.json").read_text())
    assert config["model_type"] == "deepseek_v4_dspark" and len(config["confidence_temperatures"]) == 5
