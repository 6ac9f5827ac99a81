"""
The `dspark-hf` command: one file per command.

It is a separate package, because importing `dspark_hf` imports torch and transformers, which takes seconds. Files here import
such packages only inside the functions that need them, so that `--help` and `--version` answer immediately.
"""

from __future__ import annotations

import sys

from . import exit_codes


def main() -> None:
    """
    Runs the command line.

    Exits with 0 when all went well, 1 on an error, 2 on wrong usage, 3 when `bench` found greedy answers that differ from
    those of plain `generate`, 130 on an interrupt. An error is one line on standard error; `DSPARK_HF_TRACEBACK=1` shows
    where it comes from.
    """
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"error: The command line needs {error.name}: pip install 'dspark-hf[cli]'.", file=sys.stderr)
        sys.exit(exit_codes.ERROR)
    from .app import app
    from .errors import ending_with_a_line

    with ending_with_a_line():
        code = app(prog_name="dspark-hf", standalone_mode=False) or 0
        if code == exit_codes.INTERRUPTED:  # which is what typer makes of Ctrl-C
            raise KeyboardInterrupt
        sys.exit(code)
