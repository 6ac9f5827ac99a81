"""Loads the models and tasks that the options name, with messages about slow steps on standard error."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_hf import Drafter
    from dspark_hf.evaluation import Task
    from dspark_hf.transformers_names import GenerativeModel


def say(text: str) -> None:
    """Prints a line about the current step to standard error; with several processes, only in the first one."""
    if os.environ.get("RANK", "0") == "0":
        print(text, file=sys.stderr, flush=True)


def target_from_options(
    name: str, dtype: str, device: str | None, threads: int | None = None
) -> tuple[GenerativeModel, PreTrainedTokenizerBase]:
    """
    The target and its tokenizer, ready to generate.

    Raises:
        typer.BadParameter: for a dtype or device that does not exist.
        ValueError, OSError: as [`~dspark_hf.loading.load_target`] does.
    """
    say(f"Loading the target {name} ...")
    import torch

    from dspark_hf.loading import default_device, load_target

    if threads is not None:
        torch.set_num_threads(threads)
    device = device or default_device()
    check_dtype_and_device(dtype, device)
    return load_target(name, dtype, device)


def load_language_model(name: str, like: PreTrainedModel, role: str) -> PreTrainedModel:
    """A further language model, with the dtype and on the device of another model."""
    say(f"Loading the {role} {name} ...")
    from dspark_hf.loading import load_language_model as load

    return load(name, like.dtype, str(like.device))


def load_drafter(name: str) -> Drafter:
    """Loads a drafter. Commands do so before loading its target, which is larger, so that errors are reported sooner."""
    say(f"Loading the drafter {name} ...")
    from dspark_hf import Drafter

    return Drafter.from_pretrained(name, dtype="auto").eval()


def attach(drafter: Drafter, target: PreTrainedModel) -> Drafter:
    """
    The drafter with the dtype of its target, on its device, and with its embedding and LM head.

    Raises:
        ValueError: when the drafter does not fit the target.
    """
    drafter = drafter.to(device=target.device, dtype=target.dtype)
    drafter.bind(target)
    return drafter


def check_dtype_and_device(dtype: str, device: str = "cpu") -> Any:
    """
    The torch dtype for a name; `"auto"` stays as it is.

    Raises:
        typer.BadParameter: for a dtype or device that does not exist.
    """
    from dspark_hf.loading import check_device
    from dspark_hf.number_types import floating_dtype

    try:
        check_device(device)
        return dtype if dtype == "auto" else floating_dtype(dtype, "--dtype")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def load_tasks(names: str, max_prompts: int | None, seed: int) -> list[Task]:
    """
    The tasks of a comma-separated list.

    Raises:
        typer.BadParameter: for an unknown task, or two with the same name.
    """
    say(f"Reading the prompts of {names} ...")
    from dspark_hf.evaluation import load_task

    try:
        tasks = [load_task(name.strip(), max_prompts, seed) for name in names.split(",") if name.strip()]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found = [task.name for task in tasks]
    if not tasks:
        raise typer.BadParameter("--tasks names no task.")
    if len(set(found)) < len(found):
        raise typer.BadParameter(f"--tasks names two tasks alike: {', '.join(found)}.")
    return tasks


def labels_of(drafters: list[str]) -> list[str]:
    """Labels for drafters: the last part of the path or name; `dspark` when there is only one."""
    if len(drafters) == 1:
        return ["dspark"]
    labels = [Path(name).name for name in drafters]
    return labels if len(set(labels)) == len(labels) else drafters


def compile_models(*models: PreTrainedModel) -> None:
    """Compiles the forward passes, once for all lengths."""
    import torch

    for model in models:
        forward: Any = torch.compile(model.forward, dynamic=True)
        model.forward = forward
