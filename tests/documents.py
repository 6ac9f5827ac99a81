"""The code blocks of the documents, and what checks each kind: Python is run, commands are parsed, JSON is read.

Models of the Hub are stood in for by tiny ones: whatever is loaded as a drafter is a tiny drafter, everything else its
target. Data sets are stood in for by a few rows.
"""

from __future__ import annotations

import argparse
import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```[ ]*$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"[A-Z_]+=\S*")
# Shell commands and programs of others: nothing of ours to be wrong.
FOREIGN = {"cd", "git", "vllm", "export", "llama-server"}


class Block(NamedTuple):
    """
    Args:
        language: As the fence names it.
        code: Without the fence's indentation.
        line: Where it starts.
    """

    language: str
    code: str
    line: int


def documents() -> list[Path]:
    """Everything written for people that may hold code."""
    names = ("README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md", "examples/README.md")
    pages = [ROOT / name for name in names]
    return [*pages, *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document."""
    found = []
    for match in FENCE.finditer(text):
        indent, language, code = match.groups()
        lines = [line.removeprefix(indent) for line in code.splitlines()]
        found.append(Block(language, "\n".join(lines) + "\n", text.count("\n", 0, match.start()) + 1))
    return found


def run_document(text: str, name: str) -> None:
    """
    Checks every block of a document, the Python ones as one program.

    Raises:
        Exception: whatever a block raises; `AssertionError` for one that cannot be checked.
    """
    namespace: dict[str, object] = {"__name__": "document"}
    for block in blocks(text):
        place = f"{name}:{block.line}"
        if block.language in ("python", "py"):
            # Padded, so that a traceback has the line of the document.
            exec(compile("\n" * block.line + block.code, name, "exec"), namespace)
        elif block.language in ("bash", "sh", "console"):
            for command in commands(block.code):
                check_command(command)
        elif block.language == "json":
            json.loads(block.code)
        else:
            assert block.language == "text", f"{place}: ```{block.language} is of no kind that is checked"


# ---------------------------------------------------------------------- commands


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell block, a list of words each, without comments, prompts and leading settings."""
    unfinished = ""
    for line in code.replace("\\\n", " ").splitlines():
        unfinished += line.removeprefix("$ ") + "\n"
        try:
            words = shlex.split(unfinished, comments=True)
        except ValueError:  # Inside quotes, a command goes on in the next line.
            continue
        unfinished = ""
        while words and SETTING.fullmatch(words[0]):
            words = words[1:]
        if words:
            yield words


def check_command(words: list[str]) -> None:
    """Whether a command could be run: its program, options and arguments exist."""
    program, arguments = Path(words[0]).name, words[1:]
    if program == "dspark-hf":
        parse_ours(arguments)
    elif program in ("python", "python3"):
        check_python(arguments)
    elif program in ("torchrun", "accelerate"):
        start = next(i for i, word in enumerate(arguments) if word.endswith(".py") or word == "-m")
        check_python(arguments[start:])
    elif program == "make":
        check_make(arguments)
    elif program in ("pip", "pip3"):
        check_pip(arguments)
    elif program in ("pytest", "pre-commit"):
        pass
    else:
        assert program in FOREIGN, f"{shlex.join(words)}: no program that is known"


def parse_ours(arguments: list[str]) -> None:
    """Parses as `dspark-hf` would, and runs nothing."""
    from dspark_hf_cli import option_file
    from dspark_hf_cli.app import app

    group = typer.main.get_command(app)
    if not arguments or arguments[0] not in group.commands:
        assert arguments in (["--help"], ["--version"]), f"dspark-hf {shlex.join(arguments)}: no such command"
    elif "--help" not in arguments:
        with pytest.MonkeyPatch.context() as patch:
            # Documents name option files that need not exist; such a file gives what is required.
            patch.setattr(option_file, "read_file", lambda file: {"target": "t", "data": ["d"], "output": "o"})
            group.commands[arguments[0]].make_context(arguments[0], arguments[1:])


def check_python(arguments: list[str]) -> None:
    """A module or script that exists and whose parser, where it has one, takes the arguments."""
    if arguments[:1] == ["-m"]:
        run, name = runpy.run_module, arguments[1]
        arguments = arguments[1:]
    else:
        run, name = runpy.run_path, str(ROOT / arguments[0])
        assert Path(name).is_file(), f"{arguments[0]} does not exist"
    if name in ("pip", "pytest", "mkdocs", "venv", "sglang.launch_server"):
        return
    if name == "dspark_hf_cli":
        return parse_ours(arguments[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", arguments)
        patch.syspath_prepend(str(Path(name).parent))
        patch.setattr(argparse.ArgumentParser, "parse_args", stop_when_parsed)
        try:
            run(name, run_name="__main__")
        except Parsed:
            return
        except SystemExit as exit_:
            raise AssertionError(f"python {shlex.join(arguments)}: exit code {exit_.code}") from exit_


class Parsed(Exception):
    """The arguments are right, and the program need not run."""


_parse_args = argparse.ArgumentParser.parse_args


def stop_when_parsed(parser: argparse.ArgumentParser, *args: object) -> None:
    """In place of `parse_args`."""
    _parse_args(parser, *args)
    raise Parsed


def check_make(arguments: list[str]) -> None:
    """Whether the Makefile has the target."""
    if not (ROOT / "Makefile").is_file():
        return
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    settings = re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in arguments:
        name, is_setting, _ = word.partition("=")
        assert name in (settings if is_setting else targets[1].split()), f"make {word}: not in the Makefile"


def check_pip(arguments: list[str]) -> None:
    """Whether the extras of ours that are asked for exist."""
    assert arguments[:1] == ["install"], f"pip {shlex.join(arguments)}"
    # No TOML parser before Python 3.11; the table is simple.
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    for word in arguments[1:]:
        if word.startswith("-"):
            continue
        requirement = Requirement(re.sub(r"^\.", "dspark-hf", word))
        if requirement.name == "dspark-hf":
            assert requirement.extras <= extras, f"pip install {word}: no such extra"
