"""Checks where a model is read from, a folder or a repository on the Hub, with one-sentence errors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from safetensors import SafetensorError

# The base class of all connection errors, found through the Hub's error classes.
HTTPError = HfHubHTTPError.__bases__[0]


def check_place(name: Any) -> None:
    """
    Raises:
        OSError: when `name` is not a folder and cannot be the name of a repository either.
    """
    text = str(name)
    if not text:
        raise FileNotFoundError("The name of a model is empty: give a folder or the name of a model on the Hub.")
    path = Path(text)
    if path.is_file() and path.suffix != ".gguf":
        raise NotADirectoryError(f"'{text}' is a file: give the folder that contains it.")
    if path.exists():
        return
    try:
        validate_repo_id(text)
    except HFValidationError:
        raise FileNotFoundError(
            f"There is no folder '{text}', and a model on the Hub cannot have this name (such names are 'owner/name')."
        ) from None


@contextlib.contextmanager
def reading(name: Any, revision: str | None = None) -> Iterator[None]:
    """
    A context in which failures to read a model become one-sentence errors.

    Args:
        name: Folder or repository.
        revision: Branch, tag or commit that was asked for.

    Raises:
        OSError: when the model does not exist, the Hub refuses access or cannot be reached, or a file of weights is damaged.
            Other errors are not changed.
    """
    check_place(name)
    try:
        yield
    except Exception as error:
        sentence = _why(name, revision, error)
        if sentence is None:
            raise
        raise OSError(sentence) from error


def _why(name: Any, revision: str | None, error: BaseException) -> str | None:
    """The sentence for an error, or for the error that caused it; `None` for errors of other kinds."""
    causes = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__

    def is_caused_by(*kinds: type[BaseException]) -> bool:
        return any(isinstance(cause, kinds) for cause in causes)

    if isinstance(error, SafetensorError):
        return f"A file of weights of '{name}' is damaged ({error}). Download or save it again."
    if is_caused_by(GatedRepoError):  # Tested before RepositoryNotFoundError, which is its base class.
        return (
            f"'{name}' is gated on the Hub: ask for access on its page, https://huggingface.co/{name}, and log in with "
            "`hf auth login`."
        )
    if is_caused_by(RepositoryNotFoundError):
        return (
            f"'{name}' is neither a folder here nor a model on the Hub. If it is a private model, log in with "
            "`hf auth login`."
        )
    if is_caused_by(RevisionNotFoundError):
        return f"'{name}' has no revision '{revision}' on the Hub."
    if is_caused_by(LocalEntryNotFoundError, OfflineModeIsEnabled, HTTPError):
        if Path(str(name)).is_dir():
            return None
        if is_offline_mode():
            return (
                f"'{name}' is neither a folder here nor among the models downloaded before, and HF_HUB_OFFLINE=1 forbids "
                "downloads: unset it, or give the path of a folder."
            )
        return (
            f"'{name}' is neither a folder here nor among the models downloaded before, and the Hub cannot be reached: check "
            "the network connection, or give the path of a folder."
        )
    return None
