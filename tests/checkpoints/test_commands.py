"""`dspark-hf inspect` and `dspark-hf convert`."""

import json
from pathlib import Path

import pytest
import spellings
from replicas import REPLICAS
from typer.testing import CliRunner

import tiny
from dspark_hf import Drafter, DSparkDrafter
from dspark_hf_cli.app import app


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    drafter.bind(target)
    return spellings.specforge(drafter, tmp_path / "specforge")


def test_inspect_says_what_it_is(folder: Path):
    said = run("inspect", folder)
    assert "SpecForge" in said
    assert "the anchor predicts: a block of 4 gives 4 drafts" in said
    assert "vLLM: no, it does not read SpecForge files: convert to vllm-sglang or speculators" in said


def test_inspect_gives_one_json_document(folder: Path):
    found = json.loads(run("inspect", folder, "--json"))
    assert found["format"] == "SpecForge"
    assert found["config"]["block_size"] == 4


def test_convert_writes_and_says_how_to_serve(folder: Path, tmp_path: Path):
    said = run("convert", folder, tmp_path / "out", "--format", "vllm-sglang", "--target", "some/target")
    assert "vllm serve some/target --speculative-config" in said
    assert "--speculative-algorithm DSPARK" in said
    again = DSparkDrafter.from_pretrained(tmp_path / "out")
    assert again.config.num_draft_tokens == 4


def test_convert_reads_the_target_where_its_embedding_belongs_in_the_file(folder: Path, tmp_path: Path):
    target = tiny.qwen3()
    target.save_pretrained(tmp_path / "target")
    run("convert", folder, tmp_path / "out", "--format", "deepspec", "--target", tmp_path / "target")
    again = DSparkDrafter.from_pretrained(tmp_path / "out")
    assert again.embed_tokens.weight.equal(target.get_input_embeddings().weight)


def test_convert_gives_one_json_document(folder: Path, tmp_path: Path):
    written = json.loads(run("convert", folder, tmp_path / "out", "-f", "modelopt", "--json", "--dtype", "bfloat16"))
    assert written["path"] == str(tmp_path / "out")
    assert DSparkDrafter.from_pretrained(tmp_path / "out").config.dtype is not None


def test_convert_refuses_an_unknown_format(folder: Path, tmp_path: Path):
    result = CliRunner().invoke(app, ["convert", str(folder), str(tmp_path / "out"), "--format", "onnx"])
    assert result.exit_code == 2
    assert "'onnx'" in result.output and "deepspec" in result.output


def test_convert_writes_the_layers_that_follow_from_the_targets_depth(tmp_path: Path):
    REPLICAS["EAGLE-3, SpecForge"].build(tmp_path / "files")
    tiny.llama(num_hidden_layers=8).save_pretrained(tmp_path / "target")
    said = run(
        "convert", tmp_path / "files", tmp_path / "out", "--format", "dspark-hf", "--target", tmp_path / "target"
    )
    assert said == f"Wrote {tmp_path / 'out'}.\n"
    assert Drafter.from_pretrained(tmp_path / "out").config.target_layer_ids == [1, 3, 4]
    written = json.loads(run("convert", tmp_path / "files", tmp_path / "again", "-f", "dspark-hf", "--json"))
    assert written == {"path": str(tmp_path / "again"), "format": "dspark-hf"}
