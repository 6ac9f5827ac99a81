"""What is on disk is complete: a run that was killed at any byte goes on from its last finished measurement."""

import json

import pytest

from dspark_hf.evaluation.records import Difference, Record, RecordFile, Turn, pack_rounds, unpack_rounds
from dspark_hf.generation.telemetry import Round

SETTINGS = {"target": "t", "methods": ["plain", "dspark"], "seed": 0}
ROUNDS = [Round(4, 3, 2, 3, [0.5, 0.25], 0.1, 0.2, 0.3), Round(4, 0, 0, 1)]


def record(prompt):
    return Record("task", prompt, "dspark", [Turn([1, 2], 1.5, 0.5, [4, 1], None, ROUNDS)])


def test_records_come_back(tmp_path):
    path = tmp_path / "new" / "records.jsonl"
    file = RecordFile(path, SETTINGS)
    file.add(record(0))
    difference = Difference("task", 0, "dspark", 0, 1, 5, 6, 0.25)
    file.add_check(("task", 0, "dspark"), difference)
    file.close()
    again = RecordFile(path, SETTINGS)
    assert list(again.records.values()) == [record(0)]
    assert again.differences == [difference] and again.checked == {("task", 0, "dspark")}


def test_every_interrupted_write_is_survived(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordFile(path, SETTINGS)
    file.add(record(0))
    length = path.stat().st_size
    file.add(record(1))
    file.close()
    raw = path.read_bytes()
    for cut in (length, length + 1, len(raw) - 1):
        path.write_bytes(raw[:cut])
        resumed = RecordFile(path, SETTINGS)
        assert set(resumed.records) == {("task", 0, "dspark")}
        resumed.add(record(1))
        resumed.close()
        assert path.read_bytes() == raw


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "records.jsonl"
    file = RecordFile(path, SETTINGS)
    file.add(record(0))
    file.close()
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        RecordFile(path, SETTINGS | {"seed": 1})


def test_rounds_are_packed_and_unpacked():
    assert unpack_rounds(json.loads(json.dumps(pack_rounds(ROUNDS)))) == ROUNDS
    assert unpack_rounds(pack_rounds([])) == []
