"""The help of every command is readable in a terminal of 80 columns, and options are the same in all commands."""

import re

import pytest

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from typer.testing import CliRunner

import dspark_hf
from dspark_hf_cli.app import app
from dspark_hf_cli.layout import entry

COMMANDS = typer.main.get_command(app).commands
WIDTH = 80


def shown(*arguments: str) -> str:
    """What a command prints in a terminal of 80 columns."""
    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": str(WIDTH), "TERMINAL_WIDTH": str(WIDTH)})
    assert result.exit_code == 0, result.output
    return result.stdout


def entries(text: str) -> dict[str, list[str]]:
    """Each option with the lines of its description."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text[re.search(r"^\S.*:$", text, re.M).start() :].splitlines():
        if match := re.match(r"  (-\S.*?)(?:   *(\S.*))?$", line):
            name = match[1]
            found[name] = [match[2]] if match[2] else []
        elif name is not None and line.startswith(" " * 20):
            found[name].append(line.strip())
        else:
            name = None
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_option_names_are_whole_and_descriptions_wide(command):
    text = shown(command, "--help")
    assert max(map(len, text.splitlines())) <= WIDTH
    found = entries(text)
    names = {spelling for name in found for spelling in re.findall(r"(?<!\S)--?[a-z0-9][a-z0-9-]*", name)}
    wanted = {spelling for option in COMMANDS[command].params for spelling in [*option.opts, *option.secondary_opts]}
    assert {spelling for spelling in wanted if spelling.startswith("-")} | {"--help"} <= names
    for option, lines in found.items():
        assert lines, f"{option} has no description"
        # A line that is followed by another one is full: only a long word can have ended it before.
        for line, following in zip(lines, lines[1:], strict=False):
            assert len(line) + 1 + len(following.split()[0]) > 45, f"{option}: {lines}"


def test_the_check_notices_narrow_columns():
    narrow = "Options:\n" + "".join(
        f"  --option-{'x' * 30}  {line}\n" for line in ("two words", "and two", "more words")
    )
    assert max(len(" ".join(lines)) for lines in entries(narrow).values()) < 45


def test_an_entry_is_wrapped_between_words():
    text = entry("--name", "a description with --long-option-names " * 4, width=78)
    assert all(len(line) <= 78 for line in text.splitlines())
    assert "--long-option-names" in text and not re.search(r"-$", text, re.M)
    long = entry("--a-name-that-is-longer-than-its-column <value>", "words " * 20, width=78).splitlines()
    assert long[0] == "  --a-name-that-is-longer-than-its-column <value>" and long[1].startswith(" " * 30 + "words")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_its_help_and_most_have_a_group(command):
    parameters = [parameter for parameter in COMMANDS[command].params if parameter.name != "help"]
    assert all(parameter.help and parameter.help.endswith(".") for parameter in parameters)
    assert all(parameter.rich_help_panel for parameter in parameters)
    text = shown(command, "--help")
    for parameter in parameters:
        assert f"\n{parameter.rich_help_panel}:\n" in text
    assert COMMANDS[command].help.splitlines()[0] in " ".join(text.split())


def test_an_option_is_spelt_alike_in_every_command():
    spellings: dict[str, set[tuple[str, ...]]] = {}
    for command in COMMANDS.values():
        for parameter in command.params:
            if long := [option for option in parameter.opts if option.startswith("--")]:
                spellings.setdefault(long[0], set()).add((*parameter.opts, *parameter.secondary_opts))
    assert {name: found for name, found in spellings.items() if len(found) > 1} == {}
    assert ("--target", "-t") in spellings["--target"]


def test_an_option_that_several_commands_have_belongs_to_one_group():
    groups: dict[str, set[str]] = {}
    for name, command in COMMANDS.items():
        for parameter in command.params:
            if name != "train":  # whose groups are finer
                groups.setdefault(parameter.opts[0], set()).add(parameter.rich_help_panel)
    assert {name: found for name, found in groups.items() if len(found) > 1} == {}


def test_the_commands_and_what_they_are_for():
    text = " ".join(shown("--help").split())
    for name, command in COMMANDS.items():
        assert f" {name} " in text and " ".join(command.help.partition("\n\n")[0].split()) in text


def test_no_command_shows_the_help_and_is_wrong_usage():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and "Usage" in result.output


def test_version():
    assert shown("--version").strip() == dspark_hf.__version__


@pytest.mark.parametrize(
    ("arguments", "suggestion"),
    [
        (["benhc"], "Did you mean 'bench'"),
        (["bench", "--taget", "x"], "--target"),
        (["train", "--learnin-rate", "1"], "--learning-rate"),
        (["train", "--lerning_rate", "1"], "--learning-rate"),
    ],
    ids=["command", "option", "option of train", "with underscores"],
)
def test_typing_errors_get_a_suggestion(arguments, suggestion):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and suggestion in result.output


def test_underscores_are_taken_for_dashes(tmp_path):
    result = CliRunner().invoke(app, ["bench", "-t", "t", "-d", "d", "--max_new_tokens", "0"])
    assert result.exit_code == 2 and "--max-new-tokens" in result.output and "equal to 2" in result.output
