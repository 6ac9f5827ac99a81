"""Models and tasks as the options name them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from dspark_hf.drafter import Drafter
    from dspark_hf.evaluation import Task


def load_target(
    name: str, dtype: str, device: str | None, threads: int | None = None
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """
    The target and its tokenizer, ready to generate.

    Raises:
        typer.BadParameter: for a number type that torch does not have.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if threads is not None:
        torch.set_num_threads(threads)
    target = AutoModelForCausalLM.from_pretrained(name, dtype=checked_dtype(dtype))
    return target.to(device or default_device()).eval(), AutoTokenizer.from_pretrained(name)


def load_drafter(name: str, target: PreTrainedModel) -> Drafter:
    """A drafter for `target`, in its number type and on its device."""
    from dspark_hf.drafter import Drafter

    drafter = Drafter.from_pretrained(name, dtype=target.dtype).to(target.device).eval()
    drafter.bind(target)
    return drafter


def load_tasks(names: str, max_prompts: int | None, seed: int) -> list[Task]:
    """
    The tasks of a comma-separated list.

    Raises:
        typer.BadParameter: for an unknown task, or two of one name.
    """
    from dspark_hf.evaluation import load_task

    try:
        tasks = [load_task(name.strip(), max_prompts, seed) for name in names.split(",") if name.strip()]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    found = [task.name for task in tasks]
    if not tasks or len(set(found)) < len(found):
        raise typer.BadParameter(f"Tasks must be given and have different names, got {found}.")
    return tasks


def labels_of(drafters: list[str]) -> list[str]:
    """What drafters are called: the last part of the path or name; `dspark` when there is only one."""
    if len(drafters) == 1:
        return ["dspark"]
    labels = [Path(name).name for name in drafters]
    return labels if len(set(labels)) == len(labels) else drafters


def compile_models(*models: PreTrainedModel) -> None:
    """Compiles the forward passes; lengths that change do not compile anew."""
    import torch

    for model in models:
        forward: Any = torch.compile(model.forward, dynamic=True)
        model.forward = forward


def checked_dtype(dtype: str) -> Any:
    """`"auto"`, or a floating-point type of torch by name."""
    from dspark_hf.number_types import floating_dtype

    try:
        return dtype if dtype == "auto" else floating_dtype(dtype, "--dtype")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def default_device() -> str:
    """An accelerator, where there is one."""
    import torch

    return torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
