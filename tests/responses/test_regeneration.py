"""Regeneration: the responses of the target, conversations turn by turn, resuming, what cannot be answered."""

from __future__ import annotations

import logging
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from responses.decoding import greedy_by_generate
from responses.words import END_ID, SPECIAL, TEMPLATE, killing_append, read_rows, rows_by_id, word_rows
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import tiny
from dspark_hf.conversations.prompts import as_conversation
from dspark_hf.conversations.rows import encode_rows
from dspark_hf.responses import regeneration
from dspark_hf.responses.regeneration import Regenerator
from dspark_hf.responses.settings import RegenerationSettings
from dspark_hf.storage.json_lines import ResumableLines


def test_rows_hold_the_targets_own_response(target: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    rows, output = word_rows(9), tmp_path / "out.jsonl"
    settings = RegenerationSettings(do_sample=False, max_new_tokens=8, slots=4)
    assert Regenerator(target, tokenizer, settings).run(rows, output, progress=False) == 9
    written = read_rows(output)
    assert sorted(row["id"] for row in written) == list(range(9))
    for row in written:
        assert row["prompt"] == rows[row["id"]]["prompt"]
        assert row["source"] == "made"
        ids = tokenizer(f"<user> {row['prompt']} <end> <assistant>")["input_ids"]
        expected = greedy_by_generate(target, ids, 8, [END_ID])
        assert row["response_ids"] == expected
        assert row["finished"] == (expected[-1] == END_ID)
        assert row["response"] == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("settings", "torn"),
    [
        pytest.param({"temperature": 0.9}, b"", id="at a line"),
        pytest.param({"do_sample": False}, b'{"id": 3, "resp', id="within a line"),
        pytest.param({"do_sample": False}, b"\x00\x00\x00\n", id="leaving zeros"),
    ],
)
def test_a_killed_run_neither_loses_nor_repeats_a_row(
    target: PreTrainedModel,
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    torn: bytes,
) -> None:
    rows = word_rows(14)
    regenerator = Regenerator(target, tokenizer, RegenerationSettings(max_new_tokens=8, slots=3, **settings))
    regenerator.run(rows, tmp_path / "whole.jsonl", progress=False)

    output = tmp_path / "killed.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(ResumableLines, "append", killing_append(after=5))
        with pytest.raises(KeyboardInterrupt):
            regenerator.run(rows, output, progress=False)
    assert len(read_rows(output)) == 5
    with output.open("ab") as file:
        file.write(torn)
    assert regenerator.run(rows, output, progress=False) == 9
    assert regenerator.run(rows, output, progress=False) == 0
    assert rows_by_id(output) == rows_by_id(tmp_path / "whole.jsonl")


def test_start_and_max_prompts_choose_prompts_by_index(target: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    regenerator = Regenerator(target, tokenizer, RegenerationSettings(do_sample=False, max_new_tokens=3))
    output = tmp_path / "out.jsonl"
    regenerator.run(word_rows(10), output, start=4, max_prompts=3, progress=False)
    assert sorted(row["id"] for row in read_rows(output)) == [4, 5, 6]
    regenerator.run(word_rows(10), output, progress=False)
    assert Counter(row["id"] for row in read_rows(output)) == Counter(range(10))


def test_a_row_without_a_prompt_names_its_fields(target: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Prompt 1 has the fields \\['text'\\]"):
        Regenerator(target, tokenizer).run([{"prompt": "w5"}, {"text": "w6"}], tmp_path / "out.jsonl", progress=False)


PICKY_TEMPLATE = "{% if messages[0].role != 'user' %}{{ raise_exception('begin with the user') }}{% endif %}" + TEMPLATE


def test_rows_that_cannot_be_answered_are_left_out_and_named(
    target: PreTrainedModel, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    user, assistant = {"role": "user", "content": "w7"}, {"role": "assistant", "content": "w8"}
    rows = [
        {"messages": [assistant, user]},
        {"messages": [{"role": "system", "content": "w9"}, user]},
        {"messages": [{"content": "w9"}]},
        {"prompt": "w7 \ud83d"},
        {"prompt": ""},
        {"messages": [assistant]},
        {"prompt": "w7"},
        {"prompt": "w8", "source": "\ud83d"},
    ]
    picky = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", chat_template=PICKY_TEMPLATE
    )
    settings = RegenerationSettings(do_sample=False, max_new_tokens=3)
    with caplog.at_level(logging.WARNING, regeneration.__name__):
        assert Regenerator(target, picky, settings).run(rows, tmp_path / "out.jsonl", progress=False) == 1
    assert [row["id"] for row in read_rows(tmp_path / "out.jsonl")] == [6]
    assert all(f"Prompt {i} is skipped" in caplog.text for i in (0, 1, 2, 3, 4, 5, 7))
    assert "begin with the user" in caplog.text


def test_a_row_that_cannot_be_answered_does_not_stop_windowed_targets(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt": "w7 \ud83d"}, {"prompt": "w7"}, {"turns": ["w7", "\ud83d"]}]
    settings = RegenerationSettings(do_sample=False, max_new_tokens=3)
    regenerator = Regenerator(tiny.mistral(), tokenizer, settings)
    regenerator.eos_token_ids = list(range(tiny.VOCAB_SIZE))  # so that turns end
    assert regenerator.run(rows, tmp_path / "out.jsonl", progress=False) == 2
    assert regenerator.longest(as_conversation(2, rows[2])) == 4 + 3


def test_turns_run_one_by_one_with_the_targets_own_responses(
    target: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [{"turns": ["w7 w8", "w9", "w10 w11 w12"]}, {"prompt": "w20"}, {"turns": ["w30"]}]
    regenerator = Regenerator(target, tokenizer, RegenerationSettings(do_sample=False, max_new_tokens=5, slots=2))
    regenerator.eos_token_ids = list(range(0, tiny.VOCAB_SIZE, 2))  # so that turns end
    regenerator.run(rows, tmp_path / "out.jsonl", progress=False)
    written = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    text, said, drawn = "", [], []
    for turn in rows[0]["turns"]:
        text += f"<user> {turn} <end> <assistant> "
        drawn.append(greedy_by_generate(target, tokenizer(text)["input_ids"], 5, regenerator.eos_token_ids))
        said.append(tokenizer.decode(drawn[-1][:-1], skip_special_tokens=True))
        text += f"{said[-1]} <end> "
    messages = written[0]["messages"]
    assert [m["role"] for m in messages] == ["user", "assistant"] * 2 + ["user"]
    assert [m["content"] for m in messages[1::2]] == said[:-1]
    assert [m["response_ids"] for m in messages[1::2]] == drawn[:-1]
    assert (written[0]["response"], written[0]["response_ids"]) == (said[-1], drawn[-1])
    assert written[0]["finished"]
    assert written[1]["prompt"] == "w20"
    assert written[2]["messages"] == [{"role": "user", "content": "w30"}]


def test_no_turn_follows_a_response_that_was_cut(target: PreTrainedModel, tokenizer: Any, tmp_path: Path) -> None:
    rows, output = [{"turns": ["w7 w8", "w9"]}], tmp_path / "out.jsonl"
    regenerator = Regenerator(target, tokenizer, RegenerationSettings(do_sample=False, max_new_tokens=1))
    regenerator.eos_token_ids = []
    regenerator.run(rows, output, progress=False)
    (row,) = read_rows(output)
    assert [message["content"] for message in row["messages"]] == ["w7 w8"]
    assert not row["finished"]
    assert regenerator.run(rows, output, progress=False) == 0


def test_a_conversation_ends_where_the_context_has_no_room_for_its_next_turn(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny.llama(max_position_embeddings=16)
    regenerator = Regenerator(target, tokenizer, RegenerationSettings(do_sample=False))
    regenerator.eos_token_ids = list(range(tiny.VOCAB_SIZE))
    with caplog.at_level(logging.WARNING, regeneration.__name__):
        regenerator.run([{"turns": ["w7", "w8 " * 20]}], tmp_path / "out.jsonl", progress=False)
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert [message["content"] for message in row["messages"]] == ["w7"]
    assert row["finished"]
    assert "ends after 1 of its turns" in caplog.text


def test_tokens_are_kept_as_drawn_unless_told_otherwise(
    target: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    ids = {}
    for saved in (True, False):
        settings = RegenerationSettings(temperature=50.0, top_k=0, max_new_tokens=30, save_token_ids=saved)
        regenerator = Regenerator(target, tokenizer, settings)
        regenerator.eos_token_ids = []
        regenerator.run(word_rows(6), tmp_path / f"{saved}.jsonl", progress=False)
        ids[saved] = [row.get("response_ids") for row in rows_by_id(tmp_path / f"{saved}.jsonl")]
    assert ids[False] == [None] * 6
    texts = [row["response"] for row in rows_by_id(tmp_path / "True.jsonl")]
    # The text lacks the special tokens that were drawn.
    assert any(tokenizer(text)["input_ids"] != drawn for text, drawn in zip(texts, ids[True], strict=True))


def test_training_learns_the_tokens_that_were_drawn_in_every_turn(
    target: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    settings = RegenerationSettings(temperature=50.0, top_k=0, max_new_tokens=30, seed=1)
    regenerator = Regenerator(target, tokenizer, settings)
    regenerator.eos_token_ids = ends = [END_ID, *range(120, 128)]
    regenerator.run([{"turns": ["w7 w8", "w9", "w10"]}] * 4, tmp_path / "out.jsonl", progress=False)
    rows = read_rows(tmp_path / "out.jsonl")
    assert max(len(row["messages"]) for row in rows) == 5
    for row in rows:
        drawn = [message["response_ids"] for message in row["messages"][1::2]] + [row["response_ids"]]
        parts = encode_rows([row], tokenizer, eos_token_ids=ends)
        learned = [id for part in parts for id, mask in zip(part["input_ids"], part["loss_mask"], strict=True) if mask]
        assert learned == list(chain(*drawn))


def test_messages_are_the_context_and_their_last_response_is_replaced(
    target: PreTrainedModel, tokenizer: Any, tmp_path: Path
) -> None:
    context = [{"role": "system", "content": "w6"}, {"role": "user", "content": "w7"}]
    rows = [{"messages": [*context, {"role": "assistant", "content": "w99 w99"}]}]
    settings = RegenerationSettings(do_sample=False, max_new_tokens=5)
    Regenerator(target, tokenizer, settings).run(rows, tmp_path / "out.jsonl", progress=False)
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert row["messages"] == context
    new = greedy_by_generate(
        target, tokenizer("<system> w6 <end> <user> w7 <end> <assistant>")["input_ids"], 5, [END_ID]
    )
    assert row["response"] == tokenizer.decode(new, skip_special_tokens=True)


def test_the_thinking_switch_reaches_the_template(target: PreTrainedModel, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "w7"}]
    ids = {
        switch: Regenerator(target, tokenizer, RegenerationSettings(enable_thinking=switch)).encode(messages)
        for switch in (None, False, True)
    }
    assert ids[None] == ids[False] == ids[True][:-1]
    assert ids[True][-1] == SPECIAL.index("<think>")


def test_a_prompt_that_fills_the_context_is_left_out_and_said(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tiny.llama(max_position_embeddings=16)
    rows = [{"prompt": "w7 " * 30}, {"prompt": "w7 " * 9}]
    with caplog.at_level(logging.WARNING, regeneration.__name__):
        Regenerator(target, tokenizer, RegenerationSettings(do_sample=False)).run(
            rows, tmp_path / "out.jsonl", progress=False
        )
    (row,) = read_rows(tmp_path / "out.jsonl")
    assert "Prompt 0 is skipped" in caplog.text
    assert row["id"] == 1
    assert len(row["response_ids"]) == 16 - 12


@pytest.mark.parametrize("reason", ["a hybrid cache", "a repetition penalty"])
def test_other_targets_run_with_plain_generate_and_say_so_once(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    target = tiny.qwen3_5() if reason == "a hybrid cache" else tiny.llama()
    if reason == "a repetition penalty":
        target.generation_config.repetition_penalty = 1.3
    settings = RegenerationSettings(do_sample=False, max_new_tokens=4, slots=2)
    regenerator = Regenerator(target, tokenizer, settings)
    with caplog.at_level(logging.WARNING, regeneration.__name__):
        regenerator.run(word_rows(3), tmp_path / "a.jsonl", progress=False)
        regenerator.eos_token_ids = list(range(tiny.VOCAB_SIZE))  # so that turns end
        regenerator.run([{"turns": ["w7", "w8"]}], tmp_path / "b.jsonl", progress=False)
    assert caplog.text.count("plain batched generate") == 1
    assert len(read_rows(tmp_path / "a.jsonl")) == 3
    assert len(read_rows(tmp_path / "b.jsonl")[0]["messages"]) == 3
