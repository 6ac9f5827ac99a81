"""The command reference, written from the commands themselves: a hook of mkdocs."""

from __future__ import annotations

from textwrap import indent
from typing import Any

import typer
from typer.cli import get_docs_for_click

from dspark_hf.training.options import train_parser
from dspark_hf_cli.app import app

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the reference where a page has its place."""
    return markdown.replace(PLACE, reference()) if PLACE in markdown else markdown


def reference() -> str:
    """A section a command, with all its options."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = typer.Context(group, info_name="dspark-hf")
    sections = {
        name: get_docs_for_click(obj=command, ctx=context, indent=1, call_prefix="dspark-hf")
        for name, command in group.commands.items()
    }
    # The options of `train` are dataclasses, which have a parser of their own.
    options = indent(train_parser().format_help(), "    ")
    sections["train"] += f'??? note "All options"\n\n    ```text\n{options}\n    ```\n'
    return "\n".join(sections.values())
