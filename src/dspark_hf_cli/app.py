"""The commands, gathered."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from .bench import bench
from .cache_features import cache_features
from .calibrate import calibrate
from .chat import chat
from .convert import convert
from .env import env
from .inspect import inspect
from .profile import profile
from .regenerate import regenerate
from .serve_bench import serve_bench
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
        typer.echo(_version())
        raise typer.Exit


def _version() -> str:
    """The installed version, without importing the package."""
    try:
        return importlib.metadata.version("dspark-hf")
    except importlib.metadata.PackageNotFoundError:  # A checkout that is not installed.
        import dspark_hf

        return dspark_hf.__version__


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """DSpark speculative decoding for Hugging Face transformers."""


TRAINING, MEASURING, USING, FILES = "Training", "Measuring", "Using", "Files and reports"
app.command(rich_help_panel=TRAINING)(regenerate)
app.command(rich_help_panel=TRAINING)(cache_features)
app.command(rich_help_panel=TRAINING, context_settings=TRAIN_CONTEXT)(train)
app.command(rich_help_panel=TRAINING)(calibrate)
app.command(rich_help_panel=MEASURING)(bench)
app.command(rich_help_panel=MEASURING)(sweep)
app.command(rich_help_panel=MEASURING)(serve_bench)
app.command(rich_help_panel=MEASURING)(profile)
app.command(rich_help_panel=USING)(chat)
app.command(rich_help_panel=FILES)(inspect)
app.command(rich_help_panel=FILES)(convert)
app.command(rich_help_panel=FILES)(env)
