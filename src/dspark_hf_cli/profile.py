"""`dspark-hf profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import Compile, Device, Dtype, Json, Target, Threads, whole_numbers

if TYPE_CHECKING:
    from dspark_hf.scheduling import ThroughputCurve


def profile(
    target: Target,
    drafter: Annotated[
        str | None, typer.Option("--drafter", "-d", help="Measure drafting as well: a folder or a model of the Hub.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the curve and its plot.")] = Path(
        "profile"
    ),
    tokens: Annotated[
        str, typer.Option(help="Tokens a pass to measure, comma-separated.")
    ] = "1,2,3,4,5,6,7,8,12,16,24,32,48,64,96,128,192,256",
    rows: Annotated[str, typer.Option(help="Rows decoded together to measure, comma-separated.")] = "1,2,4,8,16,32",
    context_length: Annotated[int, typer.Option(min=1, help="Tokens in the cache when a pass starts.")] = 512,
    repeats: Annotated[int, typer.Option(min=1, help="Passes of each size; their median counts.")] = 15,
    save: Annotated[
        bool, typer.Option("--save", help="Also write the curve into the drafter's folder, where `generate` finds it.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    compile: Compile = False,
    json: Json = False,
) -> None:
    """
    Measure what a pass of the target costs on this machine, by the tokens in it.

    The schedulers weigh drafts with this curve, and drafting pauses by it. It holds for this model, number type and device
    alone. Written to the output folder: `throughput_curve.json` and, with matplotlib, its plot.
    """
    import json as json_module

    from dspark_hf.checkpoints.files import THROUGHPUT_CURVE_NAME
    from dspark_hf.evaluation.costs import measure_costs
    from dspark_hf.scheduling import plot_curve

    from .loading import compile_models, load_drafter, load_target
    from .running import counting, save_figure

    token_counts, row_counts = whole_numbers(tokens, "--tokens"), whole_numbers(rows, "--rows")
    folder = _folder_of(drafter) if save else None
    model, _ = load_target(target, dtype, device, threads)
    loaded = load_drafter(drafter, model) if drafter is not None else None
    if compile and loaded is not None:
        compile_models(loaded)
    with counting("measuring passes") as on_progress:
        curve = measure_costs(
            model,
            loaded,
            token_counts,
            row_counts,
            context_length=context_length,
            num_repeats=repeats,
            compile=compile,
            on_progress=on_progress,
        )
    output.mkdir(parents=True, exist_ok=True)
    for place in (output, folder):
        if place is not None:
            curve.save(place / THROUGHPUT_CURVE_NAME)
    save_figure(lambda: plot_curve(curve), output / "throughput_curve.png")
    if json:
        print(json_module.dumps(curve.to_dict()))
        return
    _print_curve(curve)
    print(f"Curve: {output / THROUGHPUT_CURVE_NAME}" + (f", {folder / THROUGHPUT_CURVE_NAME}" if folder else ""))


def _folder_of(drafter: str | None) -> Path:
    folder = None if drafter is None else Path(drafter)
    if folder is None or not folder.is_dir():
        raise typer.BadParameter(
            f"--save writes into the folder of a drafter, and {drafter or 'no --drafter'} is none: save it with "
            "save_pretrained first."
        )
    return folder


def _print_curve(curve: ThroughputCurve) -> None:
    from .running import print_table

    used, single = curve.pass_s, curve.pass_s[0]
    print_table(
        "A pass of the target",
        ["tokens", "ms measured", "ms used", "passes/s", "x one token"],
        [
            [str(count), f"{1e3 * measured:.2f}", f"{1e3 * s:.2f}", f"{1 / s:.1f}", f"{s / single:.2f}"]
            for count, measured, s in zip(curve.token_counts, curve.measured_s, used, strict=True)
        ],
    )
    print_table(
        "Rows decoded together",
        ["rows", "ms a pass", "ms drafting"],
        [
            [
                str(rows),
                f"{1e3 * curve.pass_seconds(rows, 0):.2f}",
                f"{1e3 * curve.drafting[rows]:.2f}" if curve.drafting else "-",
            ]
            for rows in curve.rows
        ],
    )
