"""Prompts from files and data sets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dspark_hf.conversations.prompts import as_conversation, read_prompts


def test_prompts_are_read_from_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"turns": ["b", "c"]}\n')
    assert list(read_prompts(path)) == [{"prompt": "a"}, {"turns": ["b", "c"]}]
    with pytest.raises(ValueError, match="There is no file"):
        list(read_prompts(tmp_path / "missing.jsonl"))
    path.write_text('[\n{"prompt": "a"},\n{"prompt": "b"}]')
    assert [row["prompt"] for row in read_prompts(path)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt":', r"line 2, is not valid JSON: Expecting value \(column 11\)"),
        ('[{"prompt": "a"},\n"b"', "line 2, is not valid JSON"),
        ('{"prompt": "a"}\n["b"]', r"line 2, holds \['b'\]; give rows such as"),
        ('["a"]', "holds 'a'; give rows such as"),
    ],
)
def test_files_that_hold_no_rows_say_where(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        list(read_prompts(path))


def test_columns_of_data_sets_become_prompts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    talk = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    rows = [
        {"question": "a"},
        {"question": ["a", "b"]},
        {"question": [{"role": "user", "content": "a"}]},
        {"question": talk},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [as_conversation(i, row) for i, row in enumerate(read_prompts(file, column="question"))]
    assert all(conversation.messages == [{"role": "user", "content": "a"}] for conversation in found)
    assert found[1].turns == ["b"]
    with pytest.raises(ValueError, match="no column 'answer'; its columns are question"):
        list(read_prompts(file, column="answer"))
