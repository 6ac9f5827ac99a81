"""A tokenizer with one token per word: its template, prompts for it, and responses as they were written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from responses.decoding import ragged_prompts

from dspark_hf.storage.json_lines import ResumableLines

TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' <end> ' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking %} <think>{% endif %}{% endif %}"
)


SPECIAL = ["<end>", "<system>", "<user>", "<assistant>", "<think>"]


END_ID = 0


def word_rows(count: int) -> list[dict[str, Any]]:
    """Prompts `{"prompt": "w7 w9 ..."}` of different lengths."""
    return [{"source": "made", "prompt": " ".join(f"w{5 + t % 100}" for t in p)} for p in ragged_prompts(count)]


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def rows_by_id(path: Path) -> list[dict[str, Any]]:
    return sorted(read_rows(path), key=lambda row: row["id"])


def killing_append(after: int) -> Callable[[ResumableLines, dict[str, Any]], None]:
    """`ResumableLines.append` that stops the run once `after` rows are written."""
    append, count = ResumableLines.append, iter(range(after))

    def append_or_stop(self: ResumableLines, row: dict[str, Any]) -> None:
        if next(count, None) is None:
            raise KeyboardInterrupt
        append(self, row)

    return append_or_stop
