"""`dspark-hf inspect`."""

from __future__ import annotations

import json as json_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import ANSWERS, MODELS, Device, Dtype, Json, Revision, Subfolder

if TYPE_CHECKING:
    from dspark_hf.kinds.dspark.layout_probe import LayoutProbe

# The prompts that the probe lets the target answer.
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
            help="Also probe the drafter with its target: draft in both slot layouts and see which one is right.",
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

    Weights are not read; of a repository on the Hub only the configuration and the headers of the files are downloaded.
    """
    from dspark_hf.checkpoints import inspect_checkpoint

    hub: dict[str, Any] = {"revision": revision, "subfolder": subfolder or ""}
    found = inspect_checkpoint(checkpoint, **hub)
    probe = None
    if target is not None and found.config is not None:
        if not found.config.has_slot_layouts:
            raise typer.BadParameter(
                f"--target tells the two slot layouts of a block apart, and {found.config.method} drafters have no block: "
                "leave it out."
            )
        probe = _probe(checkpoint, target, hub, max_new_tokens, dtype, device)
    if json:
        shown: dict[str, Any] = found.to_dict()
        if probe is not None:
            shown["probe"] = {
                "declared": probe.declared,
                "accepted_drafts": {str(layout): mean for layout, mean in probe.acceptance.items()},
                "standard_error": probe.standard_error,
                "num_blocks": probe.num_blocks,
                "is_mislabelled": probe.is_mislabelled,
            }
        typer.echo(json_module.dumps(shown, indent=2, default=str))
        return
    typer.echo(str(found))
    if probe is not None:
        typer.echo(f"  probe: {probe}")


def _probe(
    checkpoint: str, target_name: str, hub: dict[str, Any], max_new_tokens: int, dtype: str, device: str | None
) -> LayoutProbe:
    from dspark_hf.kinds.dspark.layout_probe import probe_layout
    from dspark_hf.kinds.dspark.modeling_dspark import DSparkDrafter

    from .loading import load_target, say

    say(f"Loading the drafter {checkpoint} ...")
    drafter = DSparkDrafter.from_pretrained(checkpoint, dtype="auto", **hub).eval()
    target, tokenizer = load_target(target_name, dtype, device)
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
    return probe_layout(drafter, target, prompts, max_new_tokens)
