"""Reads data sets with the `datasets` library, with one-sentence errors."""

from __future__ import annotations

from typing import Any


def read_data_set(name: str, subset: str | None = None, *, split: str = "train", files: list[str] | None = None) -> Any:
    """
    The rows of a data set on the Hub, or of files in a format that `datasets` can read.

    Args:
        name: Data set on the Hub, or the format of `files`, such as `"json"`.
        subset: What `datasets` calls the configuration.
        split: The split.
        files: Paths or addresses of files.

    Raises:
        ImportError: without `datasets`.
        OSError: when the data set does not exist or the Hub cannot be reached.
        ValueError: when it has no such subset or split.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"Reading {name!r} needs datasets: pip install 'dspark-hf[train]'.") from error
    try:
        return load_dataset(name, subset, data_files=files, split=split)
    except OSError as error:
        shown = ", ".join(files) if files else name
        said = str(error).strip().partition("\n")[0].rstrip(".")
        raise OSError(
            f"The data set '{shown}' cannot be read ({said}). Check its name and the network connection, or give a JSONL file."
        ) from error
