"""`dspark-hf inspect`."""

from __future__ import annotations

import json as json_module
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .options import ANSWERS, MODELS, Device, Dtype, Json, Revision, Subfolder

# The prompts of the probe.
PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 120 km in 1.5 hours. What is its average speed? Think step by step.",
    "List the planets of the solar system in order, with one fact about each.",
)


def inspect(
    checkpoint: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            rich_help_panel=MODELS,
            help="The drafter: a folder, a GGUF file or a repository on the Hub.",
        ),
    ],
    target: Annotated[
        str | None,
        typer.Option(
            "--target",
            "-t",
            metavar="MODEL",
            rich_help_panel=MODELS,
            help="Also probe the drafter with its target: draft in both slot layouts, or from several choices of target layers, "
            "and see which is right.",
        ),
    ] = None,
    revision: Revision = None,
    subfolder: Subfolder = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", rich_help_panel=ANSWERS, help="Tokens that the probe decodes per prompt.")
    ] = 64,
    dtype: Dtype = "auto",
    device: Device = None,
    json: Json = False,
) -> None:
    """
    Show what a drafter is: file format, layers, slots, heads, anything unusual, and which engines can serve it.

    Weights are not read: from a repository on the Hub, only the configuration and the headers of the files are downloaded.
    """
    from dspark_hf.checkpoints import inspect_checkpoint
    from dspark_hf.kinds.probes import probe_of
    from dspark_hf.registry import drafter_class

    hub: dict[str, Any] = {"revision": revision, "subfolder": subfolder or ""}
    found = inspect_checkpoint(checkpoint, **hub)
    probe = None
    if target is not None and found.config is not None:
        run = probe_of(drafter_class(found.config))
        if run is None:
            raise typer.BadParameter(
                f"--target has nothing to find out about {found.config.method} drafters: leave it out."
            )
        probe = _probe(run, checkpoint, target, hub, max_new_tokens, dtype, device)
    if json:
        shown: dict[str, Any] = found.to_dict()
        if probe is not None:
            shown["probe"] = probe.to_dict()
        typer.echo(json_module.dumps(shown, indent=2, default=str))
        return
    typer.echo(str(found))
    if probe is not None:
        typer.echo(f"  probe: {probe}")


def _probe(
    run: Callable[..., Any],
    checkpoint: str,
    target_name: str,
    hub: dict[str, Any],
    max_new_tokens: int,
    dtype: str,
    device: str | None,
) -> Any:
    from dspark_hf import Drafter

    from .loading import say, target_from_options

    say(f"Loading the drafter {checkpoint} ...")
    drafter = Drafter.from_pretrained(checkpoint, dtype="auto", **hub).eval()
    target, tokenizer = target_from_options(target_name, dtype, device)
    drafter = drafter.to(device=target.device, dtype=target.dtype)
    prompts = []
    encoded: Any
    for text in PROMPTS:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": text}]
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = tokenizer(text, return_tensors="pt")
        prompts.append(encoded["input_ids"])
    return run(drafter, target, prompts, max_new_tokens)
