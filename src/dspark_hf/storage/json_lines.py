"""A file of JSON lines that a run appends to, and that the next run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from .atomic import reason, write_text
from .single_writer import single_writer


class ResumableLines:
    """
    A file of JSON lines for one process at a time. A line is on the disk before `append` returns, and a run that is
    killed at any point loses at most the line it was writing.

    What the lines depend on is written to `<name>.origin.json` in the same folder, so that the file contains rows only. An
    existing file is only continued if it has such a note. An incomplete last line is removed first. If no line was written,
    the file is removed at the end.

    Args:
        path: The file; it and its folder are created if necessary.
        origin: What the lines depend on, such as the target and the settings, as JSON values.
        kinds: Every line is an object that has one of these fields.

    Attributes:
        written: The lines that were in the file, oldest first.

    Raises:
        ValueError: when the file was not written by this library, contains lines with another origin, is damaged before its
            last line, or is being written by another process.
    """

    def __init__(self, path: str | Path, origin: dict[str, Any], kinds: Collection[str] = ("id",)) -> None:
        self.path = Path(path)
        self.kinds = tuple(kinds)
        _check_noted(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.lock = single_writer(self.path)
        try:
            self.written, self.num_bytes = _read_lines(self.path, self.kinds)
            check_origin(self.path, origin, whole=True)
            self.file: IO[bytes] = self.path.open("ab", buffering=0)
            self.file.truncate(self.num_bytes)
            if not self.written:
                write_text(_note_of(self.path), json.dumps(origin, indent=2) + "\n")
        except BaseException:
            if not _holds_something(self.path):
                self._remove()
            self.lock.release()
            raise

    def append(self, line: dict[str, Any]) -> None:
        """
        Writes a line to the disk.

        Raises:
            ValueError: when a text in it is not valid Unicode (half a surrogate pair).
            OSError: when it could not be written, for instance because the disk is full. The lines before it are kept.
        """
        content = json.dumps(line, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
        try:
            left = memoryview(content)
            while left:
                left = left[self.file.write(left) :]
            os.fsync(self.file.fileno())
        except OSError as error:
            with suppress(OSError):
                self.file.truncate(self.num_bytes)
            raise OSError(
                f"'{self.path}' could not be continued: {reason(error)}. What is in it is kept, and the same command "
                "resumes from there."
            ) from error
        self.num_bytes += len(content)

    def close(self) -> None:
        self.file.close()
        if not self.num_bytes:
            self._remove()
        self.lock.release()

    def _remove(self) -> None:
        """Removes a file without lines, with its note and lock."""
        for file in (self.path, _note_of(self.path), Path(self.lock.lock_file)):
            file.unlink(missing_ok=True)

    def __enter__(self) -> ResumableLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_origin(path: str | Path, origin: dict[str, Any], whole: bool = False) -> None:
    """
    Refuses a file whose lines have another origin. It changes nothing, so it can be called before a model is loaded.

    Args:
        path: The file; one that does not exist or is empty is accepted.
        origin: What the new lines depend on, or the part of it that is known already.
        whole: Whether `origin` is complete, so that further names in the note count as differences.

    Raises:
        ValueError: when the file has no note of its origin, or values differ; the message lists them.
    """
    path = Path(path)
    _check_noted(path)
    if not _holds_something(path):
        return
    before = json.loads(_note_of(path).read_text(encoding="utf-8"))
    now = json.loads(json.dumps(origin))
    changed = [
        f"{name} was {before.get(name)!r}, now {now.get(name)!r}"
        for name in (before | now if whole else now)
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"'{path}' was written with other settings ({'; '.join(changed)}). Use the same settings to continue it, or "
            "choose another output."
        )


def written_lines(path: str | Path, kinds: Collection[str] = ("id",)) -> list[dict[str, Any]]:
    """The complete lines of a file, none if it does not exist; errors as in [`ResumableLines`]."""
    return _read_lines(Path(path), tuple(kinds))[0]


def _check_noted(path: Path) -> None:
    if _holds_something(path) and not _note_of(path).exists():
        raise ValueError(
            f"'{path}' is not empty and has no '{_note_of(path).name}' beside it, so it was not written by this command and "
            "nothing is added to it. Choose another output; if the file was moved here, move that file as well."
        )


def _holds_something(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _note_of(path: Path) -> Path:
    return path.with_name(path.name + ".origin.json")


def _read_lines(path: Path, kinds: tuple[str, ...]) -> tuple[list[dict[str, Any]], int]:
    """The complete lines of a file and their size in bytes; an incomplete last line is left out."""
    lines: list[dict[str, Any]] = []
    num_bytes, torn = 0, None
    if not path.exists():
        return lines, num_bytes
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if torn is not None:
                raise ValueError(
                    f"Line {torn} of '{path}' is not valid JSON, and it is not the last one. Repair or move the file."
                )
            try:
                if not raw.endswith(b"\n"):
                    raise ValueError("no line end")
                lines.append(json.loads(raw))
                num_bytes += len(raw)
            except ValueError:
                torn = number
    if not all(isinstance(line, dict) and not line.keys().isdisjoint(kinds) for line in lines):
        fields = "' or '".join(kinds)
        raise ValueError(
            f"'{path}' has lines without '{fields}', which this command did not write. Choose another output."
        )
    return lines, num_bytes
