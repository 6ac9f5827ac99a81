"""Removes private information from what is published: access tokens and local paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

# Access tokens of the Hub, by their form or by the option before them.
_SECRET = re.compile(r"hf_[A-Za-z0-9]{8,}|(?<=hub[_-]token[ =])\S+|(?<=--token[ =])\S+")
_SECRET_NAMES = ("token", "hub_token", "push_to_hub_token")


def public_name(value: Any) -> str:
    """The text of a value; only the last part of a path that is absolute or exists here."""
    text = str(value)
    is_path = isinstance(value, Path) or Path(text).is_absolute() or Path(text).exists()
    return Path(text).name or text if is_path and text else text


def without_secrets(value: Any) -> Any:
    """A JSON value without access tokens."""
    if isinstance(value, dict):
        return {name: without_secrets(item) for name, item in value.items() if name not in _SECRET_NAMES}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return _SECRET.sub("***", value) if isinstance(value, str) else value


def without_local_paths(value: Any) -> Any:
    """A JSON value in which each text that is a local path, and each such name, is only the last part of it."""
    if isinstance(value, dict):
        return {public_name(name): without_local_paths(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_local_paths(item) for item in value]
    return public_name(value) if isinstance(value, str) else value
