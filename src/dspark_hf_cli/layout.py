"""The layout of `--help`: plain text, options in groups, and descriptions that are readable with 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from typer.core import TyperCommand, TyperGroup

# If the name and value of an option are longer than this, its description starts on the next line.
NAME_WIDTH = 26
INDENT, GAP = "  ", "  "

OTHER_OPTIONS = "Options"
OTHER_COMMANDS = "Commands"


class Command(TyperCommand):
    """A command whose help shows its options by their `rich_help_panel`, in the order in which the panels are first used."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        parameters: Any = self.get_params(ctx)
        shown = [parameter for parameter in parameters if not parameter.hidden]
        write_groups(
            formatter,
            (
                (panel_of(parameter, OTHER_OPTIONS), name_of(parameter, ctx), description_of(parameter))
                for parameter in shown
            ),
        )


class Group(TyperGroup):
    """A group whose help shows its commands by their `rich_help_panel`."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        self.format_commands(ctx, formatter)
        rows = [(OTHER_OPTIONS, name_of(option, ctx), description_of(option)) for option in self.get_params(ctx)]
        write_groups(formatter, rows)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [self.get_command(ctx, name) for name in self.list_commands(ctx)]
        write_groups(
            formatter,
            (
                (panel_of(command, OTHER_COMMANDS), str(command.name), summary_of(command))
                for command in commands
                if command is not None and not command.hidden
            ),
        )


def panel_of(thing: Any, default: str) -> str:
    """The group that an option or a command belongs to."""
    return getattr(thing, "rich_help_panel", None) or default


def summary_of(command: Any) -> str:
    """The first paragraph of a command's help."""
    return (command.help or "").partition("\n\n")[0]


def name_of(parameter: Any, context: Any) -> str:
    """All spellings of an option with the name of its value; the name of an argument."""
    if parameter.param_type_name == "argument" and parameter.metavar:
        return str(parameter.metavar)
    return str(parameter.get_help_record(context)[0]).replace(" / ", ", ")


def description_of(parameter: Any) -> str:
    """The help text of an option, with its default."""
    notes = []
    if (variable := parameter.envvar) is not None:
        notes.append(f"environment variable {variable}")
    if parameter.required:
        notes.append("required")
    elif (default := default_of(parameter)) is not None:
        notes.append(f"default: {default}")
    return f"{parameter.help or ''} [{'; '.join(notes)}]" if notes else parameter.help or ""


def default_of(parameter: Any) -> str | None:
    """The default of an option as one would type it; `None` if it is off or absent by default."""
    default = parameter.default
    if isinstance(default, bool):
        if not parameter.secondary_opts:
            return None
        return str((parameter.opts if default else parameter.secondary_opts)[0])
    return str(default) if isinstance(default, int | float | str | PurePath) else None


def write_groups(formatter: Any, rows: Iterable[tuple[str, str, str]]) -> None:
    """Writes rows of (group, name, description), one section per group."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for group, name, description in rows:
        groups.setdefault(group, []).append((name, description))
    # Options without a group, such as --help, come last.
    for group in sorted(groups, key=lambda name: name in (OTHER_OPTIONS, OTHER_COMMANDS)):
        formatter.write(f"\n{group}:\n")
        for name, description in groups[group]:
            formatter.write(entry(name, description, formatter.width))


def entry(name: str, description: str, width: int) -> str:
    """One name and its description, wrapped between words to lines of `width`."""
    margin = " " * (len(INDENT) + NAME_WIDTH + len(GAP))
    lines = textwrap.wrap(" ".join(description.split()), max(width - len(margin), 30), break_on_hyphens=False)
    first = f"{INDENT}{name:{NAME_WIDTH}}{GAP}"
    if len(name) <= NAME_WIDTH and lines:
        first += lines.pop(0)
    return "\n".join([first.rstrip(), *(margin + line for line in lines)]) + "\n"
