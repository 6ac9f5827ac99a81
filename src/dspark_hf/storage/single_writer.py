"""Makes sure that only one process writes to an output."""

from __future__ import annotations

from pathlib import Path

from filelock import FileLock, Timeout


def single_writer(path: Path) -> FileLock:
    """
    Reserves a file or folder for this process, until the lock is released or the process ends.

    Args:
        path: The output; the lock is the file `<path>.lock`.

    Raises:
        ValueError: when another process has reserved it.
    """
    lock = FileLock(f"{path}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise ValueError(
            f"Another process is writing '{path}' now. Wait until it has finished, or give another output."
        ) from None
    return lock
