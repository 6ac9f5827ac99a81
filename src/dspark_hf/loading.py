"""Loads targets by name, with one-sentence errors for a wrong name, dtype or device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)

from .checkpoints.places import reading
from .checkpoints.reading import is_drafter
from .number_types import floating_dtype
from .transformers_names import GenerativeModel


def load_target(
    name: str, dtype: str | torch.dtype = "auto", device: str | None = None, **kwargs: Any
) -> tuple[GenerativeModel, PreTrainedTokenizerBase]:
    """
    Loads a target and its tokenizer, ready to generate.

    Args:
        name: Folder or model on the Hub.
        dtype, device, kwargs: As in [`load_language_model`].

    Raises:
        ValueError, OSError: as [`load_language_model`] and [`load_tokenizer`] do.
    """
    check_is_target(name, **kwargs)
    tokenizer = load_tokenizer(name)
    return load_language_model(name, dtype, device, **kwargs), tokenizer


def load_language_model(
    name: str, dtype: str | torch.dtype = "auto", device: str | None = None, **kwargs: Any
) -> GenerativeModel:
    """
    Loads a language model for inference.

    Args:
        name: Folder or model on the Hub.
        dtype: Floating-point type; `"auto"` takes that of the files.
        device: Where to put the model; `None` leaves it where `from_pretrained` puts it.
        kwargs: Further arguments of `AutoModelForCausalLM.from_pretrained`.

    Raises:
        ValueError: when `name` is a drafter or another model that is not a language model, or `dtype` or `device` does not
            exist.
        OSError: when there is no such model, the Hub cannot be reached, or files are damaged.
    """
    if isinstance(dtype, str) and dtype != "auto":
        dtype = floating_dtype(dtype, "dtype")
    if device is not None:
        check_device(device)
    check_is_target(name, **kwargs)
    with reading(name, kwargs.get("revision")):
        try:
            model: GenerativeModel = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **kwargs)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):  # followed by a list of all classes
                raise
            raise ValueError(f"'{name}' is not a language model, so it cannot be a target.") from error
    if device is not None:
        model.to(device)  # type: ignore[arg-type]  # Declared without `self`.
    return model.eval()


def check_is_target(name: str, **kwargs: Any) -> None:
    """
    Checks that a name is that of a target, by reading the configuration alone.

    Raises:
        ValueError: when it is the configuration of a drafter.
        OSError: when there is no configuration.
    """
    with reading(name, kwargs.get("revision")):
        raw, _ = PreTrainedConfig.get_config_dict(name, **kwargs)
    if not raw:
        raise OSError(f"'{name}' has no config.json, so it is not a model. Give the folder that holds one.")
    if is_drafter(raw):
        trained_for = raw.get("target_name_or_path")
        raise ValueError(
            f"'{name}' is a drafter, not a target"
            + (f": it was trained for '{trained_for}'." if trained_for else ". Give the model that it drafts for.")
        )


def load_target_config(name: str) -> PreTrainedConfig:
    """
    The configuration of a target, without reading its weights.

    Raises:
        ValueError, OSError: as [`check_is_target`] does.
    """
    check_is_target(name)
    with reading(name):
        return AutoConfig.from_pretrained(name)


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """
    Raises:
        ValueError: when the model has no tokenizer that transformers can load.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        # For some model families, transformers makes an empty tokenizer when the file is missing.
        said = "" if set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens) else "it has no tokens"
    except (ValueError, OSError, ImportError) as error:
        said = str(error).strip().partition("\n")[0].rstrip(":. ")
    if said:
        raise ValueError(
            f"The tokenizer of '{name}' cannot be loaded ({said}). It has to be in the same folder or repository as the "
            "model: tokenizer.save_pretrained(...) puts it there."
        )
    return tokenizer


def check_device(device: str) -> None:
    """
    Raises:
        ValueError: for a device that does not exist on this machine.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        available = (
            ["cpu"] if kind is None else ["cpu", *(f"{kind.type}:{i}" for i in range(torch.accelerator.device_count()))]
        )
        raise ValueError(
            f"There is no device {device!r} here; torch {torch.__version__} can use {', '.join(available)}."
        ) from error


def default_device() -> str:
    """The accelerator of this machine, or `"cpu"`."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if kind is None else kind.type
