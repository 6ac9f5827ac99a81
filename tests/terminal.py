"""A program in a terminal: started behind a pty, typed to, and its screen read as a person sees it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pexpect
import pyte

PROMPT = "> "
SOURCE = Path(__file__).parents[1] / "src"


class Terminal:
    """
    Runs `dspark-hf` in a terminal of its own.

    Args:
        arguments: Of the command.
        columns, rows: Size of the terminal.
        timeout_s: How long to wait for anything.
    """

    def __init__(self, arguments: list[str], columns: int = 80, rows: int = 24, timeout_s: float = 240.0):
        self.timeout_s = timeout_s
        self.screen = pyte.HistoryScreen(columns, rows, history=1000)
        self._stream = pyte.Stream(self.screen)
        environment = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES", "COLORTERM")}
        self.process = pexpect.spawn(
            sys.executable,
            ["-m", "dspark_hf_cli", *arguments],
            dimensions=(rows, columns),
            env=environment | {"TERM": "xterm-256color", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(SOURCE)},
            encoding="utf-8",
            # What runs the tests may ignore Ctrl-C (a job in the background does); a program in a terminal does not.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            codec_errors="replace",
        )

    @property
    def lines(self) -> list[str]:
        """Everything from the first line that scrolled away to the last on the screen."""
        return ["".join(c.data for c in row) for row in self.rows]

    @property
    def rows(self) -> list[list[pyte.screens.Char]]:
        """The same with colours, a character a cell."""
        on_screen = [self.screen.buffer[y] for y in range(self.screen.lines)]
        return [[row[x] for x in range(self.screen.columns)] for row in [*self.screen.history.top, *on_screen]]

    @property
    def is_at_prompt(self) -> bool:
        """Whether an empty prompt waits for input."""
        cursor = self.screen.cursor
        return cursor.x == len(PROMPT) and self.screen.display[cursor.y].rstrip() == PROMPT.rstrip()

    def read_until(self, condition: Callable[[], bool]) -> None:
        """
        Reads what the program writes.

        Raises:
            TimeoutError: with the screen, where the condition does not come true, or the program ends before it does.
        """
        until = time.monotonic() + self.timeout_s
        while not condition():
            try:
                self._stream.feed(self.process.read_nonblocking(4096, timeout=0.1))
            except pexpect.TIMEOUT:
                if time.monotonic() > until:
                    raise TimeoutError("\n".join(self.lines)) from None
            except pexpect.EOF:
                raise TimeoutError("\n".join([*self.lines, "(ended)"])) from None

    def say(self, line: str) -> None:
        """Types a line, and waits until it stands there: until then the screen shows the prompt that it answers."""
        before = self._count(line)
        self.process.sendline(line)
        self.read_until(lambda: self._count(line) > before)

    def _count(self, line: str) -> int:
        return sum(shown.startswith(PROMPT + line) for shown in self.lines)

    def read_answer(self) -> None:
        """Reads until the next prompt."""
        self.read_until(lambda: self.is_at_prompt)

    def rest(self, seconds: float = 0.5) -> None:
        """Reads for so long: a key that is to meet a waiting program is pressed after that."""
        until = time.monotonic() + seconds
        self.read_until(lambda: time.monotonic() > until)

    def end(self) -> int:
        """Ends the input, as Ctrl-D does. Returns the exit code."""
        self.process.sendeof()
        self.process.expect(pexpect.EOF)
        self._stream.feed(self.process.before)
        self.process.close()
        return self.process.exitstatus
