"""The commands, gathered."""

from __future__ import annotations

from typing import Annotated

import typer

from .bench import bench
from .cache_features import cache_features
from .calibrate import calibrate
from .chat import chat
from .convert import convert
from .env import env
from .inspect import inspect
from .regenerate import regenerate
from .profile import profile
from .sweep import sweep
from .train import CONTEXT as TRAIN_CONTEXT
from .train import train

app = typer.Typer(
    name="dspark-hf",
    help="DSpark speculative decoding for Hugging Face transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _show_version(value: bool) -> None:
    if value:
        from ..evaluation.environment import environment

        typer.echo(environment()["packages"]["dspark-hf"])
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """DSpark speculative decoding for Hugging Face transformers."""


app.command()(regenerate)
app.command()(cache_features)
app.command(context_settings=TRAIN_CONTEXT)(train)
app.command()(bench)
app.command()(sweep)
app.command()(chat)
app.command()(inspect)
app.command()(convert)
app.command()(profile)
app.command()(calibrate)
app.command()(env)
