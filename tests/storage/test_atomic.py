"""A write that fails or is interrupted leaves what was there before, or nothing."""

import os
import stat
from pathlib import Path

import pytest
import torch
from full_disk import full_disk
from safetensors.torch import save_file

from dspark_hf.storage.atomic import whole_file, whole_files, write_bytes, write_text


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_simulated_disk_is_full_in_the_middle_of_a_file(tmp_path):
    with full_disk(3), pytest.raises(OSError, match="too large"):
        (tmp_path / "a").write_bytes(b"12345")
    assert (tmp_path / "a").read_bytes() == b"123"
    (tmp_path / "a").write_bytes(b"12345")


@pytest.mark.parametrize("before", [None, b"old"], ids=["a new file", "a file that is there"])
def test_a_full_disk_leaves_the_old_file_or_none(tmp_path, before):
    path = tmp_path / "a.json"
    if before is not None:
        path.write_bytes(before)
    with full_disk(3), pytest.raises(OSError, match=r"a\.json' could not be written: File too large\. What was there"):
        write_text(path, "a new text")
    assert contents(tmp_path) == ({} if before is None else {"a.json": before})
    write_text(path, "a new text")
    assert contents(tmp_path) == {"a.json": b"a new text"}


def test_errors_of_safetensors_are_errors_of_writing(tmp_path):
    def write():
        with whole_file(tmp_path / "w") as part:
            save_file({"a": torch.zeros(1000)}, part)

    with full_disk(100), pytest.raises(OSError, match=r"w' could not be written: File too large\."):
        write()
    assert contents(tmp_path) == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_leaves_the_old_file(tmp_path, error):
    write_bytes(tmp_path / "a", b"old")

    def write():
        with whole_file(tmp_path / "a") as part:
            part.write_bytes(b"half of the n")
            raise error

    with pytest.raises(error):
        write()
    assert contents(tmp_path) == {"a": b"old"}


def test_what_a_killed_run_left_behind_is_overwritten(tmp_path):
    (tmp_path / "a.partial").write_bytes(b"half")
    write_bytes(tmp_path / "a", b"whole")
    (tmp_path / "many" / ".partial").mkdir(parents=True)
    (tmp_path / "many" / ".partial" / "b").write_bytes(b"half")
    with whole_files(tmp_path / "many") as part:
        (part / "c").write_bytes(b"whole")
    assert contents(tmp_path) == {"a": b"whole", "many/c": b"whole"}


def test_links_are_followed_and_permissions_kept(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    write_bytes(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_bytes() == b"new"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_devices_stay_what_they_are(tmp_path):
    write_bytes(os.devnull, b"gone")
    assert not Path(os.devnull).is_file()
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="/dev/full' could not be written: No space left on device"):
            write_bytes("/dev/full", b"no room")


def test_a_folder_or_a_missing_folder_is_named(tmp_path):
    with pytest.raises(OSError, match="could not be written: Is a directory"):
        write_bytes(tmp_path, b"")
    with pytest.raises(OSError, match=r"there/a' could not be written: No such file or directory"):
        write_bytes(tmp_path / "not" / "there" / "a", b"")
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(OSError, match="file' could not be written"), whole_files(tmp_path / "file"):
        pass
    assert contents(tmp_path) == {"file": b"old"}


@pytest.mark.parametrize("before", [{}, {"config.json": b"old", "other": b"stays"}], ids=["new", "there"])
def test_files_that_belong_together_appear_together(tmp_path, before):
    folder = tmp_path / "runs" / "drafter"
    for name, content in before.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)

    def write():
        with whole_files(folder) as part:
            (part / "config.json").write_bytes(b"{}")
            (part / "weights").write_bytes(bytes(20))

    with full_disk(10), pytest.raises(OSError, match="drafter' could not be written: File too large"):
        write()
    assert contents(tmp_path) == {f"runs/drafter/{name}": content for name, content in before.items()}
    assert (tmp_path / "runs").exists() == bool(before)
    with whole_files(folder) as part:
        (part / "code").mkdir()
        (part / "code" / "a.py").write_bytes(b"pass")
        (part / "config.json").write_bytes(b"{}")
    assert contents(folder) == before | {"config.json": b"{}", "code/a.py": b"pass"}


def test_the_configuration_is_moved_last(tmp_path, monkeypatch):
    moved = []
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: (moved.append(Path(new).name), replace(old, new)))
    with whole_files(tmp_path) as part:
        for name in ("a", "config.json", "z"):
            (part / name).write_bytes(b"")
    assert moved == ["a", "z", "config.json"]
