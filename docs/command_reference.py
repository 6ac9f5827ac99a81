"""The command reference, written from the commands themselves: a hook of mkdocs."""

from __future__ import annotations

from typing import Any

import typer
from typer.cli import get_docs_for_click

from dspark_hf_cli.app import app

PLACE = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Puts the reference where a page has its place."""
    return markdown.replace(PLACE, reference()) if PLACE in markdown else markdown


def reference() -> str:
    """One section per command, with all its options in their groups."""
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    context = typer.Context(group, info_name="dspark-hf")
    return "\n".join(
        get_docs_for_click(obj=command, ctx=context, indent=1, call_prefix="dspark-hf")
        for command in group.commands.values()
    )
