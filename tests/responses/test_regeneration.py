"""Regeneration: responses and where they come from, resuming, conversations, self-prompting, servers."""

from __future__ import annotations

import http.server
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from email.utils import formatdate
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest
from responses.decoding import greedy_by_generate, ragged_prompts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import tiny
from dspark_hf.conversations.prompts import Conversation, as_conversation, read_prompts
from dspark_hf.conversations.rows import encode_rows
from dspark_hf.responses import regeneration
from dspark_hf.responses import server as regeneration_server
from dspark_hf.responses.regeneration import Regenerator
from dspark_hf.responses.self_prompting import self_prompt
from dspark_hf.responses.server import ServerRegenerator
from dspark_hf.responses.settings import RegenerationSettings, resolve_sampling
from dspark_hf.responses.token_sampling import Sampling
from dspark_hf.responses.writer import ResponseWriter
from dspark_hf.storage.json_lines import ResumableLines

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %} <think>{% endif %}{% endif %}"
)
SPECIAL = ["<end>", "<system>", "<user>", "<assistant>", "<think>"]
END_ID = 0


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: `<end>` is 0, roles follow, then `w5`, `w6`, ... for every other id."""
    words = SPECIAL + [f"w{i}" for i in range(len(SPECIAL), tiny.VOCAB_SIZE)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w5"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<end>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny.llama(eos_token_id=END_ID)


def word_rows(count: int) -> list[dict[str, Any]]:
    """Prompts `{"prompt": "w7 w9 ..."}` of different lengths."""
    return [{"source": "made", "prompt": " ".join(f"w{5 + t % 100}" for t in p)} for p in ragged_prompts(count)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_by_id(path: Path) -> list[dict[str, Any]]:
    return sorted(read_rows(path), key=lambda row: row["id"])


class Echo(ResponseWriter):
    """Answers every prompt by its own last message, for what has to do with the file alone."""

    def __init__(self, **origin: Any) -> None:
        self.settings = origin

    def origin(self) -> dict[str, Any]:
        return self.settings

    def answer(
        self, conversations: list[Conversation], on_tokens: Callable[[int], None]
    ) -> Iterator[dict[str, Any] | None]:
        for conversation in conversations:
            conversation.add(conversation.messages[-1]["content"], finished=True)
            while conversation.next_turn():
                conversation.add(conversation.messages[-1]["content"], finished=True)
            yield conversation.output_row()


def test_settings_go_before_the_generation_config(target: PreTrainedModel) -> None:
    config = type(target.generation_config)(do_sample=True, temperature=0.6, top_p=0.95)
    assert resolve_sampling(RegenerationSettings(), config) == Sampling(True, 0.6, 50, 0.95)
    assert resolve_sampling(RegenerationSettings(top_k=0, temperature=1.0), config) == Sampling(True, 1.0, 0, 0.95)
    assert not resolve_sampling(RegenerationSettings(do_sample=False), config).do_sample
    assert not resolve_sampling(RegenerationSettings(temperature=0), config).do_sample
    plain = type(target.generation_config)()
    assert not resolve_sampling(RegenerationSettings(), plain).do_sample
    assert resolve_sampling(RegenerationSettings(temperature=0.6), plain).do_sample


# ----------------------------------------------------------------------------------------------------------- the file


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


def killing_append(after: int) -> Callable[[ResumableLines, dict[str, Any]], None]:
    """`ResumableLines.append` that stops the run once `after` rows are written."""
    append, count = ResumableLines.append, iter(range(after))

    def append_or_stop(self: ResumableLines, row: dict[str, Any]) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt
        append(self, row)

    return append_or_stop


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


ASKED = [{"prompt": "a"}, {"messages": [{"role": "user", "content": "b"}]}, {"turns": ["c", "d"]}]


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": "z"},
        {"messages": [{"role": "user", "content": "z"}]},
        {"messages": [{"role": "system", "content": "z"}, {"role": "user", "content": "b"}]},
        {"turns": ["z", "d"]},
        {"turns": ["c", "z"]},
        {"turns": ["c"]},
    ],
)
def test_an_output_is_not_continued_with_other_prompts(tmp_path: Path, other: dict[str, Any]) -> None:
    output, name = tmp_path / "out.jsonl", next(iter(other))
    Echo().run(ASKED, output, progress=False)
    assert Echo().run(ASKED, output, progress=False) == 0
    with pytest.raises(ValueError, match="another prompt"):
        Echo().run([other if name in row else row for row in ASKED], output, progress=False)


@pytest.mark.parametrize(
    ("now", "told"), [({"top_p": 0.5}, "top_p was None, now 0.5"), ({}, "temperature was 0.2, now None")]
)
def test_an_output_is_not_continued_with_other_settings(tmp_path: Path, now: dict[str, Any], told: str) -> None:
    Echo(temperature=0.2).run(ASKED, tmp_path / "out.jsonl", progress=False)
    with pytest.raises(ValueError, match=told):
        Echo(**now).run(ASKED, tmp_path / "out.jsonl", progress=False)


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


# ------------------------------------------------------------------------------------------------------ conversations


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


# ----------------------------------------------------------------------------------------------------- self-prompting


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


# ------------------------------------------------------------------------------------------------------------- server


class StubServer(http.server.BaseHTTPRequestHandler):
    """Answers with the words of the last message backwards, and otherwise to what `FAILURES` names; keeps what it got."""

    received: ClassVar[list[dict[str, Any]]] = []
    # What is answered to a message's first request (status, text), and whether to the later ones as well.
    FAILURES: ClassVar[dict[str, tuple[int, str, bool]]] = {
        "starting": (503, "", False),
        "waiting": (429, "", False),
        "page": (200, "<html>", False),
        "fault": (200, '{"error": "overloaded"}', False),
        "torn": (200, '{"choices": []}', False),
        "always": (200, "<html>", True),
        "no": (400, '{"error": "too long"}', True),
        "stranger": (401, '{"error": "who are you?"}', True),
    }

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append(body)
        text = body["messages"][-1]["content"]
        status, failure, again = self.FAILURES.get(text, (200, "", False))
        if text in self.FAILURES and (again or sum(b["messages"] == body["messages"] for b in self.received) == 1):
            return self.reply(status, failure, missing=100 if text == "torn" else 0)
        thoughts = {"reasoning_content": "hm"} if text == "think" else {}
        choice = {
            "message": {"content": " ".join(text.split()[::-1]), **thoughts},
            "finish_reason": "length" if text == "cut" else "stop",
        }
        return self.reply(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": len(text.split())}}))

    def reply(self, status: int, text: str, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text) + missing))
        if status == 429:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


class Impatient(threading.Event):
    """Notes what is waited for before a request is sent again, without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def impatient(url: str) -> tuple[ServerRegenerator, list[float | None]]:
    """One request at a time, and what was waited for."""
    writer = ServerRegenerator(url, "x", RegenerationSettings(slots=1))
    writer.stopped = Impatient()
    return writer, writer.stopped.waits


@pytest.fixture
def server() -> Iterator[str]:
    StubServer.received.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StubServer) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{stub.server_port}"
        stub.shutdown()


def test_a_server_answers_in_the_targets_place(server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "a b"},
        {"prompt": "no"},
        {"prompt": "cut"},
        {"turns": ["c d", "e f"]},
        {"turns": ["cut", "g h"]},
        {"turns": ["i j", "no"]},
    ]
    settings = RegenerationSettings(temperature=0.6, top_k=0, max_new_tokens=7, enable_thinking=False, slots=3)
    writer = ServerRegenerator(f"{server}/v1/", "some-target", settings)
    assert writer.run(rows, tmp_path / "out.jsonl", progress=False) == 5
    written = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert {i: row["response"] for i, row in written.items()} == {0: "b a", 2: "cut", 3: "f e", 4: "cut", 5: "j i"}
    assert [i for i, row in sorted(written.items()) if not row["finished"]] == [2, 4]
    assert [message["content"] for message in written[3]["messages"]] == ["c d", "d c", "e f"]
    assert "Prompt 1 is skipped" in caplog.text
    assert "Prompt 5 ends after 1 of its turns" in caplog.text
    body = StubServer.received[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("some-target", 7, 0.6, -1)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in body


def test_failed_requests_are_repeated(server: str, tmp_path: Path) -> None:
    words = ["starting", "page", "fault", "torn", "waiting"]
    writer, waits = impatient(server)
    assert writer.run([{"prompt": word} for word in words], tmp_path / "out.jsonl", progress=False) == 5
    assert [row["response"] for row in rows_by_id(tmp_path / "out.jsonl")] == words
    assert sorted(waits) == [1, 1, 1, 1, 7]  # the last as its Retry-After says


def test_a_busy_server_is_waited_for_in_minutes() -> None:
    assert sum(regeneration_server.BUSY_WAITS_S) > 300


def test_a_server_that_never_answers_ends_the_run_clearly(server: str, tmp_path: Path) -> None:
    writer, waits = impatient(server)
    with pytest.raises(ConnectionError, match=r"after 4 tries \(its reply is not JSON"):
        writer.run([{"prompt": "always"}], tmp_path / "out.jsonl", progress=False)
    assert waits == list(regeneration_server.AWAY_WAITS_S)


def test_a_server_that_refuses_everything_ends_the_run_at_once(server: str, tmp_path: Path) -> None:
    rows = [{"prompt": "stranger"}] * 40
    with pytest.raises(ValueError, match=r"HTTP 401: .*who are you.*Check the address, the API key"):
        ServerRegenerator(server, "x", RegenerationSettings(slots=2)).run(rows, tmp_path / "out.jsonl", progress=False)
    assert len(StubServer.received) < 40


def test_thoughts_that_a_server_splits_off_are_not_dropped_silently(server: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a reasoning parser"):
        ServerRegenerator(server, "x").run([{"prompt": "think"}], tmp_path / "out.jsonl", progress=False)


@pytest.mark.parametrize(("header", "seconds"), [(None, 0), ("120", 120), ("soon", 0)])
def test_retry_after_in_seconds(header: str | None, seconds: float) -> None:
    assert regeneration_server.retry_after_s(header) == seconds


@pytest.mark.parametrize(("ahead_s", "seconds"), [(900, 900), (-900, 0)])
def test_retry_after_as_a_date(ahead_s: float, seconds: float) -> None:
    date = formatdate(time.time() + ahead_s, usegmt=True)
    assert regeneration_server.retry_after_s(date) == pytest.approx(seconds, abs=60)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"No answer from http://127\.0\.0\.1:9/v1"):
        impatient("http://127.0.0.1:9")[0].run([{"prompt": "a"}], tmp_path / "out.jsonl", progress=False)
    with pytest.raises(ValueError, match="http:// or https:// in front"):
        ServerRegenerator("127.0.0.1:9", "x")


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
