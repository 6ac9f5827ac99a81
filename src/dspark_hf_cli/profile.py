"""`dspark-hf profile`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import MEASUREMENT, MODELS, OUTPUT, Compile, Device, Dtype, Json, Target, Threads, whole_numbers

if TYPE_CHECKING:
    from dspark_hf.scheduling import ThroughputCurve


def profile(
    target: Target,
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "-d",
            metavar="MODEL",
            rich_help_panel=MODELS,
            help="Also measure drafting with this drafter: a folder or a model on the Hub.",
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
            help="Folder for the measurements and their plot.",
        ),
    ] = Path("profile"),
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            rich_help_panel=OUTPUT,
            help="Also write the measurements into the drafter's folder, where `generate` finds them.",
        ),
    ] = False,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            rich_help_panel=MEASUREMENT,
            help="Numbers of tokens in a target pass to measure, comma-separated.",
        ),
    ] = "1,2,3,4,5,6,7,8,12,16,24,32,48,64,96,128,192,256",
    rows: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            rich_help_panel=MEASUREMENT,
            help="Numbers of rows decoded together to measure, comma-separated.",
        ),
    ] = "1,2,4,8,16,32",
    context_length: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=MEASUREMENT, help="Tokens in the cache before a pass.")
    ] = 512,
    repeats: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", rich_help_panel=MEASUREMENT, help="Measure each size N times and take the median."
        ),
    ] = 15,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    compile: Compile = False,
    json: Json = False,
) -> None:
    """
    Measure what a target pass costs on this machine, by the number of tokens in it.

    Schedulers use these costs to decide how many drafts to verify, and drafting is switched off where it would cost more than
    it saves. The figures hold for this model, dtype and device only. Written to the output folder: `throughput_curve.json`
    and, with matplotlib, its plot.
    """
    import json as json_module

    from dspark_hf.checkpoints.files import THROUGHPUT_CURVE_NAME
    from dspark_hf.evaluation.costs import measure_costs
    from dspark_hf.scheduling import plot_curve

    from .loading import attach, compile_models, load_drafter, target_from_options
    from .running import counting, save_figure

    token_counts, row_counts = whole_numbers(tokens, "--tokens"), whole_numbers(rows, "--rows")
    folder = _folder_of(drafter) if save else None
    loaded = None if drafter is None else load_drafter(drafter)
    model, _ = target_from_options(target, dtype, device, threads)
    if loaded is not None:
        attach(loaded, model)
        if compile:
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
    places = [place / THROUGHPUT_CURVE_NAME for place in (output, folder) if place is not None]
    print(f"Written to {' and '.join(map(str, places))}.")


def _folder_of(drafter: str | None) -> Path:
    folder = None if drafter is None else Path(drafter)
    if folder is None or not folder.is_dir():
        raise typer.BadParameter(
            f"--save writes into the folder of a drafter, and {f'{drafter!r} is not a folder' if drafter else 'there is none'}: "
            "save the drafter with save_pretrained first."
        )
    return folder


def _print_curve(curve: ThroughputCurve) -> None:
    from .running import print_table

    used, single = curve.pass_s, curve.pass_s[0]
    print_table(
        "Passes of the target",
        ["tokens", "ms measured", "ms used", "passes/s", "times one token"],
        [
            [str(count), f"{1e3 * measured:.2f}", f"{1e3 * s:.2f}", f"{1 / s:.1f}", f"{s / single:.2f}"]
            for count, measured, s in zip(curve.token_counts, curve.measured_s, used, strict=True)
        ],
    )
    print_table(
        "Rows decoded together",
        ["rows", "ms per pass", "ms drafting"],
        [
            [
                str(rows),
                f"{1e3 * curve.pass_seconds(rows, 0):.2f}",
                f"{1e3 * curve.drafting[rows]:.2f}" if curve.drafting else "-",
            ]
            for rows in curve.rows
        ],
    )
