"""`dspark-hf cache-features`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import (
    MACHINE,
    MODELS,
    OUTPUT,
    Data,
    Device,
    Dtype,
    MaxLength,
    NumAnchors,
    Seed,
    Split,
    Target,
    TargetLayerIds,
    Thinking,
    Threads,
    whole_numbers,
)

if TYPE_CHECKING:
    from dspark_hf.configuration_drafter import DrafterConfig
    from dspark_hf.training.features import CachePlan

ADVICE = (
    "The released drafters were trained on 1.3 million conversations, whose cache took about 38 TB. `dspark-hf train` works "
    "without a cache: give it the data itself, and it computes features as it goes."
)


def cache_features(
    target: Target,
    data: Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
            help="Folder for the cache. An interrupted run resumes from it.",
        ),
    ],
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "-d",
            metavar="MODEL",
            rich_help_panel=MODELS,
            help="Cache what this drafter needs. Without it, the options below say what to cache.",
        ),
    ] = None,
    target_layer_ids: TargetLayerIds = None,
    block_size: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", rich_help_panel=MODELS, help="Size of the drafter's blocks, for --positions anchors."
        ),
    ] = 7,
    normalizers: Annotated[
        bool,
        typer.Option(
            "--normalizers",
            rich_help_panel=OUTPUT,
            help="Also cache two numbers per token (12 bytes). Training a drafter with a reduced vocabulary then does not need "
            "the target's full logits.",
        ),
    ] = False,
    positions: Annotated[
        Literal["all", "response", "anchors"],
        typer.Option(
            rich_help_panel=OUTPUT,
            help="Where to cache the target's last hidden state: at all tokens, at responses only, or only at the blocks of "
            "anchors, which are then the same in every epoch. Losses do not change.",
        ),
    ] = "all",
    feature_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"],
        typer.Option(rich_help_panel=OUTPUT, help="Floating-point type of the cache."),
    ] = "bfloat16",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", rich_help_panel=OUTPUT, help="Print the size of the cache and stop.")
    ] = False,
    split: Split = "train",
    max_length: MaxLength = 4096,
    num_anchors: NumAnchors = 512,
    thinking: Thinking = None,
    seed: Seed = 0,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=MACHINE, help="Conversations per target pass.")
    ] = 16,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """
    Run the target over the data once and store what a drafter learns from: its hidden states.

    This pays when the data is used for several epochs or drafters and the disk is large. `dspark-hf train` does not need it.
    The size is printed before anything is written, and a disk that is too small is refused.
    """
    from dspark_hf.conversations.templates import thinking_switch
    from dspark_hf.number_types import floating_dtype
    from dspark_hf.training.data import check_source, encode_source
    from dspark_hf.training.features import CachedFeatureDataset, CachePlan, check_cache_folder
    from dspark_hf.training.features import cache_features as write_cache

    from .loading import target_from_options

    layer_ids = None
    if target_layer_ids is not None:
        layer_ids = whole_numbers(target_layer_ids, "--target-layer-ids", smallest=-1)
    for source in data:
        check_source(source, split)
    config = config_for(target, layer_ids, block_size, normalizers) if drafter is None else config_of_drafter(drafter)
    plan = CachePlan(config, floating_dtype(feature_dtype, "--feature-dtype"), positions, num_anchors, seed)
    check_cache_folder(output, plan, target)
    model, tokenizer = target_from_options(target, dtype, device, threads)
    template = thinking_switch(thinking)
    rows = [row for source in data for row in encode_source(source, model, tokenizer, max_length, split, template)]
    if not rows:
        raise ValueError(
            f"None of the conversations in {', '.join(data)} has a response of at least two tokens within --max-length."
        )
    typer.echo(size_in_words(plan, rows))
    if dry_run:
        return
    write_cache(
        model,
        config,
        rows,
        output,
        batch_size,
        dtype=plan.dtype,
        positions=positions,
        num_anchors=num_anchors,
        seed=seed,
    )
    CachedFeatureDataset(output, config).verify()
    typer.echo(f"The features of {len(rows):,} conversations are in {output}.")


def config_of_drafter(drafter: str) -> DrafterConfig:
    """The configuration of a drafter, without loading its weights."""
    from dspark_hf.checkpoints import read_checkpoint

    return read_checkpoint(drafter, None, {}).config


def config_for(target: str, target_layer_ids: list[int] | None, block_size: int, normalizers: bool) -> DrafterConfig:
    """A configuration that says what to cache for a target that has no drafter yet."""
    from dspark_hf.configuration_drafter import DrafterConfig
    from dspark_hf.loading import load_target_config

    target_config = load_target_config(target)
    vocab_size = target_config.get_text_config(decoder=True).vocab_size
    fields: dict[str, Any] = {"block_size": block_size, "draft_vocab_size": vocab_size if normalizers else None}
    if target_layer_ids is not None:
        fields["target_layer_ids"] = target_layer_ids
    return DrafterConfig.for_target(target_config, **fields)


def size_in_words(plan: CachePlan, rows: list[dict[str, Any]]) -> str:
    """The size of a cache, and its size with other --positions."""
    from dataclasses import replace

    from dspark_hf.training.features import amount

    tokens = sum(len(row["input_ids"]) for row in rows)
    needed = {kind: replace(plan, positions=kind).num_bytes(rows) for kind in ("all", "response", "anchors")}
    size = needed[plan.positions]
    per_token = size / max(tokens, 1) / 1000
    choices = ", ".join(f"{kind} {amount(number)}" for kind, number in needed.items())
    return (
        f"{len(rows):,} conversations with {tokens:,} tokens take {amount(size)} ({per_token:.1f} kB per token).\n"
        f"By --positions: {choices}.\n{ADVICE}"
    )
