"""`dspark-hf chat`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .options import ANSWERS, Device, Drafter, Dtype, MaxNewTokens, Target, Temperature, Threads

if TYPE_CHECKING:
    from .chat_session import ChatSession


def chat(
    target: Target,
    drafter: Drafter,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", rich_help_panel=ANSWERS, help="System message before the first turn."),
    ] = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 0.0,
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            rich_help_panel=ANSWERS,
            help="Stop drafting at the first slot whose confidence is below P. By default the drafter's setting.",
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """
    Chat with the target in the terminal; drafted tokens are shown in a different colour.

    `/plain` switches the drafter off and on, to compare the speed; `/clear` starts a new conversation; `/quit` or the end of
    the input ends the program. If input or output is not a terminal, each line of input is a turn, answers are plain text on
    standard output, and their speed is on standard error.
    """
    from .loading import attach, load_drafter, target_from_options

    loaded = load_drafter(drafter)
    model, tokenizer = target_from_options(target, dtype, device, threads)
    attach(loaded, model)

    from rich.console import Console

    from .chat_session import ChatSession, show_help

    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session = ChatSession(model, tokenizer, loaded, system, max_new_tokens, temperature, threshold, interactive)
    if interactive:
        show_help(Console())
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its editing and history)
    while (line := _read_line(interactive)) is not None and line != "/quit":
        _obey(session, line)


def _obey(session: ChatSession, line: str) -> None:
    """Executes a line of input: a command, or a turn of the conversation."""
    from rich.console import Console

    from .chat_session import interruptible, show_help, unknown_command

    if line == "/plain":
        session.uses_drafter = not session.uses_drafter
        typer.echo(f"drafter {'on' if session.uses_drafter else 'off'}", err=True)
    elif line == "/clear":
        session.clear()
    elif line == "/help":
        show_help(Console(stderr=True))
    elif line.startswith("/"):
        typer.echo(unknown_command(line), err=True)
    elif line:
        with interruptible() as stop:
            session.answer(line, stop)
        if stop.is_set():
            typer.echo("(interrupted)", err=True)


def _read_line(interactive: bool) -> str | None:
    """The next line of input, `""` for one that Ctrl-C interrupted, `None` at the end."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        if interactive:
            typer.echo()  # so that the shell's prompt starts on a new line
        return None
    except KeyboardInterrupt:
        if not interactive:
            raise
        typer.echo()
        return ""
