"""`dspark-hf serve-bench`."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

from .options import (
    ANSWERS,
    DATA,
    MEASUREMENT,
    Device,
    Drafter,
    Dtype,
    Json,
    Output,
    Target,
    Temperature,
    Threads,
    whole_numbers,
)

LOADS = "loads.jsonl"  # the file of a run's measurements


def serve_bench(
    target: Target,
    drafter: Drafter,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            "-p",
            metavar="NAME",
            rich_help_panel=DATA,
            help="A task that `dspark-hf bench` knows, or a JSONL file of prompts. Rows take the prompts in turn.",
        ),
    ],
    output: Output = Path("serving"),
    batches: Annotated[
        str,
        typer.Option(
            metavar="NUMBERS",
            rich_help_panel=MEASUREMENT,
            help="Numbers of rows decoded together, comma-separated.",
        ),
    ] = "1,2,4,8,16,32",
    max_new_tokens: Annotated[
        int, typer.Option(min=2, metavar="N", rich_help_panel=ANSWERS, help="Number of tokens that every row decodes.")
    ] = 128,
    repeats: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=MEASUREMENT,
            help="Measure each batch and method N times and take the median.",
        ),
    ] = 3,
    threshold: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            rich_help_panel=ANSWERS,
            help="Confidence below which the schedule with a fixed threshold stops verifying.",
        ),
    ] = 0.5,
    temperature: Temperature = 0.0,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """
    Measure speed under load: batches of growing size, by plain `generate` and with each schedule.

    Every row decodes the same number of tokens. Written to the output folder: `serving.json`, `serving.md`, with matplotlib
    `throughput.png` and `budget.png`, and `loads.jsonl`, from which an interrupted run resumes.
    """
    from dspark_hf.checkpoints.files import THROUGHPUT_CURVE_NAME
    from dspark_hf.conversations.chat import Chat
    from dspark_hf.evaluation.serving import LoadFile, run_serving, serving_curve, serving_methods
    from dspark_hf.evaluation.serving_report import (
        budget_figure,
        markdown_of,
        serving_document,
        throughput_figure,
    )
    from dspark_hf.storage.atomic import write_text
    from dspark_hf.storage.json_lines import check_origin

    from .loading import attach, load_drafter, load_tasks, target_from_options
    from .running import counting, known_machine, machine_of, save_figure

    row_counts = whole_numbers(batches, "--batches")
    (task,) = load_tasks(prompts, max(row_counts), seed=0)
    settings = {
        "target": target,
        "drafter": drafter,
        "prompts": prompts,
        "num_new_tokens": max_new_tokens,
        "num_repeats": repeats,
        "temperature": temperature,
        "threshold": threshold,
    }
    check_origin(output / LOADS, settings | known_machine(dtype, device))
    loaded = load_drafter(drafter)
    model, tokenizer = target_from_options(target, dtype, device, threads)
    attach(loaded, model)
    settings |= machine_of(model)
    prompt_ids = [Chat(tokenizer, prompt.system).ask(prompt.turns[0]) for prompt in task.prompts]
    output.mkdir(parents=True, exist_ok=True)
    context_length = sum(ids.shape[1] for ids in prompt_ids) // len(prompt_ids) + max_new_tokens // 2
    with counting("measuring costs") as on_progress:
        curve = serving_curve(output / THROUGHPUT_CURVE_NAME, model, loaded, row_counts, context_length, on_progress)
    file = LoadFile(output / LOADS, settings)
    try:
        with counting("measuring batches") as on_progress:
            run_serving(
                model,
                prompt_ids,
                serving_methods(loaded, curve, threshold),
                row_counts,
                file,
                num_new_tokens=max_new_tokens,
                num_repeats=repeats,
                temperature=temperature,
                on_load=lambda load, done, total: on_progress(done, total),
            )
    finally:
        file.close()
    document = serving_document([load for load in file.loads.values() if load.batch in row_counts], settings, curve)
    write_text(output / "serving.json", json_module.dumps(document, indent=1) + "\n")
    markdown = markdown_of(document)
    write_text(output / "serving.md", markdown)
    save_figure(lambda: throughput_figure(document["results"]), output / "throughput.png")
    save_figure(lambda: budget_figure(document["results"]), output / "budget.png")
    print(json_module.dumps(document) if json else markdown)
