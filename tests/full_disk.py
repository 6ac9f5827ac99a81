"""A disk with no room, without needing one: files cannot grow beyond a limit that the system enforces."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(largest_file: int = 0) -> Iterator[None]:
    """
    Writing beyond `largest_file` bytes of any file fails with an `OSError` in here, in Python and in compiled code alike.
    What is printed goes nowhere, since pytest collects it in files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
