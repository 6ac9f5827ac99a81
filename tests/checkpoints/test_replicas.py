"""Every packaging in which drafters are published: read, inspected, drafted with and saved again, or refused by its name."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from replicas import REPLICAS

import tiny
from dspark_hf import Drafter
from dspark_hf.checkpoints import inspect_checkpoint

pytestmark = pytest.mark.integration

READ = [name for name, replica in REPLICAS.items() if replica.refusal is None]
REFUSED = [name for name in REPLICAS if name not in READ]


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
    drafter.save_pretrained(tmp_path / "converted")  # What `dspark-hf convert` writes without --format.
    again = Drafter.from_pretrained(tmp_path / "converted")
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    assert again.config.target_layer_ids == drafter.config.target_layer_ids
    assert drafts_exactly(target, again)


@pytest.mark.parametrize("name", REFUSED)
def test_a_packaging_is_refused_by_its_name(name: str, tmp_path: Path):
    replica = REPLICAS[name]
    path = replica.build(tmp_path / "files")
    with pytest.raises((ValueError, OSError)) as refused:
        Drafter.from_pretrained(path)
    assert replica.refusal in str(refused.value)


def test_a_pickle_is_read_once_it_is_converted(tmp_path: Path):
    replica = REPLICAS["EAGLE-3, pickle"]
    path = replica.build(tmp_path / "files")
    with pytest.raises(OSError, match="Only safetensors") as refused:
        Drafter.from_pretrained(path)
    words = shlex.split(str(refused.value).split("`")[1])
    subprocess.run([sys.executable, *words[1:]], check=True, cwd=path)
    assert drafts_exactly(replica.target(), Drafter.from_pretrained(path))
