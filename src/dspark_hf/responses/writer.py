"""Writes responses to a file that an interrupted run resumes; the base of both ways of answering prompts."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ..conversations.prompts import Conversation, as_conversations, check_same_prompts
from ..storage.json_lines import ResumableLines, check_origin, written_lines
from .progress import ResponseBar

logger = logging.getLogger(__name__)


class ResponseWriter(ABC):
    """Writes responses to prompts into a resumable file; subclasses say how prompts are answered."""

    def run(
        self,
        prompts: Iterable[dict[str, Any]],
        output: str | Path,
        start: int = 0,
        max_prompts: int | None = None,
        progress: bool = True,
    ) -> int:
        """Answers the prompts that are not answered in `output` yet, and appends the responses.

        Args:
            prompts: rows from `read_prompts`; a row's index is its id.
            output: JSON-lines file, resumed if it exists.
            start: index of the first prompt to answer.
            max_prompts: at most this many from there.
            progress: show a progress bar.

        Returns:
            `int`: how many rows were added.

        Raises:
            ValueError: there is no prompt to answer, or none could be answered; a prompt has none of the known fields; or
                `output` has rows for other prompts or settings, is a different kind of file, or is being written by another
                process.
        """
        chosen = chosen_prompts(prompts, start, max_prompts)
        check_output(output, chosen, self.origin())
        with ResumableLines(output, self.origin()) as lines:
            done = {row["id"] for row in lines.written}
            todo = as_conversations({index: row for index, row in chosen.items() if index not in done})
            added = 0
            with ResponseBar(len(chosen), len(chosen) - len(todo), progress) as bar:
                for row in self.answer(todo, bar.add_tokens):
                    if row is not None and _append(lines, row):
                        added += 1
                        bar.add_prompt()
        if not added and not done:
            raise ValueError(f"None of the {len(chosen)} prompts could be answered, so '{output}' was not written.")
        return added

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What the rows depend on, for the note next to the output."""

    @abstractmethod
    def answer(
        self, conversations: list[Conversation], on_tokens: Callable[[int], None]
    ) -> Iterator[dict[str, Any] | None]:
        """Completes conversations and yields them in the order they finish.

        Args:
            on_tokens: must be called with the number of new tokens, from any thread.

        Yields:
            the output row of each conversation; None if it could not be answered.
        """


def chosen_prompts(
    prompts: Iterable[dict[str, Any]], start: int = 0, max_prompts: int | None = None
) -> dict[int, dict[str, Any]]:
    """
    The prompts to answer, by their index.

    Raises:
        ValueError: when there are none.
    """
    stop = None if max_prompts is None else start + max_prompts
    chosen = dict(islice(enumerate(prompts), start, stop))
    if not chosen:
        raise ValueError("There are no prompts to answer" + (f" from index {start} on." if start else "."))
    return chosen


def check_output(output: str | Path, prompts: dict[int, dict[str, Any]], origin: dict[str, Any]) -> None:
    """
    Refuses an output whose rows were made with other settings or from other prompts. It changes nothing, so it can be called
    before a target is loaded.

    Args:
        output: As for `run`.
        prompts: From [`chosen_prompts`].
        origin: What new rows would depend on, or the part of it that is known already.

    Raises:
        ValueError: when there are differences; the message lists them.
    """
    check_origin(output, origin)
    check_same_prompts(written_lines(output), prompts, output)


def _append(lines: ResumableLines, row: dict[str, Any]) -> bool:
    """Writes a row; False, with a warning, if its text is not valid Unicode."""
    try:
        lines.append(row)
    except UnicodeEncodeError as error:
        logger.warning("Prompt %d is skipped: its text cannot be written (%s).", row["id"], error)
        return False
    return True
