"""A conversation of `dspark-hf chat`, and how its answers are shown."""

from __future__ import annotations

import contextlib
import difflib
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.text import Text
from transformers import PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from dspark_hf.conversations.chat import Chat
from dspark_hf.drafter import Drafter
from dspark_hf.evaluation import BenchSettings
from dspark_hf.generation import DraftTintStreamer, SpeculationStats, record_speculation
from dspark_hf.transformers_names import CACHE_KEY, GenerativeModel

# The colours of DraftTintStreamer, by their names in rich.
DRAFTED_STYLE, OWN_STYLE = "dodger_blue1", "dark_orange"
SECONDS_BETWEEN_REDRAWS = 1 / 8


COMMANDS = ("/plain", "/clear", "/help", "/quit")
HELP = (
    "/plain switches the drafter off and on, /clear starts a new conversation, Ctrl-C stops an answer, /quit or Ctrl-D ends "
    "the program."
)


def show_help(console: Console) -> None:
    """Prints a legend of the colours, and the commands."""
    console.print(Text.assemble(("drafted tokens", DRAFTED_STYLE), ", ", ("the target's tokens", OWN_STYLE)))
    console.print(Text(HELP))


def unknown_command(line: str) -> str:
    """The message for a line that looks like a command but is not one."""
    word = line.split()[0]
    close = difflib.get_close_matches(word, COMMANDS, n=1)
    return f"Unknown command {word}. " + (
        f"Did you mean {close[0]}?" if close else f"Commands are {', '.join(COMMANDS)}."
    )


@contextlib.contextmanager
def interruptible() -> Iterator[threading.Event]:
    """
    Ctrl-C sets the event instead of raising, so that an answer ends between two tokens. A second Ctrl-C raises
    `KeyboardInterrupt` as usual.
    """
    stop = threading.Event()

    def interrupt(*_: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


class StopWhen(StoppingCriteria):
    """Ends the output at the next token once `stop` is set."""

    def __init__(self, stop: threading.Event):
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.stop.is_set(), device=input_ids.device)


class ChatSession:
    """
    A conversation with the target, with or without the drafter.

    Args:
        target, tokenizer, drafter: The models.
        system: System message before the first turn.
        max_new_tokens, temperature, threshold: As the options of `chat`.
        live: Whether to show the speed during an answer, which needs a terminal.
    """

    def __init__(
        self,
        target: GenerativeModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter,
        system: str | None,
        max_new_tokens: int,
        temperature: float,
        threshold: float | None,
        live: bool,
    ):
        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.uses_drafter = True
        self._system = system
        self._arguments = BenchSettings(max_new_tokens, temperature).arguments()
        self._threshold = threshold
        self._answer_type = LiveAnswer if live and not Console().is_dumb_terminal else PrintedAnswer
        self.clear()

    def clear(self) -> None:
        """Forgets the conversation."""
        self._chat = Chat(self.tokenizer, self._system)
        self._cache: Any = None

    def answer(self, text: str, stop: threading.Event) -> str:
        """
        Streams the answer to one turn to standard output, followed by its speed.

        Args:
            text: The user's turn.
            stop: Ends the answer early when it is set; the text so far stays part of the conversation.

        Returns:
            The answer.
        """
        input_ids = self._chat.ask(text).to(self.target.device)
        kwargs = dict(self._arguments)
        if self.uses_drafter:
            kwargs["assistant_model"] = self.drafter
            if self._threshold is not None:
                kwargs["assistant_confidence_threshold"] = self._threshold
        if self._cache is not None:
            kwargs[CACHE_KEY] = self._cache
        with record_speculation() as stats, self._answer_type(self.tokenizer, stats) as streamer:
            output = self.target.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([StopWhen(stop)]),
                return_dict_in_generate=True,
                **kwargs,
            )
        self._cache = output.get(CACHE_KEY)
        return self._chat.add_answer(output.sequences[0])


class PrintedAnswer(DraftTintStreamer):
    """
    Prints an answer as it is generated, and at the end its speed to standard error.

    Args:
        tokenizer: Decodes the tokens.
        stats: The statistics of the running call.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stats: SpeculationStats):
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stats = stats
        self.num_tokens = 0
        self._first_at = time.perf_counter()

    def __enter__(self) -> PrintedAnswer:
        return self

    def __exit__(self, *_: object) -> None:
        print(self.status(), file=sys.stderr)

    def put(self, value: torch.Tensor) -> None:
        if not self._expects_prompt:
            if not self.num_tokens:  # The first token comes from the pass over the prompt; the clock starts after it.
                self._first_at = time.perf_counter()
            self.num_tokens += value.numel()
        super().put(value)

    def status(self) -> str:
        """Tokens per second, tokens per pass, and the share of accepted drafts."""
        elapsed = time.perf_counter() - self._first_at
        speed = (self.num_tokens - 1) / elapsed if self.num_tokens > 1 and elapsed > 0 else 0.0
        line = f"{self.num_tokens} tokens, {speed:.1f} tokens/s"
        if self.stats.rounds:
            line += f", {self.stats.acceptance_length:.2f} tokens per pass"
        if any(round_.verified for round_ in self.stats.rounds):
            line += f", {self.stats.acceptance_rate:.0%} of drafts accepted"
        return line


class LiveAnswer(PrintedAnswer):
    """
    On a terminal, also shows speed and acceptance below the text while the answer grows.

    Complete lines of the answer are printed once, above the part that is redrawn, so they scroll like any output and the cost
    of redrawing does not depend on the length of the answer. Each token triggers redrawing; a separate thread could write
    between two lines that are being printed, and a line would be lost.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stats: SpeculationStats, console: Console | None = None):
        super().__init__(tokenizer, stats)
        self._console = console or Console()
        self._live = Live(self, console=self._console, auto_refresh=False, vertical_overflow="visible")
        self._redrawn_at = 0.0
        self._line: list[tuple[str, str]] = []  # The last line so far: pieces of text and their styles.
        self._is_finished = False

    def __enter__(self) -> PrintedAnswer:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_finished = True
        self._live.stop()

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if time.perf_counter() - self._redrawn_at >= SECONDS_BETWEEN_REDRAWS:
            self._live.refresh()
            self._redrawn_at = time.perf_counter()

    def on_text(self, text: str, drafted: bool) -> None:
        style = DRAFTED_STYLE if drafted else OWN_STYLE
        *ends, rest = text.split("\n")
        for end in ends:
            line, self._line = Text.assemble(*self._line, (end, style)), []
            self._console.print(line)
        if rest:
            self._line.append((rest, style))

    def end(self) -> None:
        if text := self._pending_text():
            self.on_text(text, drafted=False)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        status = Text(self.status(), style="dim").wrap(console, options.max_width)
        if line := self._line:
            wrapped = Text.assemble(*line).wrap(console, options.max_width)
            # A line that fills more than the screen cannot be redrawn: its end is shown, and all of it when it is complete.
            room = max(console.height - len(status) - 1, 1)
            yield from wrapped if self._is_finished else wrapped[-room:]
        yield from status
