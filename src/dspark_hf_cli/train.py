"""`dspark-hf train`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from dspark_hf.hub import TrainingSummary
    from dspark_hf.training.options import TrainCommand
    from dspark_hf.training.run import TrainingRun

# The options are dataclasses, which their own parser reads; typer hands everything on.
CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def train(context: typer.Context) -> None:
    """
    Train a drafter on the target's own responses, or fine-tune one.

    `dspark-hf train --help` lists all options. Several processes: `accelerate launch -m dspark_hf_cli train ...`, or
    `torchrun --nproc_per_node 2 -m dspark_hf_cli train ...`.
    """
    from dspark_hf.training.options import parse_train_options, train_parser

    if not context.args or set(context.args) & {"-h", "--help"}:
        typer.echo(train_parser().format_help())
        raise typer.Exit(0 if context.args else 2)
    command = parse_train_options(context.args)

    from dspark_hf.hub import write_card
    from dspark_hf.training.run import train as run_training

    run = run_training(command)
    if not run.trainer.is_world_process_zero():
        return
    folder = command.arguments.output_dir
    summary_of(run, command, context.args).save(folder)
    model, is_adapter = run.trainer.model, command.options.lora_rank is not None
    adapts = (command.options.drafter or "its drafter") if is_adapter else None
    write_card(model.get_base_model() if is_adapter else model, folder, adapts=adapts)
    typer.echo(closing_line(run, folder, "adapter" if is_adapter else "drafter"))


def summary_of(run: TrainingRun, command: TrainCommand, arguments: list[str]) -> TrainingSummary:
    """What the model card says about a run."""
    from dspark_hf.evaluation.environment import environment
    from dspark_hf.hub import TrainingSummary
    from dspark_hf.training.history import hours_of
    from dspark_hf.training.run import FIGURE

    state, folder = run.trainer.state, Path(command.arguments.output_dir)
    found = environment()
    machine = {name: found[name] for name in ("platform", "cpu", "cpu_count", "memory_gib", "accelerators", "cuda")}
    results: dict[str, Any] = {name.removeprefix("eval_"): value for name, value in run.metrics.items()}
    results |= {"hours": hours_of(state.log_history), "optimiser steps": state.global_step}
    if state.best_model_checkpoint:
        results["best checkpoint"] = Path(state.best_model_checkpoint).name
    return TrainingSummary(
        command=shlex.join(["dspark-hf", "train", *arguments]),
        data=data_in_words(run),
        datasets=[source.name for source, _, _ in run.data if not Path(source.name).exists()],
        settings=command.given | {"processes": command.arguments.world_size},
        results=results,
        environment=found["packages"] | {"python": found["python"]} | machine,
        figures=[FIGURE] if (folder / FIGURE).exists() else [],
    )


def data_in_words(run: TrainingRun) -> str:
    """Each source with its rows, tokens and checksum."""
    parts = []
    for source, trained, held_out in run.data:
        text = f"`{Path(source.name).name}`:"
        for verb, indices in (("trained on", trained), ("held out", held_out)):
            if indices:
                summary = source.summary(indices)
                text += f" {summary['rows']:,} conversations ({summary['response_tokens']:,} response tokens) {verb},"
        parts.append(text.rstrip(",") + (f" (SHA-256 {source.sha256})" if source.sha256 else ""))
    return "; ".join(parts)


def closing_line(run: TrainingRun, folder: Any, what: str) -> str:
    """Where the drafter or adapter is and what it came to."""
    metrics = run.metrics
    line = f"The {what} is in {folder}."
    if "eval_acceptance_length" in metrics:
        line += f" Held out: {metrics['eval_acceptance_length']:.2f} tokens a target pass"
        if "eval_confidence_ece" in metrics:
            line += f", calibration error {metrics['eval_confidence_ece']:.3f}"
        line += "."
    return line
