"""`dspark-hf chat`."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Device, Dtype, Target, Threads

if TYPE_CHECKING:
    from ..generation import SpeculationStats

HELP = "/plain switches the drafter off and on, /clear starts anew, /quit ends."


def chat(
    target: Target,
    drafter: Annotated[str, typer.Option("--drafter", "-d", help="The drafter: a folder or a model of the Hub.")],
    system: Annotated[str | None, typer.Option(help="What stands before the first turn.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 decodes greedily.")] = 0.0,
    threshold: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Drafts end before the first slot less confident than this.")
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """
    Chat with the target in the terminal. Drafted tokens are tinted.

    `/plain` switches the drafter off and on, so that the difference can be felt; `/clear` starts anew; `/quit`, or the end
    of the input, ends.
    """
    from .loading import load_drafter, load_target

    model, tokenizer = load_target(target, dtype, device, threads)
    session = ChatSession(
        model, tokenizer, load_drafter(drafter, model), system, max_new_tokens, temperature, threshold
    )
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    if interactive:
        typer.echo(HELP)
    while (line := _read_line(interactive)) is not None:
        if line == "/quit":
            break
        if line == "/plain":
            session.uses_drafter = not session.uses_drafter
            typer.echo(f"drafter {'on' if session.uses_drafter else 'off'}", err=True)
        elif line == "/clear":
            session.clear()
        elif line.startswith("/"):
            typer.echo(HELP, err=True)
        elif line:
            try:
                session.answer(line, live=interactive)
            except KeyboardInterrupt:
                # What was answered so far is not kept: the cache may be in the middle of it.
                session.clear()
                typer.echo("\ninterrupted; the conversation starts anew", err=True)


def _read_line(interactive: bool) -> str | None:
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        return None


class ChatSession:
    """
    A conversation and how it is answered.

    Args:
        target, tokenizer, drafter: The models.
        system: What stands before the first turn.
        max_new_tokens, temperature, threshold: As the options.
    """

    def __init__(
        self,
        target: Any,
        tokenizer: Any,
        drafter: Any,
        system: str | None,
        max_new_tokens: int,
        temperature: float,
        threshold: float | None,
    ):
        from ..evaluation import BenchSettings

        self.target, self.tokenizer, self.drafter = target, tokenizer, drafter
        self.uses_drafter = True
        self._system = system
        self._arguments = BenchSettings(max_new_tokens, temperature).arguments()
        self._threshold = threshold
        self.clear()

    def clear(self) -> None:
        """Forgets the conversation."""
        from ..evaluation import Conversation

        self._conversation = Conversation(self.tokenizer, self._system)
        self._cache: Any = None

    def answer(self, text: str, live: bool) -> str:
        """
        Streams the answer to one turn to standard output, and what it cost to standard error.

        Args:
            text: What the user says.
            live: Whether this is a terminal, where the figures are shown while the answer grows.

        Returns:
            The answer.
        """
        import torch

        from ..generation import record_speculation
        from ..generation.registration import CACHE_KEY

        input_ids = self._conversation.ask(text).to(self.target.device)
        kwargs = dict(self._arguments)
        if self.uses_drafter:
            kwargs["assistant_model"] = self.drafter
            if self._threshold is not None:
                kwargs["assistant_confidence_threshold"] = self._threshold
        if self._cache is not None:
            kwargs[CACHE_KEY] = self._cache
        with record_speculation() as stats, AnswerView(self.tokenizer, stats, live) as view:
            output = self.target.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                streamer=view.streamer,
                return_dict_in_generate=True,
                **kwargs,
            )
        self._cache = output.get(CACHE_KEY)
        return self._conversation.add_answer(output.sequences[0])


class AnswerView:
    """
    Shows an answer while it grows.

    Args:
        tokenizer: Decodes the tokens.
        stats: Filled while the answer is made.
        live: On a terminal: the end of the answer and the figures are redrawn in place. Otherwise text is just printed.
    """

    def __init__(self, tokenizer: Any, stats: SpeculationStats, live: bool):
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        self.stats = stats
        self.text = Text()
        self.num_tokens = 0
        self.streamer = _streamer_into(self, tokenizer, live)
        self._console = Console()
        self._live = Live(self, console=self._console, refresh_per_second=8, vertical_overflow="crop") if live else None
        self._is_finished = False
        self._first_at = self._started = time.perf_counter()

    def __enter__(self) -> AnswerView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_finished = True
        if self._live is not None:
            self._live.stop()
        else:
            print(self.status(), file=sys.stderr)

    def add(self, text: str, drafted: bool) -> None:
        """Takes the next piece of the answer."""
        self.text.append(text, style="dodger_blue1" if drafted else "dark_orange")

    def status(self) -> str:
        """Tokens a second, and what the drafts were good for."""
        elapsed = time.perf_counter() - self._first_at
        speed = (self.num_tokens - 1) / elapsed if self.num_tokens > 1 and elapsed > 0 else 0.0
        line = f"{self.num_tokens} tokens, {speed:.1f} tokens/s"
        if self.stats.rounds:
            line += f", {self.stats.acceptance_length:.2f} tokens a pass, {self.stats.acceptance_rate:.0%} of drafts accepted"
        return line

    def count_token(self) -> None:
        """Counts one more token; the first, which the prompt's pass gives, starts the clock."""
        self.num_tokens += 1
        if self.num_tokens == 1:
            self._first_at = time.perf_counter()

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        lines = self.text.wrap(console, options.max_width)
        # While it grows only the end of the answer fits above the figures; once finished it is printed whole.
        shown = lines if self._is_finished else lines[-max(console.height - 2, 1) :]
        yield from shown
        yield Text(self.status(), style="dim")


def _streamer_into(view: AnswerView, tokenizer: Any, live: bool) -> Any:
    from ..generation import DraftTintStreamer

    class _Streamer(DraftTintStreamer):
        def put(self, value: Any) -> None:
            if not self._expects_prompt:
                view.count_token()
            super().put(value)

        def on_text(self, text: str, drafted: bool) -> None:
            if live:
                view.add(text, drafted)
            else:
                super().on_text(text, drafted)

        def end(self) -> None:
            if not live:
                super().end()

    return _Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
