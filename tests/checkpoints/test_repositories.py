"""Repositories of the Hub, read from a server on this machine."""

from pathlib import Path

import pytest
import spellings
import torch
from hub_server import TOKEN, Hub

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import inspect_checkpoint

pytestmark = pytest.mark.integration


@pytest.fixture
def target():
    return tiny.qwen3()


def bound(target, **fields) -> DSparkDrafter:
    drafter = tiny.random_drafter(target, **fields)
    drafter.bind(target)
    return drafter


def same(one: DSparkDrafter, other: DSparkDrafter) -> bool:
    return all(torch.equal(other.state_dict()[name], tensor) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("spelling", ["SpecForge", "ModelOpt"])
def test_a_repository_loads_like_a_folder(hub: Hub, target, spelling: str, tmp_path: Path):
    drafter = bound(target)
    hub.publish("some/drafter", spellings.DSPARK[spelling](drafter, tmp_path / "files"))
    assert same(drafter, DSparkDrafter.from_pretrained("some/drafter", cache_dir=tmp_path / "cache"))


def test_a_revision_and_a_subfolder(hub: Hub, target, tmp_path: Path):
    old, new = bound(target), bound(target, block_size=6)
    for branch, drafter in {"v1": old, "main": new}.items():
        spellings.modelopt(drafter, tmp_path / branch / "inner")
        hub.publish("some/drafter", tmp_path / branch, branch)
    where = {"cache_dir": tmp_path / "cache", "subfolder": "inner"}
    assert DSparkDrafter.from_pretrained("some/drafter", revision="v1", **where).config.block_size == 4
    assert DSparkDrafter.from_pretrained("some/drafter", **where).config.block_size == 6
    assert inspect_checkpoint("some/drafter", revision="v1", **where).config.block_size == 4


def test_a_private_repository_wants_the_token(hub: Hub, target, tmp_path: Path):
    drafter = bound(target)
    hub.publish("some/private", spellings.modelopt(drafter, tmp_path / "files"), private=True)
    with pytest.raises(OSError, match="some/private") as refused:
        DSparkDrafter.from_pretrained("some/private", cache_dir=tmp_path / "cache", token=False)
    assert TOKEN not in str(refused.value)
    loaded = DSparkDrafter.from_pretrained("some/private", cache_dir=tmp_path / "cache", token=TOKEN)
    assert same(drafter, loaded)


def test_inspection_fetches_headers_only(hub: Hub, target, tmp_path: Path):
    target = tiny.qwen3(vocab_size=4096)
    folder = spellings.specforge(bound(target, vocab_size=4096), tmp_path / "files")
    hub.publish("some/drafter", folder)
    file = folder / "model.safetensors"
    found = inspect_checkpoint("some/drafter", cache_dir=tmp_path / "cache")
    assert found.format == "SpecForge"
    assert found.num_bytes > 250_000
    assert hub.sent["model.safetensors"] < 110_000 < file.stat().st_size
    assert found.to_dict() | {"path": ""} == inspect_checkpoint(folder).to_dict() | {"path": ""} | {
        "config": found.to_dict()["config"]
    }


@pytest.mark.parametrize("missing", ["repository", "revision"])
def test_what_is_not_there_is_named(hub: Hub, target, missing: str, tmp_path: Path):
    hub.publish("some/drafter", spellings.modelopt(bound(target), tmp_path / "files"))
    name, revision = ("some/other", "main") if missing == "repository" else ("some/drafter", "v9")
    with pytest.raises(OSError, match=name if missing == "repository" else "v9"):
        DSparkDrafter.from_pretrained(name, revision=revision, cache_dir=tmp_path / "cache", token=False)
