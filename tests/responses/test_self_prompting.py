"""Prompts that the target writes itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from responses.words import killing_append, read_rows, rows_by_id
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from dspark_hf.responses import regeneration
from dspark_hf.responses.self_prompting import self_prompt
from dspark_hf.responses.settings import RegenerationSettings
from dspark_hf.storage.json_lines import ResumableLines


def test_self_prompts_are_user_turns_written_once(target: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    output = tmp_path / "prompts.jsonl"
    settings = RegenerationSettings(temperature=3.0, top_k=0, max_new_tokens=40, slots=16)
    assert self_prompt(target, tokenizer, 3, output, settings, min_chars=4, progress=False) == 3
    assert self_prompt(target, tokenizer, 3, output, settings, min_chars=4, progress=False) == 0
    assert self_prompt(target, tokenizer, 5, output, settings, min_chars=4, progress=False) == 2
    rows = read_rows(output)
    assert len({row["prompt"] for row in rows}) == len({row["id"] for row in rows}) == 5
    assert all(len(row["prompt"]) >= 4 and "<" not in row["prompt"] for row in rows)


def test_killed_self_prompting_keeps_the_candidates_that_take_long(
    target: PreTrainedModel, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = RegenerationSettings(temperature=3.0, top_k=0, max_new_tokens=40, slots=64)

    def go_on(name: str) -> int:
        return self_prompt(target, tokenizer, 40, tmp_path / name, settings, min_chars=4, progress=False)

    go_on("whole.jsonl")
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(ResumableLines, "append", killing_append(after=3))
            with pytest.raises(KeyboardInterrupt):
                go_on("killed.jsonl")
    assert go_on("killed.jsonl") == 31
    assert rows_by_id(tmp_path / "killed.jsonl") == rows_by_id(tmp_path / "whole.jsonl")


def test_self_prompting_stops_when_nothing_new_comes(
    target: PreTrainedModel, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = RegenerationSettings(do_sample=False, max_new_tokens=4)
    with caplog.at_level(logging.WARNING, regeneration.__name__):
        assert self_prompt(target, tokenizer, 3, tmp_path / "p.jsonl", settings, progress=False) <= 1
    assert "of 3 prompts" in caplog.text


def test_self_prompting_needs_a_chat_template(target: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>")
    with pytest.raises(ValueError, match="no chat template"):
        self_prompt(target, plain, 3, tmp_path / "p.jsonl", progress=False)
