"""Options of a command from a YAML or JSON file, checked like those on the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import typer

# The key in the context for values of a file that are not options of the command.
_OTHERS = "dspark_hf_cli.others"


def from_file(context: typer.Context, file: Path | None) -> Path | None:
    """
    Callback of the option that names a file: the values in the file become the defaults of the command's options. Values with
    other names are kept for [`other_settings`].

    Raises:
        typer.BadParameter: when the file cannot be read, or a value is not one that the option takes.
    """
    if file is None or context.resilient_parsing:
        return file
    options = {name: option for option in context.command.params for name in names_of(option)}
    defaults: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in read_file(file).items():
        option = options.get(name.replace("-", "_"))
        if option is None:
            others[name.replace("-", "_")] = value
        elif value is not None and option.name is not None:
            defaults[option.name] = _checked(context, option, value, file)
    context.default_map = {**(context.default_map or {}), **defaults}
    context.meta[_OTHERS] = others
    return file


def names_of(option: Any) -> list[str]:
    """The names by which a file can set an option: the name of its parameter, and its long spellings without dashes."""
    spelled = [text.removeprefix("--").replace("-", "_") for text in option.opts if text.startswith("--")]
    return [option.name, *spelled]


def read_file(file: Path) -> dict[str, Any]:
    """
    The values of an option file.

    Raises:
        typer.BadParameter: when the file does not exist, or does not contain values by name.
    """
    import yaml  # type: ignore[import-untyped]  # huggingface-hub and transformers need it too

    try:
        text = file.read_text(encoding="utf-8")
        values = json.loads(text) if file.suffix == ".json" else yaml.safe_load(text) or {}
    except OSError as error:
        raise typer.BadParameter(f"'{file}' cannot be read: {error.strerror}.") from error
    except (ValueError, yaml.YAMLError) as error:
        kind = "JSON" if file.suffix == ".json" else "YAML"
        raise typer.BadParameter(f"'{file}' is not valid {kind}: {error}") from error
    if not isinstance(values, dict):
        raise typer.BadParameter(f"'{file}' holds a {type(values).__name__}; give options as `name: value`.")
    return {str(name): value for name, value in values.items()}


def _checked(context: typer.Context, option: Any, value: Any, file: Path) -> Any:
    """The value, converted and checked like one on the command line."""
    if option.multiple:
        value = [str(item) for item in (value if isinstance(value, list) else [value])]
    elif isinstance(value, list):
        value = ",".join(map(str, value))
    elif not isinstance(value, bool):
        value = str(value)
    try:
        return option.process_value(context, value)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"'{file}' sets {option.name} to {value!r}: {error.message}") from error


def other_settings(context: typer.Context) -> dict[str, Any]:
    """
    Settings that are not options: from the file and from --set NAME=VALUE, which has priority.

    Raises:
        typer.BadParameter: for one without a name.
    """
    import yaml

    settings: dict[str, Any] = dict(context.meta.get(_OTHERS, {}))
    for text in context.params.get("set") or []:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"--set {text}: write NAME=VALUE, such as --set adam_beta2=0.98.")
        try:
            settings[name.strip().replace("-", "_")] = yaml.safe_load(value)
        except yaml.YAMLError:
            settings[name.strip().replace("-", "_")] = value
    return settings


def given_options(context: typer.Context) -> dict[str, Any]:
    """The options that were given on the command line or in a file, by the names of their parameters."""
    return {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) is not None and source.name not in ("DEFAULT", "PROMPT")
    }


def command_line(context: typer.Context, given: dict[str, Any], others: dict[str, Any]) -> str:
    """The command line that repeats a run, with only the last part of local paths."""
    from dspark_hf.hub.private import public_name

    words = str(context.command_path).split()
    for option in context.command.params:
        if option.name not in given:
            continue
        value, spelled = given[option.name], max(option.opts, key=len)
        if isinstance(value, bool):
            words.append(spelled if value else max(option.secondary_opts, key=len, default=spelled))
        else:
            for item in value if isinstance(value, list) else [value]:
                words += [spelled, public_name(item)]
    for name, value in others.items():
        words += ["--set", f"{name}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)
