"""`dspark-hf adapt`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .options import (
    ANSWERS,
    DATA,
    MACHINE,
    OUTPUT,
    Device,
    Drafter,
    Dtype,
    Json,
    NumAnchors,
    Seed,
    Target,
    Thinking,
    Threads,
)

if TYPE_CHECKING:
    from dspark_hf.adapting import Adaptation
    from dspark_hf.evaluation.statistics import Estimate

TRAINING = "Training"


def adapt(
    context: typer.Context,
    target: Target,
    drafter: Drafter,
    prompts: Annotated[
        str,
        typer.Option(
            "--prompts",
            "-p",
            metavar="NAME",
            rich_help_panel=DATA,
            help="Your prompts: a JSONL file whose lines hold `prompt`, `messages` or `turns`, or a data set on the Hub.",
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
            help="Folder for the adapted drafter and everything that leads to it. An interrupted run resumes from it.",
        ),
    ],
    max_prompts: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=DATA, help="Use the first N of your prompts.")
    ] = None,
    general: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=DATA,
            help="Prompts of other domains, which are trained on as well so that the drafter does not become worse there. By "
            "default the target writes them.",
        ),
    ] = None,
    general_prompts: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=DATA, help="Number of general prompts; 0 for none.")
    ] = 200,
    held_out: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            rich_help_panel=DATA,
            help="Share of the prompts that is not trained on: half of it chooses the best checkpoint, the other half compares "
            "the drafter before and after.",
        ),
    ] = 0.2,
    thinking: Thinking = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="N",
            rich_help_panel=ANSWERS,
            help="Longest answer, in tokens. By default that of the target's generation config, or 512.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="T",
            rich_help_panel=ANSWERS,
            help="Sampling temperature of the answers; 0 decodes greedily. By default that of the target's generation config. "
            "Use the one that you generate with.",
        ),
    ] = None,
    num_anchors: NumAnchors = 32,
    seed: Seed = 0,
    minutes: Annotated[
        float,
        typer.Option(
            min=0.01,
            metavar="N",
            rich_help_panel=TRAINING,
            help="Minutes that training may take. Answering the prompts comes before, and takes its time for each of them.",
        ),
    ] = 20.0,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel=TRAINING, help="Train this many steps instead of a time."),
    ] = None,
    patience: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=TRAINING,
            help="Stop early after N of the twelve evaluations without a better one.",
        ),
    ] = 4,
    lora_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=TRAINING,
            help="Train LoRA matrices of this rank, which are merged at the end, instead of all weights.",
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0.0, metavar="RATE", rich_help_panel=TRAINING, help="Peak learning rate: 1.5e-3, or 1e-3 with LoRA."
        ),
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            rich_help_panel=TRAINING,
            help="Any other training argument, as for `dspark-hf train`, such as bf16=true. May be given several times.",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=MACHINE, help="Conversations per training step.")
    ] = 8,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """
    Adapt a drafter to your prompts, in one command.

    The target answers the prompts, and the drafter learns from most of the answers; the rest of them choose the best
    checkpoint, calibrate the confidences and compare the drafter before and after. The last line says what was gained and
    whether to use the new drafter, which is in the folder `drafter` of the output folder. Given again, the command resumes.
    """
    import json as json_module
    from dataclasses import fields

    from .loading import say
    from .option_file import command_line, given_options, other_settings

    training = other_settings(context)
    say("Starting ...")
    import torch

    from dspark_hf.adapting import AdaptSettings
    from dspark_hf.adapting import adapt as run

    from .running import counting

    if threads is not None:
        torch.set_num_threads(threads)
    given = {field.name: context.params[field.name] for field in fields(AdaptSettings) if field.name in context.params}
    settings = AdaptSettings(**given | {"output": str(output), "training": training})
    with counting("prompts") as on_progress:
        adapted = run(settings, say, on_progress)
    write_card_of(adapted, command_line(context, given_options(context), training))
    if json:
        print(json_module.dumps(adapted.document))
        return
    print_changes(adapted)
    typer.echo(adapted.verdict)


def write_card_of(adapted: Adaptation, typed: str) -> None:
    """Writes the model card of the adapted drafter, with a figure of what it gained."""
    from dspark_hf.adapting.comparison import comparison_figure
    from dspark_hf.evaluation.environment import environment
    from dspark_hf.hub import TrainingSummary, write_card
    from dspark_hf.hub.private import public_name

    from .running import save_figure

    figure = adapted.folder / "adaptation.png"
    save_figure(lambda: comparison_figure(adapted.changes), figure)
    found, settings = environment(), adapted.document["settings"]
    shown = ("general_prompts", "max_new_tokens", "temperature", "lora_rank", "batch_size", "num_anchors")
    TrainingSummary(
        command=typed,
        data=f"the target's answers to `{public_name(settings['prompts'])}`"
        + (" and to general prompts" if adapted.general else ""),
        settings={name: settings[name] for name in shown} | settings["training"],
        results={f"On {name}": str(change) for name, change in adapted.changes.items()}
        | {"steps": adapted.document["steps"]},
        environment=found["packages"] | {"python": found["python"], "platform": found["platform"], "cpu": found["cpu"]},
        figures=[figure.name] if figure.exists() else [],
    ).save(adapted.folder)
    write_card(adapted.drafter, adapted.folder)


def print_changes(adapted: Adaptation) -> None:
    """The comparison as a table."""
    from .running import print_table

    rows = [
        [name, str(change.answers), with_interval(change.before), with_interval(change.after), percent(change.gain)]
        for name, change in adapted.changes.items()
    ]
    print_table(
        "Tokens per target pass (95 % interval)", ["held-out answers to", "number", "before", "after", "gain"], rows
    )


def with_interval(estimate: Estimate) -> str:
    return f"{estimate.value:.2f} ({estimate.low:.2f} to {estimate.high:.2f})"


def percent(gain: Estimate) -> str:
    return f"{100 * gain.value:+.1f} % ({100 * gain.low:+.1f} to {100 * gain.high:+.1f})"
