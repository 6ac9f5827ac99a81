"""One process at a time for what a run writes to."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout


def single_writer(path: Path) -> FileLock:
    """
    Reserves a file or folder for this process, until the lock is released or the process ends.

    Args:
        path: What is written to; the lock is the file `<path>.lock` beside it.

    Raises:
        ValueError: when another process has it.
    """
    lock = FileLock(f"{path}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"Another process writes '{path}' now, and two would do the same work there. Wait for it, or give another output."
        ) from None
    return lock
