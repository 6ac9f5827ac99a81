"""
The `dspark-hf` command: one file per command.

This is a package of its own beside `dspark_hf`, because importing `dspark_hf` imports torch and transformers (that import is
what makes `generate` know drafters). Files here import such packages only inside the functions that need them, so that
`--help` and `--version` answer at once.
"""

from __future__ import annotations

import os
import sys


def main() -> None:
    """
    Runs the command line.

    Exits with 0 when all went well, 1 on an error, 2 on wrong usage, 3 when `bench` found greedy answers that are not those
    of plain `generate`, 130 on an interrupt. Errors are one line; set `DSPARK_HF_TRACEBACK=1` for where they come from.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        _fail(f"The command line needs {error.name}: pip install 'dspark-hf[cli]'.")
    from .app import app

    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except (ValueError, OSError, ImportError) as error:
        if os.environ.get("DSPARK_HF_TRACEBACK"):
            raise
        _fail(str(error))


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(1)
