"""Ends a command on an error with one line that says what is wrong and what to do."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator

import typer

from . import exit_codes

# The base class of all errors about wrong usage; typer has no public name for it.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]

TRACEBACK_VARIABLE = "DSPARK_HF_TRACEBACK"


@contextlib.contextmanager
def ending_with_a_line() -> Iterator[None]:
    """
    Ends the program on expected errors, with one line and an exit code. Other errors are bugs of this program and keep
    their traceback.
    """
    try:
        yield
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", exit_codes.INTERRUPTED)
    except Exception as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        if (sentence := sentence_of(error)) is None:
            print(
                "This is a bug in dspark-hf, or an unexpected error. Please report it with the output of "
                "`dspark-hf env` and the lines that follow.",
                file=sys.stderr,
            )
            raise
        _end(f"error: {sentence}", getattr(error, "exit_code", exit_codes.ERROR))


def _end(line: str, code: int) -> None:
    if "tqdm" in sys.modules:
        sys.modules["tqdm"].tqdm.write(line, file=sys.stderr)  # below a progress bar that is still shown
    else:
        print(line, file=sys.stderr)
    sys.exit(code)


def sentence_of(error: Exception) -> str | None:
    """One line about an expected error; `None` for other errors."""
    text = _text_of(error)
    return None if text is None else " ".join(text.split())


def _text_of(error: Exception) -> str | None:
    if isinstance(error, UsageError):
        return _usage_text(error)
    if isinstance(error, MemoryError) or _is_out_of_memory(error):
        return (
            "The memory is full. Use smaller batches or fewer rows, shorter texts, or --dtype bfloat16. "
            f"({str(error).partition('. ')[0]})"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return _system_text(error)
    if isinstance(error, UnicodeDecodeError):
        return f"A file that should be text in UTF-8 is not: {error}."
    if isinstance(error, ValueError | OSError | ImportError) or _module_of(error) in _LIBRARIES:
        return str(error) or type(error).__name__
    return None


# Packages whose errors derive from Exception only, and concern files, networks and templates.
_LIBRARIES = ("safetensors", "safetensors_rust", "jinja2", "datasets", "httpx", "httpx2", "huggingface_hub", "pyarrow")


def _module_of(error: Exception) -> str:
    return type(error).__module__.partition(".")[0]


def _is_out_of_memory(error: Exception) -> bool:
    """Whether torch could not allocate memory; on the CPU that is a plain `RuntimeError`."""
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("out of memory", "can't allocate memory", "not enough memory")
    )


def _usage_text(error: Exception) -> str:
    """typer's message, with a reference to `--help`."""
    known = vars(error)  # typer's errors differ in which of these they have.
    context = known.get("ctx")
    has_hint = known.get("param") is not None or known.get("param_hint") is not None
    # If no parameter is concerned, typer's message begins with "Invalid value: ", which is left out.
    plain = type(error) is typer.BadParameter and not has_hint
    message = known.get("message", str(error)) if plain else error.format_message()  # type: ignore[attr-defined]
    if possibilities := known.get("possibilities"):
        message = f"{known.get('message', message)}. Did you mean {' or '.join(sorted(possibilities))}?"
    message = message.strip()
    if context is None:
        return message
    return f"{message}{'' if message.endswith(('.', '?', ')')) else '.'} See `{context.command_path} --help`."


def _system_text(error: OSError) -> str:
    """The message for an error of the operating system, by its number."""
    file = f"'{error.filename}'" if error.filename is not None else "a file"
    if error.errno == errno.ENOSPC:
        return f"The disk is full, so {file} could not be written. Free some space, or choose another folder."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"No permission for {file}: {error.strerror}. Choose another folder, or change its permissions."
    if error.errno == errno.ENOENT:
        return f"There is no file or folder {file}."
    if error.errno == errno.ENOTDIR:
        return f"{file} cannot be reached: a part of its path is a file, not a folder."
    if error.errno == errno.EISDIR:
        return f"{file} is a folder, and a file is needed."
    return f"{error.strerror}: {file}."
