"""Docstrings in the Hugging Face dialect, as mkdocstrings' Google style reads them: an extension of griffe.

- ``name (`type`, *optional*): ...`` loses its type, which the signature has.
- ``[`~module.Name`]`` becomes a link to what it names, where that is documented.
- Doctest blocks are told apart from plain Python, and lose what only doctest reads.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

TYPE = re.compile(r"^(?P<name>\s+[*\w]+(?:, [*\w]+)*) \((?=`)[^)]*(?:\([^)]*\)[^)]*)*\):", re.MULTILINE)
LINK = re.compile(r"\[`(?P<tilde>~?)(?P<name>[\w.]+)`\](?![\[(])")
DOCTEST = re.compile(r"```(?:python|py)\n(?=\s*>>>)")
SKIP = re.compile(r"\s*# doctest: .*$", re.MULTILINE)


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = SKIP.sub("", DOCTEST.sub("```pycon\n", obj.docstring.value))
        text = TYPE.sub(r"\g<name>:", text)
        obj.docstring.value = LINK.sub(lambda match: link(obj, match), text)


def link(obj: griffe.Object, match: re.Match[str]) -> str:
    """A link that is plain text where its object has no page."""
    name = match["name"]
    shown = name.rpartition(".")[2] if match["tilde"] else name
    return f'<autoref identifier="{path_of(obj, name)}" optional><code>{shown}</code></autoref>'


def path_of(obj: griffe.Object, name: str) -> str:
    """The full path of what a docstring calls `name`."""
    try:
        return obj.resolve(name)
    except griffe.NameResolutionError:
        return name if name.startswith("dspark_hf.") else f"{obj.module.path}.{name}"
