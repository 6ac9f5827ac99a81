"""Prompts, their responses and the file: what is refused before anything is done, and what is left of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_folders
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from dspark_hf.conversations import encode_rows, read_prompts
from dspark_hf.conversations.prompts import Conversation
from dspark_hf.responses import RegenerationSettings, Regenerator
from dspark_hf.responses.plain_decoder import PlainDecoder
from dspark_hf.responses.writer import ResponseWriter

GREEDY = RegenerationSettings(do_sample=False, max_new_tokens=6, slots=2)


class Silent(ResponseWriter):
    """Answers nothing."""

    def origin(self) -> dict[str, Any]:
        return {}

    def answer(
        self, conversations: list[Conversation], on_tokens: Callable[[int], None]
    ) -> Iterator[dict[str, Any] | None]:
        return iter([None] * len(conversations))


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with its tokenizer."""
    path = tmp_path_factory.mktemp("target")
    tiny.llama(eos_token_id=1).save_pretrained(path)
    tiny_folders.tokenizer().save_pretrained(path)
    return path


def loaded(folder: Path, settings: RegenerationSettings = GREEDY, template: bool = True, **options: Any) -> Regenerator:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if not template:
        tokenizer.chat_template = None
    return Regenerator(AutoModelForCausalLM.from_pretrained(folder, **options), tokenizer, settings)


# ---------------------------------------------------------------------------------------------------- nothing to answer


@pytest.mark.parametrize("text", ["", "\n \n\n", "[]"], ids=["an empty file", "blank lines", "an empty list"])
def test_a_file_without_prompts_is_an_error_and_leaves_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "prompts.jsonl").write_text(text)
    with pytest.raises(ValueError, match=r"prompts\.jsonl' holds no rows"):
        Silent().run(read_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out" / "r.jsonl", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


@pytest.mark.parametrize(
    ("prompts", "start", "told"),
    [
        ([], 0, "There are no prompts to answer."),
        ([{"prompt": "a"}], 1, "There are no prompts to answer from index 1 on."),
        ([{"prompt": "a"}], 0, "None of the 1 prompts could be answered"),
        ([{"prompt": ""}, {"messages": []}], 0, "None of the 2 prompts could be answered"),
    ],
    ids=["none", "none from there on", "none is answered", "none asks anything"],
)
def test_a_run_without_responses_is_an_error_and_leaves_nothing(
    tmp_path: Path, prompts: list[dict[str, Any]], start: int, told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        Silent().run(prompts, tmp_path / "r.jsonl", start, progress=False)
    assert list(tmp_path.iterdir()) == []


# --------------------------------------------------------------------------------------- other prompts and settings


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


# -------------------------------------------------------------------------------------------------- no chat template


def test_without_a_template_a_warning_says_that_prompts_are_continued(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    regenerator = loaded(folder, template=False)
    for name in ("a", "b"):
        regenerator.run([{"prompt": "Why?"}], tmp_path / name, progress=False)
    assert caplog.text.count("has no chat template, so each prompt is continued as plain text") == 1
    ids = regenerator.encode([{"role": "user", "content": "Why?"}])
    assert ids == regenerator.tokenizer("Why?")["input_ids"]


@pytest.mark.parametrize("row", [{"turns": ["a", "b"]}, {"messages": [{"role": "system", "content": "s"}] * 2}])
def test_without_a_template_conversations_are_refused_before_anything_is_answered(
    folder: Path, tmp_path: Path, row: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="cannot write the conversation of 2 messages that prompt 1 asks for"):
        loaded(folder, template=False).run([{"prompt": "a"}, row], tmp_path / "r.jsonl", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_rows_learned_without_a_template_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_folders.tokenizer()
    tokenizer.chat_template, tokenizer.name_or_path = None, "a/base-model-to-learn-from"
    row = {"prompt": "Why?", "response": "So."}
    (encoded,) = encode_rows([row], tokenizer)
    encode_rows([row], tokenizer)
    assert (
        caplog.text.count("'a/base-model-to-learn-from' has no chat template, so prompt and response are learned") == 1
    )
    assert tokenizer.decode(encoded["input_ids"]) == "Why?So." + tokenizer.eos_token


# ---------------------------------------------------------------------------------------------------------- progress


@pytest.mark.parametrize("plain", [False, True], ids=["fast decoder", "plain generate"])
def test_every_token_is_counted_while_responses_grow(folder: Path, tmp_path: Path, plain: bool, caplog: Any) -> None:
    regenerator = loaded(folder)
    if plain:
        regenerator.target.generation_config.repetition_penalty = 1.1
    assert isinstance(regenerator.decoder(10), PlainDecoder) == plain
    counts: list[int] = []
    rows = [{"prompt": "abc"}, {"prompt": "de"}, {"prompt": "f"}]
    regenerator.run(rows, tmp_path / "r.jsonl", progress=False)
    written = [
        len(row["response_ids"])
        for row in regenerator.answer(
            [Conversation(i, row, [{"role": "user", "content": row["prompt"]}]) for i, row in enumerate(rows)],
            counts.append,
        )
        if row is not None
    ]
    assert sum(counts) == sum(written) and len(counts) > len(written)


def test_the_bar_shows_tokens_before_a_prompt_is_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from dspark_hf.responses.progress import ResponseBar

    with ResponseBar(total=60, done=3) as bar:
        bar.interval_s = 0
        bar.add_tokens(1234)
        shown = capsys.readouterr().err
    assert re.search(r"3/60 .*1,234 tokens, \d+ tokens/s", shown)
