"""A file of rows that a run appends to, and that the next run goes on with."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import IO, Any

from .single_writer import single_writer

logger = logging.getLogger(__name__)


class ResumableLines:
    """An append-only JSON-lines file that survives a kill at any point, for one process at a time.

    A file with something in it is ours where a note of its origin is beside it, `<name>.origin.json`. Its torn last line
    (without a line end, or not JSON) is then dropped; `written` holds the rows that are there.

    Args:
        path: the file, created with its folder where missing.
        origin: what made the rows (target, settings).

    Raises:
        ValueError: the file is not one of ours, its rows have another origin, or another process writes it.
    """

    def __init__(self, path: str | Path, origin: dict[str, Any]) -> None:
        self.path = Path(path)
        self.note = self.path.with_name(self.path.name + ".origin.json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.check_ours()
        self.lock = single_writer(self.path)
        self.file: IO[bytes] = self.path.open("a+b")
        try:
            self.written = self.recover()
            self.check_origin(origin)
        except ValueError:
            self.close()
            raise

    def check_ours(self) -> None:
        if self.path.exists() and self.path.stat().st_size and not self.note.exists():
            raise ValueError(
                f"'{self.path}' is not empty and has no '{self.note.name}' beside it, so it was not begun here and nothing "
                "is written to it. Give another output file, or bring the note along where the file was moved."
            )

    def check_origin(self, origin: dict[str, Any]) -> None:
        """Refuse to mix rows of two origins in one file; note the origin where there are no rows yet."""
        if not self.written:
            self.note.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            return
        before = json.loads(self.note.read_text(encoding="utf-8"))
        changed = [
            f"{name} was {before.get(name)!r}, now {origin.get(name)!r}"
            for name in before | origin
            if before.get(name) != origin.get(name)
        ]
        if changed:
            raise ValueError(
                f"'{self.path}' holds rows made with other settings ({'; '.join(changed)}). "
                "Go on with the same settings, or write to another file."
            )

    def recover(self) -> list[dict[str, Any]]:
        self.file.seek(0)
        rows, good_bytes, torn = [], 0, None
        for number, line in enumerate(self.file, start=1):
            if torn is not None:
                raise ValueError(
                    f"Line {torn} of '{self.path}' is not JSON, so nothing can be appended safely. Mend or move the file."
                )
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no line end")
                rows.append(json.loads(line))
                good_bytes += len(line)
            except ValueError:
                torn = number
        if not all(isinstance(row, dict) and "id" in row for row in rows):
            raise ValueError(
                f"'{self.path}' has rows without 'id', which were not written here. Give another output file."
            )
        self.file.truncate(good_bytes)
        self.file.seek(0, os.SEEK_END)
        return rows

    def append(self, row: dict[str, Any]) -> bool:
        """Write a row to the disk; False, with a warning, where its text is not Unicode (half a surrogate pair)."""
        try:
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            logger.warning("Prompt %d is left out: its text cannot be written (%s).", row["id"], error)
            return False
        self.file.write(line)
        self.file.flush()
        os.fsync(self.file.fileno())
        return True

    def close(self) -> None:
        self.file.close()
        self.lock.release()

    def __enter__(self) -> ResumableLines:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
