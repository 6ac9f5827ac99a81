"""`dspark-hf convert`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .options import MACHINE, MODELS, OUTPUT, Json, Revision, Subfolder


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            rich_help_panel=MODELS,
            help="The drafter: a folder, a GGUF file or a repository on the Hub.",
        ),
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="FOLDER", rich_help_panel=OUTPUT, help="A new folder for the files.")
    ],
    format: Annotated[
        Literal["deepspec", "vllm-sglang", "speculators", "modelopt", "deepseek-v4"],
        typer.Option(
            "--format",
            "-f",
            rich_help_panel=OUTPUT,
            help="Format to write: that of DeepSpec, one for both vLLM and SGLang, that of the speculators package, that of "
            "ModelOpt (TensorRT-LLM), or that of DeepSeek-V4's checkpoints, without the target.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="MODEL",
            rich_help_panel=MODELS,
            help="The drafter's target. Its name is written into the files. It is loaded only where the files have to hold "
            "its embedding or LM head: for the deepspec format and for reduced draft vocabularies.",
        ),
    ] = None,
    revision: Revision = None,
    subfolder: Subfolder = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MACHINE,
            help="Floating-point type to write; auto keeps that of the drafter's files.",
        ),
    ] = "auto",
    json: Json = False,
) -> None:
    """
    Write a drafter in the format of other software, check the files, and print the command that serves it.
    """
    from dspark_hf import Drafter
    from dspark_hf.checkpoints import export

    from .loading import check_dtype_and_device, load_language_model, say

    if destination.is_file() or (destination.exists() and any(destination.iterdir())):
        raise typer.BadParameter(f"'{destination}' exists already and holds something: choose a new folder.")
    hub: dict[str, Any] = {"revision": revision, "subfolder": subfolder or ""}
    say(f"Loading the drafter {source} ...")
    drafter = Drafter.from_pretrained(source, dtype=check_dtype_and_device(dtype), **hub)
    bound = None
    if target is not None:
        drafter.config.target_name_or_path = target
        if drafter.lm_head is None and (format == "deepspec" or drafter.config.draft_vocab_size):
            bound = load_language_model(target, drafter, "target")
            drafter.bind(bound)
    written = export(drafter, destination, format)
    if json:
        typer.echo(json_module.dumps(vars(written) | {"path": str(written.path)}, indent=2))
    else:
        typer.echo(str(written))
