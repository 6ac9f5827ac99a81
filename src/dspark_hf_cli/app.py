"""The command line with all commands."""

from __future__ import annotations

import importlib.metadata
from typing import Annotated

import typer

from . import exit_codes
from .adapt import adapt
from .bench import bench
from .cache_features import cache_features
from .calibrate import calibrate
from .chat import chat
from .convert import convert
from .env import env
from .inspect import inspect
from .layout import Command, Group
from .profile import profile
from .regenerate import regenerate
from .serve_bench import serve_bench
from .sweep import sweep
from .train import train


def with_dashes(name: str) -> str:
    """Normalises options, commands and choices, so that `--max_new_tokens` means `--max-new-tokens`."""
    return name.replace("_", "-")


app = typer.Typer(
    name="dspark-hf",
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": with_dashes},
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


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Speculative decoding with DSpark drafters for Hugging Face transformers."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(exit_codes.USAGE)


USING, TRAINING, MEASURING, FILES = "Use a drafter", "Make a drafter", "Measure", "Files and reports"
app.command(cls=Command, rich_help_panel=USING)(chat)
app.command(cls=Command, rich_help_panel=TRAINING)(regenerate)
app.command(cls=Command, rich_help_panel=TRAINING)(cache_features)
app.command(cls=Command, rich_help_panel=TRAINING)(train)
app.command(cls=Command, rich_help_panel=TRAINING)(adapt)
app.command(cls=Command, rich_help_panel=TRAINING)(calibrate)
app.command(cls=Command, rich_help_panel=MEASURING)(bench)
app.command(cls=Command, rich_help_panel=MEASURING)(serve_bench)
app.command(cls=Command, rich_help_panel=MEASURING)(sweep)
app.command(cls=Command, rich_help_panel=MEASURING)(profile)
app.command(cls=Command, rich_help_panel=FILES)(inspect)
app.command(cls=Command, rich_help_panel=FILES)(convert)
app.command(cls=Command, rich_help_panel=FILES)(env)
