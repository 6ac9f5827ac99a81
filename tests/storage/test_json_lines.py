"""Whatever interrupts a run, its file holds whole lines of one origin, and the next run resumes it."""

import json
from pathlib import Path

import pytest
from full_disk import full_disk

from dspark_hf.storage.json_lines import ResumableLines, check_origin


def write(path: Path, *lines: dict, **origin) -> list[dict]:
    """Adds lines; returns those that were there before."""
    with ResumableLines(path, origin) as file:
        for line in lines:
            file.append(line)
        return file.written


def test_lines_come_back(tmp_path):
    path = tmp_path / "new" / "out.jsonl"
    assert write(path, {"id": 0, "text": "ä"}, {"id": 1}) == []
    assert path.read_text(encoding="utf-8") == '{"id":0,"text":"ä"}\n{"id":1}\n'
    assert write(path, {"id": 2}) == [{"id": 0, "text": "ä"}, {"id": 1}]


@pytest.mark.parametrize("torn", [b"", b'{"id": 3, "resp', b'{"id": 3}', b"\x00\x00\x00\n"])
def test_a_line_that_was_not_finished_is_removed(tmp_path, torn):
    path = tmp_path / "out.jsonl"
    write(path, {"id": 0})
    with path.open("ab") as file:
        file.write(torn)
    assert write(path, {"id": 1}) == [{"id": 0}]
    assert path.read_bytes() == b'{"id":0}\n{"id":1}\n'


def test_a_full_disk_keeps_the_whole_lines_and_says_how_to_resume(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResumableLines(path, {}) as file:
        file.append({"id": 0})
        with (
            full_disk(path.stat().st_size + 4),
            pytest.raises(OSError, match=r"continued: File too large.*resumes"),
        ):
            file.append({"id": 1})
        assert path.read_bytes() == b'{"id":0}\n'
    assert write(path, {"id": 1}) == [{"id": 0}]


def test_a_text_that_is_not_unicode_is_refused_and_writes_nothing(tmp_path):
    with ResumableLines(tmp_path / "out.jsonl", {}) as file:
        with pytest.raises(ValueError, match="surrogates"):
            file.append({"id": 0, "text": "\ud800"})
        file.append({"id": 1})
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"id":1}\n'


def test_nothing_is_left_of_a_run_that_wrote_nothing(tmp_path):
    write(tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_run_that_could_not_begin(tmp_path):
    with full_disk(1), pytest.raises(OSError, match="could not be written"):
        write(tmp_path / "out.jsonl")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({"top_p": None}, {"top_p": 0.5}, r"top_p was None, now 0\.5"),
        ({"a": 1}, {}, "a was 1, now None"),
        ({}, {"a": [1]}, r"a was None, now \[1\]"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path, before, now, told):
    path = tmp_path / "out.jsonl"
    write(path, {"id": 0}, **before)
    with pytest.raises(ValueError, match=told):
        write(path, {"id": 1}, **now)
    assert path.read_bytes() == b'{"id":0}\n'


def test_tuples_are_the_lists_that_they_become(tmp_path):
    write(tmp_path / "out.jsonl", {"id": 0}, sizes=(1, 2))
    assert write(tmp_path / "out.jsonl", sizes=(1, 2)) == [{"id": 0}]


def test_part_of_the_settings_can_be_checked_beforehand(tmp_path):
    path = tmp_path / "out.jsonl"
    check_origin(path, {"seed": 0})
    write(path, {"id": 0}, seed=0, temperature=1.0)
    check_origin(path, {"seed": 0})
    with pytest.raises(ValueError, match=r"seed was 0, now 1\)"):
        check_origin(path, {"seed": 1})


@pytest.mark.parametrize(
    "text",
    [
        "not JSON\nmore of it\n",
        "one long line",
        '{"precious": 1}',
        '{"prompt": "x"}\n{"prompt": "y"}',
        '{"id": 0, "text": "x"}\n{"id": 1, "text": "y"}',
    ],
)
def test_a_file_of_something_else_is_not_touched(tmp_path, text):
    path = tmp_path / "mine"
    path.write_text(text)
    for ask in (lambda: write(path), lambda: check_origin(path, {})):
        with pytest.raises(ValueError, match="was not written by this command"):
            ask()
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert path.read_text() == text


@pytest.mark.parametrize(
    ("text", "told"),
    [("no\nmore\n", "Line 1 of"), ('{"x": 1}\n{"id"', "lines without 'id'"), ("[]\n", "lines without")],
)
def test_a_file_that_was_replaced_is_not_touched(tmp_path, text, told):
    path = tmp_path / "out.jsonl"
    write(path, {"id": 0})
    path.write_text(text)
    with pytest.raises(ValueError, match=told):
        write(path)
    assert path.read_text() == text


def test_a_file_has_one_writer_at_a_time(tmp_path):
    path = tmp_path / "out.jsonl"
    with ResumableLines(path, {}), pytest.raises(ValueError, match="Another process is writing"):
        write(path)
    write(path, {"id": 0})
    assert json.loads(path.read_text()) == {"id": 0}
