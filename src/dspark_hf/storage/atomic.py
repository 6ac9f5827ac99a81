"""Files that are written completely or not at all.

Everything this library writes goes to a temporary file or folder next to its destination first, and is moved there once it
is complete and on the disk. After a full disk, an error or an interruption, the destination is unchanged.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

_SYSTEM_ERROR = re.compile(r"I/O error: (.+) \(os error \d+\)")

PARTIAL = ".partial"  # The suffix of files that are still being written.


class WriteError(OSError):
    """
    Raised when a file could not be written.

    Args:
        path: The file, or the folder of several files.
        reason: Why, in a few words.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        super().__init__(f"'{path}' could not be written: {reason}. What was there before is unchanged.")
        self.reason = reason


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Writes a whole text file in UTF-8; errors as in [`whole_file`]."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Writes a whole file; errors as in [`whole_file`]."""
    with whole_file(path) as part:
        part.write_bytes(content)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Gives a temporary path to write to. The file written there replaces `path` when the block ends without an error. Links are
    followed, and a device such as `/dev/stdout` is written to directly.

    Args:
        path: The destination. Its folder has to exist.

    Raises:
        WriteError: when it cannot be written. What was there before is unchanged.
    """
    path = Path(path)
    if path.exists() and not path.is_file():  # A device. A folder fails when it is opened.
        with clear_errors(path):
            yield path
        return
    real = path.resolve()
    part = real.with_name(real.name + PARTIAL)
    try:
        with clear_errors(path):
            yield part
            if real.exists():
                shutil.copymode(real, part)
            _synchronize(part)
            os.replace(part, real)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def whole_files(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """
    Gives a temporary folder inside `folder`, for several files that belong together. They are moved to `folder` when the block
    ends without an error, `config.json` last. Other files in `folder` stay.

    Args:
        folder: The destination, created if it does not exist.

    Raises:
        WriteError: when they cannot be written. What was there before is unchanged, and a folder that did not exist is not
            left behind.
    """
    folder = Path(folder)
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    part = folder / PARTIAL
    try:
        with clear_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(part, ignore_errors=True)  # A run that was killed may have left one.
            part.mkdir()
            yield part
            _move(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        for place in missing:
            with suppress(OSError):
                place.rmdir()
        raise


@contextmanager
def clear_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of writing `path` into a [`WriteError`]."""
    try:
        yield
    except Exception as error:
        if not is_write_error(error):
            raise
        raise WriteError(path, reason(error)) from error


def is_write_error(error: Exception) -> bool:
    """Whether an error means that writing a file failed: Python's error, safetensors', or that of `torch.save`."""
    return isinstance(error, (OSError, SafetensorError)) or _is_of_torch_save(error)


def reason(error: Exception) -> str:
    """The reason in an error message, without error number and file name."""
    if isinstance(error, WriteError):
        return error.reason
    if _is_of_torch_save(error):
        return "PyTorch could not write the whole file; the disk may be full"
    of_python = error.strerror if isinstance(error, OSError) else None
    said = str(of_python or str(error) or type(error).__name__)
    if of_system := _SYSTEM_ERROR.search(said):  # safetensors includes the operating system's message in its own.
        said = of_system[1]
    return said.rstrip(".")


def _is_of_torch_save(error: Exception) -> bool:
    # Its message contains a position in the file, but no reason.
    return isinstance(error, RuntimeError) and any(
        text in str(error) for text in ("inline_container", "iostream error")
    )


def _move(part: Path, folder: Path) -> None:
    """Moves all files below `part` to the same place below `folder`."""
    files = sorted(file for file in part.rglob("*") if not file.is_dir())
    for file in files:
        _synchronize(file)
    for file in sorted(files, key=lambda file: file.name == "config.json"):
        destination = folder / file.relative_to(part)
        destination.parent.mkdir(parents=True, exist_ok=True)
        os.replace(file, destination)
    shutil.rmtree(part)


def _synchronize(file: Path) -> None:
    """Waits until a file is on the disk. Some file systems only report then that they are full."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
