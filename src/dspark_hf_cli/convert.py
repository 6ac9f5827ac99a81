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
        Literal["deepspec", "vllm-sglang", "speculators", "modelopt", "deepseek-v4", "dspark-hf"],
        typer.Option(
            "--format",
            "-f",
            rich_help_panel=OUTPUT,
            help="Format to write: that of DeepSpec, one for both vLLM and SGLang, that of the speculators package, that of "
            "ModelOpt (TensorRT-LLM), that of DeepSeek-V4's checkpoints, without the target, or this library's, which holds "
            "every drafter, with quantized weights unpacked.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="MODEL",
            rich_help_panel=MODELS,
            help="The drafter's target. Its name is written into the files, and so are the layers that feed the drafter, where "
            "they follow from the target's depth. It is loaded only where the files have to hold its embedding or LM head: for "
            "the deepspec format and for reduced draft vocabularies.",
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

    A drafter that a format cannot hold, or that no engine can serve, is refused with the reasons.
    """
    from dspark_hf import Drafter
    from dspark_hf.checkpoints import export
    from dspark_hf.loading import load_target_config

    from .loading import check_dtype_and_device, load_language_model, say

    if destination.is_file() or (destination.exists() and any(destination.iterdir())):
        raise typer.BadParameter(f"'{destination}' exists already and holds something: choose a new folder.")
    hub: dict[str, Any] = {"revision": revision, "subfolder": subfolder or ""}
    say(f"Loading the drafter {source} ...")
    drafter = Drafter.from_pretrained(source, dtype=check_dtype_and_device(dtype), **hub)
    bound = None
    if target is not None:
        drafter.config.target_name_or_path = target
        if not drafter.config.target_layer_ids:
            drafter.config.settle_taps(load_target_config(target).get_text_config(decoder=True).num_hidden_layers)
        if drafter.lm_head is None and (format == "deepspec" or drafter.config.draft_vocab_size):
            bound = load_language_model(target, drafter, "target")
            drafter.bind(bound)
    if format == "dspark-hf":
        drafter.save_pretrained(destination)
        typer.echo(json_module.dumps({"path": str(destination), "format": format}) if json else f"Wrote {destination}.")
        return
    written = export(drafter, destination, format)
    if json:
        typer.echo(json_module.dumps(vars(written) | {"path": str(written.path)}, indent=2))
    else:
        typer.echo(str(written))
