"""Every packaging in which drafters are published: read, inspected, drafted with and saved again, or refused by its name."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from replicas import REPLICAS
from typer.testing import CliRunner

import tiny
from dspark_hf import Drafter
from dspark_hf.checkpoints import EXPORT_FORMATS, inspect_checkpoint
from dspark_hf_cli.app import app

pytestmark = pytest.mark.integration

# How a refusal to convert begins.
REASONS = (
    " format cannot hold ",
    "No engine that reads ",
    "The drafter's own ",
)

READ = [name for name, replica in REPLICAS.items() if replica.refusal is None]
REFUSED = [name for name in REPLICAS if name not in READ]


def convert(path: Path, format: str, folder: Path) -> None:
    result = CliRunner().invoke(app, ["convert", str(path), str(folder), "--format", format, "--dtype", "float32"])
    assert result.exit_code == 0, result.output


def drafts_exactly(target, drafter) -> bool:
    inputs, settings = tiny.prompt(), {"max_new_tokens": 12, "do_sample": False}
    inputs["input_ids"] %= drafter.config.vocab_size
    plain = target.generate(**inputs, **settings)
    return torch.equal(target.generate(**inputs, **settings, assistant_model=drafter.eval()), plain)


@pytest.mark.parametrize("name", READ)
def test_a_packaging_is_read_and_drafted_with(name: str, tmp_path: Path):
    replica = REPLICAS[name]
    path, target = replica.build(tmp_path / "files"), replica.target()
    found = inspect_checkpoint(path)
    assert found.refusal is None and found.config is not None and str(found)
    drafter = Drafter.from_pretrained(path, dtype=torch.float32)
    assert drafts_exactly(target, drafter)
    convert(path, "dspark-hf", tmp_path / "converted")
    again = Drafter.from_pretrained(tmp_path / "converted")
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert drafts_exactly(target, again)
    assert again.config.hidden_state_indices == drafter.config.hidden_state_indices


@pytest.mark.parametrize("format", EXPORT_FORMATS)
@pytest.mark.parametrize("name", READ)
def test_a_packaging_is_converted_or_the_reason_is_given(name: str, format: str, tmp_path: Path):
    """What is written holds the same weights; what is not, is refused in words, and leaves nothing behind."""
    path = REPLICAS[name].build(tmp_path / "files")
    drafter = Drafter.from_pretrained(path, dtype=torch.float32)
    drafter.config.target_name_or_path = "some/target"
    drafter.bind(REPLICAS[name].target())
    refused = None
    try:
        drafter.save_pretrained(tmp_path / "converted", format=format)
    except ValueError as error:
        refused = str(error)
    if refused is not None:
        assert any(start in refused for start in REASONS), refused
        assert not (tmp_path / "converted").exists()
        return
    again = Drafter.from_pretrained(tmp_path / "converted")
    shared = again.state_dict().keys() & drafter.state_dict().keys()
    assert {"fc.weight", "norm.weight"} <= shared
    for key in shared:
        assert torch.equal(again.state_dict()[key], drafter.state_dict()[key]), key


@pytest.mark.parametrize("name", REFUSED)
def test_a_packaging_is_refused_by_its_name(name: str, tmp_path: Path):
    replica = REPLICAS[name]
    path = replica.build(tmp_path / "files")
    with pytest.raises((ValueError, OSError)) as refused:
        Drafter.from_pretrained(path)
    assert replica.refusal in str(refused.value)


@pytest.mark.parametrize("name", ["EAGLE-3, pickle", "z-lab DFlash, mask vector in a pickle"])
def test_a_pickle_is_read_once_it_is_converted(name: str, tmp_path: Path):
    replica = REPLICAS[name]
    path = replica.build(tmp_path / "files")
    with pytest.raises((OSError, ValueError), match="If you trust it") as refused:
        Drafter.from_pretrained(path)
    words = shlex.split(str(refused.value).split("`")[1])
    subprocess.run([sys.executable, *words[1:]], check=True, cwd=path)
    drafter = Drafter.from_pretrained(path)
    assert drafts_exactly(replica.target(), drafter)
    if name.startswith("z-lab"):
        assert drafter.mask_embedding.tolist() == [1.0] * 32
