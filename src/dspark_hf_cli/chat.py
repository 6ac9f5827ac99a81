"""`dspark-hf chat`."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Device, Dtype, Target, Threads

if TYPE_CHECKING:
    from .chat_session import ChatSession


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
    of the input, ends. Where input or output is not a terminal, a line of input is a turn, answers are plain text on
    standard output, and what they cost is on standard error.
    """
    from rich.console import Console

    from .chat_session import ChatSession, show_help
    from .loading import load_drafter, load_target

    model, tokenizer = load_target(target, dtype, device, threads)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    session = ChatSession(
        model, tokenizer, load_drafter(drafter, model), system, max_new_tokens, temperature, threshold, interactive
    )
    if interactive:
        show_help(Console())
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (gives `input` its editing and history)
    while (line := _read_line(interactive)) is not None and line != "/quit":
        _obey(session, line)


def _obey(session: ChatSession, line: str) -> None:
    from rich.console import Console

    from .chat_session import interruptible, show_help

    if line == "/plain":
        session.uses_drafter = not session.uses_drafter
        typer.echo(f"drafter {'on' if session.uses_drafter else 'off'}", err=True)
    elif line == "/clear":
        session.clear()
    elif line.startswith("/"):
        show_help(Console(stderr=True))
    elif line:
        with interruptible() as stop:
            session.answer(line, stop)
        if stop.is_set():
            typer.echo("(interrupted)", err=True)


def _read_line(interactive: bool) -> str | None:
    """The next line of input, `""` for one that Ctrl-C broke off, `None` at the end."""
    try:
        return input("> " if interactive else "").strip()
    except EOFError:
        if interactive:
            typer.echo()  # The shell's prompt is not to stand behind ours.
        return None
    except KeyboardInterrupt:
        if not interactive:
            raise
        typer.echo()
        return ""
