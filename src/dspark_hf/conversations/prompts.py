"""Reads prompts from files or data sets and turns them into conversations."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .data_sets import read_data_set

logger = logging.getLogger(__name__)

PROMPT_FIELDS = ("turns", "messages", "prompt")


class Unanswerable(ValueError):
    """Raised for a prompt that cannot be answered, although others may: it is skipped with a warning."""


@dataclass
class Conversation:
    """A conversation that is being generated: `messages` grows by a response and the next of `turns` until none is left."""

    id: int
    row: dict[str, Any]
    messages: list[dict[str, Any]]
    turns: list[str] = field(default_factory=list)  # the user's turns that were not asked yet
    num_responses: int = 0
    finished: bool = True  # whether the last response ended with an end-of-sequence token

    def add(self, response: str, finished: bool, response_ids: list[int] | None = None) -> None:
        ids = {} if response_ids is None else {"response_ids": response_ids}
        self.messages.append({"role": "assistant", "content": response, **ids})
        self.num_responses += 1
        self.finished = finished

    def next_turn(self) -> bool:
        """Adds the user's next turn; False if no turn is left, or the last response was cut by the limit."""
        if not self.turns or not self.finished:
            return False
        self.messages.append({"role": "user", "content": self.turns.pop(0)})
        return True

    def give_up(self, reason: object) -> None:
        """Warns that the last user turn gets no response, and drops it if there are responses before it."""
        if not self.num_responses:
            logger.warning("Prompt %d is skipped: %s.", self.id, reason)
            return
        self.messages.pop()
        logger.warning("Prompt %d ends after %d of its turns: %s.", self.id, self.num_responses, reason)

    def output_row(self) -> dict[str, Any]:
        """The row to write, after the last response."""
        *before, response = self.messages
        row: dict[str, Any] = {"id": self.id}
        if "source" in self.row:
            row["source"] = self.row["source"]
        if len(before) == 1 and "prompt" in self.row:
            row["prompt"] = before[0]["content"]
        else:
            row["messages"] = before
        row |= {"response": response["content"], "finished": self.finished}
        if "response_ids" in response:
            row["response_ids"] = response["response_ids"]
        return row


def without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the fields that a chat template expects."""
    return [{name: value for name, value in message.items() if name != "response_ids"} for message in messages]


def read_prompts(
    source: str | Path, split: str = "train", subset: str | None = None, column: str | None = None
) -> Iterator[dict[str, Any]]:
    """
    Rows of a local JSON-lines file, or of a data set of the `datasets` library.

    Args:
        source: The file, or the name of a data set as for `datasets.load_dataset`.
        split, subset: Split and subset of a data set; `datasets` calls a subset configuration or `name`.
        column: The column with the prompt; by default `turns`, `messages` or `prompt`.

    Raises:
        ValueError: when a local file does not exist or has no rows, or a row does not have the column.
    """
    is_empty = True
    for index, row in enumerate(_read_rows(source, split, subset)):
        is_empty = False
        yield _from_column(index, row, column) if column else row
    if is_empty:
        raise ValueError(f"'{source}' holds no rows: give a file or data set with a prompt in each row.")


def _read_rows(source: str | Path, split: str, subset: str | None) -> Iterator[dict[str, Any]]:
    path = Path(source)
    if path.is_file() and path.suffix not in (".parquet", ".csv", ".arrow"):
        yield from _read_rows_of_json(path)
        return
    if path.suffix in (".jsonl", ".json"):
        raise ValueError(f"There is no file '{source}'.")
    if path.is_file():
        yield from read_data_set(path.suffix[1:], files=[str(path)])
    else:
        yield from read_data_set(str(source), subset or None, split=split)


def _read_rows_of_json(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file that has one per line, or one JSON list of rows."""
    with path.open(encoding="utf-8") as file:
        is_list = file.read(1) == "["
        file.seek(0)
        lines = enumerate([file.read()] if is_list else file, start=1)
        for number, line in lines:
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                line_number = number + error.lineno - 1
                raise ValueError(
                    f"'{path}', line {line_number}, is not valid JSON: {error.msg} (column {error.colno})."
                ) from error
            for row in found if is_list else [found]:
                if not isinstance(row, dict):
                    raise ValueError(
                        f"'{path}', line {number}, holds {row!r:.60}; give rows such as {{\"prompt\": ...}}."
                    )
                yield row


def _from_column(index: int, row: dict[str, Any], column: str) -> dict[str, Any]:
    """A row with the contents of the column under `turns`, `messages` or `prompt`, depending on its type."""
    if column not in row:
        raise ValueError(
            f"Row {index} has no column {column!r}; its columns are {', '.join(sorted(row))}. Name one of them."
        )
    value = row[column]
    several = not isinstance(value, str) and bool(value)
    name = "prompt" if not several else "turns" if isinstance(value[0], str) else "messages"
    return {name: value} | ({"source": row["source"]} if "source" in row else {})


def as_conversation(index: int, row: dict[str, Any]) -> Conversation:
    """
    Makes a conversation from a row with `turns` (user turns), `messages` (a final response is dropped) or `prompt`.

    Raises:
        ValueError: when the row has none of these fields.
        Unanswerable: when it contains no text of the user.
    """
    if row.get("turns"):
        return Conversation(index, row, [{"role": "user", "content": row["turns"][0]}], list(row["turns"][1:]))
    if row.get("messages"):
        messages = [as_message(message) for message in row["messages"]]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            return Conversation(index, row, messages)
    if row.get("prompt"):
        return Conversation(index, row, [{"role": "user", "content": row["prompt"]}])
    if set(PROMPT_FIELDS).isdisjoint(row):
        raise ValueError(
            f"Prompt {index} has the fields {sorted(row)}; give one of 'prompt' (text), 'messages' (role and content) or "
            "'turns' (texts of the user's turns)."
        )
    raise Unanswerable("nothing is asked in it")


def as_conversations(rows: dict[int, dict[str, Any]]) -> list[Conversation]:
    """Conversations from all rows that contain text of the user, with a warning for each of the others."""
    conversations = []
    for index, row in rows.items():
        try:
            conversations.append(as_conversation(index, row))
        except Unanswerable as reason:
            logger.warning("Prompt %d is skipped: %s.", index, reason)
    return conversations


def as_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """
    A message for a chat template, with text as content. Also accepts `from` and `value` as in ShareGPT's data sets, and a list of
    texts as content.

    Raises:
        Unanswerable: when it has no role, or contains something other than text.
    """
    if "role" not in message:
        if not {"from", "value"} <= message.keys():
            raise Unanswerable(f"a message has the fields {sorted(message)}; give each message 'role' and 'content'")
        role = {"human": "user", "gpt": "assistant"}.get(message["from"], message["from"])
        return {"role": role, "content": message["value"]}
    content = message.get("content") or ""
    if not isinstance(content, str):
        if kinds := sorted({part.get("type", "text") for part in content} - {"text"}):
            raise Unanswerable(
                f"a message of the {message['role']} holds {', '.join(kinds)}, but drafters are trained on text alone"
            )
        content = "".join(part["text"] for part in content)
    return {**message, "content": content}


def check_same_prompts(written: list[dict[str, Any]], prompts: dict[int, dict[str, Any]], output: str | Path) -> None:
    """Refuses to resume an output whose rows answer other prompts."""
    for row in written:
        if row["id"] in prompts and not answers(row, prompts[row["id"]]):
            raise ValueError(
                f"'{output}' answers another prompt under id {row['id']} than the one given now. "
                "Continue with the same prompts, or write to another file."
            )


def answers(row: dict[str, Any], prompt: dict[str, Any]) -> bool:
    """Whether an output row is an answer to this prompt, or to the first of its turns."""
    try:
        asked = as_conversation(row["id"], prompt)
    except Unanswerable:
        return False
    messages = row.get("messages") or [{"role": "user", "content": row.get("prompt")}]
    given, later = messages[: len(asked.messages)], messages[len(asked.messages) :]
    turns = [message["content"] for message in later if message["role"] == "user"]
    return without_ids(given) == without_ids(asked.messages) and turns == asked.turns[: len(turns)]
