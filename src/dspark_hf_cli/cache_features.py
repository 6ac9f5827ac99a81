"""`dspark-hf cache-features`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import Device, Dtype, Target, Threads

if TYPE_CHECKING:
    from dspark_hf.configuration_drafter import DrafterConfig
    from dspark_hf.training.features import CachePlan

ADVICE = (
    "(The released drafters' recipe, 1.3 M conversations, took about 38 TB. Without a cache, "
    "`dspark-hf train --data RESPONSES.jsonl` computes features as it goes and takes no disk.)"
)


def cache_features(
    target: Target,
    data: Annotated[
        list[str],
        typer.Option("--data", help="A JSONL file of responses or a data set of the Hub. May be repeated."),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the cache. A run that was stopped continues from it.")
    ],
    drafter: Annotated[
        str | None,
        typer.Option("--drafter", "-d", help="Cache what this drafter reads; otherwise the options below say what."),
    ] = None,
    target_layer_ids: Annotated[
        str | None, typer.Option(help="Comma-separated target layers to tap; five spread ones by default.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Drafts of a block, for --positions anchors.")] = 7,
    normalizers: Annotated[
        bool,
        typer.Option(
            "--normalizers",
            help="Keep what spares a reduced draft vocabulary the target's full logits: 12 bytes a token.",
        ),
    ] = False,
    positions: Annotated[
        Literal["all", "response", "anchors"],
        typer.Option(
            help="Where last hidden states are kept: everywhere, at responses only, or at the drafts of anchors that are "
            "drawn once. Losses are the same; anchors are then the same in every epoch."
        ),
    ] = "all",
    num_anchors: Annotated[int, typer.Option(min=1, help="Blocks of a row, for --positions anchors.")] = 512,
    feature_dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Number type on disk.")
    ] = "bfloat16",
    max_length: Annotated[int, typer.Option(min=2, help="Conversations are cut here.")] = 4096,
    split: Annotated[str, typer.Option(help="Split of data sets of the Hub.")] = "train",
    thinking: Annotated[
        bool | None, typer.Option("--thinking/--no-thinking", help="As the responses were made with.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a target pass.")] = 16,
    seed: Annotated[int, typer.Option(help="Draws the anchors.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how much it would take.")] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """
    Run the target over the data once and keep what a drafter reads of it.

    It pays when the data is seen several times and the disk is large; `dspark-hf train` needs no cache. The size is printed
    before anything is written, and a disk that is too small is refused.
    """
    import torch

    from dspark_hf.conversations.templates import thinking_switch
    from dspark_hf.training.data import encode_source
    from dspark_hf.training.features import CachedFeatureDataset, CachePlan
    from dspark_hf.training.features import cache_features as write_cache

    from .loading import load_target

    model, tokenizer = load_target(target, dtype, device, threads)
    config = config_of(drafter, model, target_layer_ids, block_size, normalizers)
    template = thinking_switch(thinking)
    rows = [row for source in data for row in encode_source(source, model, tokenizer, max_length, split, template)]
    if not rows:
        raise ValueError(f"{', '.join(data)}: no row has a response of two tokens within --max-length.")
    plan = CachePlan(config, getattr(torch, feature_dtype), positions, num_anchors, seed)
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
    typer.echo(f"{len(rows)} rows are in {output}.")


def config_of(
    drafter: str | None, target: Any, target_layer_ids: str | None, block_size: int, normalizers: bool
) -> DrafterConfig:
    """What is tapped, as the configuration of a drafter."""
    from dspark_hf.configuration_drafter import DrafterConfig

    if drafter is not None:
        from dspark_hf.drafter import Drafter

        return Drafter.from_pretrained(drafter).config
    text = target.config.get_text_config(decoder=True)
    fields: dict[str, Any] = {"block_size": block_size, "draft_vocab_size": text.vocab_size if normalizers else None}
    if target_layer_ids is not None:
        try:
            fields["target_layer_ids"] = [int(layer_id) for layer_id in target_layer_ids.split(",")]
        except ValueError:
            raise typer.BadParameter(f"--target-layer-ids {target_layer_ids}: give numbers, such as 1,9,17.") from None
    return DrafterConfig.for_target(target.config, **fields)


def size_in_words(plan: CachePlan, rows: list[dict[str, Any]]) -> str:
    """What a cache takes, and what would take less."""
    from dataclasses import replace

    from dspark_hf.training.features import amount

    tokens = sum(len(row["input_ids"]) for row in rows)
    needed = {kind: replace(plan, positions=kind).num_bytes(rows) for kind in ("all", "response", "anchors")}
    mine = needed[plan.positions]
    size = (
        f"{len(rows):,} rows of {tokens:,} tokens take {amount(mine)} ({mine / max(tokens, 1) / 1000:.1f} kB a token)."
    )
    choices = "By --positions: " + ", ".join(f"{kind} {amount(number)}" for kind, number in needed.items()) + "."
    return f"{size}\n{choices}\n{ADVICE}"
