"""`dspark-hf convert`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from .inspect import Revision, Subfolder
from .options import Json


def convert(
    source: Annotated[str, typer.Argument(help="The drafter: a folder, a GGUF file or a repository of the Hub.")],
    destination: Annotated[Path, typer.Argument(help="A new folder.")],
    format: Annotated[
        str,
        typer.Option("--format", "-f", help="deepspec, vllm-sglang, speculators or modelopt (TensorRT-LLM)."),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            help="Its target. Named in the written file; read where the file has to hold its embedding or head (deepspec, and "
            "reduced draft vocabularies).",
        ),
    ] = None,
    revision: Revision = None,
    subfolder: Subfolder = None,
    dtype: Annotated[str, typer.Option(help="Number type to write: auto keeps the drafter's own.")] = "auto",
    json: Json = False,
) -> None:
    """
    Rewrite a drafter for other software, check the file and print how to serve it.
    """
    from dspark_hf.checkpoints import EXPORT_FORMATS, export
    from dspark_hf.drafter import Drafter

    from .loading import checked_dtype

    if format not in EXPORT_FORMATS:
        raise typer.BadParameter(f"--format {format} is none of {', '.join(EXPORT_FORMATS)}.")
    hub: dict[str, Any] = {"revision": revision, "subfolder": subfolder or ""}
    drafter = Drafter.from_pretrained(source, dtype=checked_dtype(dtype), **hub)
    bound = None
    if target is not None:
        drafter.config.target_name_or_path = target
        if drafter.lm_head is None and (format == "deepspec" or drafter.config.draft_vocab_size):
            from transformers import AutoModelForCausalLM

            bound = AutoModelForCausalLM.from_pretrained(target, dtype=drafter.dtype)
            drafter.bind(bound)
    written = export(drafter, destination, format)
    if json:
        typer.echo(json_module.dumps(vars(written) | {"path": str(written.path)}, indent=2))
    else:
        typer.echo(str(written))
