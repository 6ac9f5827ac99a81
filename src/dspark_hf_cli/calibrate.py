"""`dspark-hf calibrate`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
    MEASUREMENT,
    OUTPUT,
    Device,
    Drafter,
    Dtype,
    Json,
    MaxNewTokens,
    MaxPrompts,
    Output,
    Seed,
    Target,
    Tasks,
    Temperature,
    Threads,
)

if TYPE_CHECKING:
    import dspark_hf
    from dspark_hf.scheduling import Calibration


def calibrate(
    target: Target,
    drafter: Drafter,
    tasks: Tasks = "gsm8k,mbpp,alpaca",
    output: Output = Path("calibration"),
    in_place: Annotated[
        bool,
        typer.Option(
            "--in-place",
            rich_help_panel=OUTPUT,
            help="Write the temperatures into the drafter's folder instead of a copy of it.",
        ),
    ] = False,
    min_rounds: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=MEASUREMENT,
            help="Fit a temperature only for slots that were reached in N rounds or more.",
        ),
    ] = 200,
    max_prompts: MaxPrompts = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """
    Calibrate a drafter's confidence: Sequential Temperature Scaling.

    Decodes prompts, which should not be training prompts, and verifies every draft. Then it fits a temperature for each slot,
    so that a confidence of 0.8 means that 80 % of such drafts are accepted. The temperatures are written to the configuration
    of a copy of the drafter, in the folder `drafter` of the output folder, or to the drafter itself with --in-place. Also
    written: `calibration.json`, `reliability.png`, and `records.jsonl`, from which an interrupted run resumes.
    """
    import json as json_module

    from dspark_hf.evaluation import BenchSettings
    from dspark_hf.scheduling import ConfidenceRounds, fit_temperatures, plot_reliability
    from dspark_hf.storage.atomic import write_text

    from .loading import attach, load_drafter, load_tasks, target_from_options
    from .running import check_resumable, save_figure

    if in_place:
        _check_in_place(drafter)
    settings = BenchSettings(max_new_tokens, temperature, seed)
    loaded_tasks = load_tasks(tasks, max_prompts, seed)
    others = {"target": target, "drafter": drafter}
    check_resumable(output, loaded_tasks, settings, dtype, device, others)
    loaded = load_drafter(drafter)
    if not loaded.config.gives_confidence:
        raise typer.BadParameter(f"'{drafter}' has no confidence head, so there is nothing to calibrate.")
    loaded.config.confidence_temperatures = None  # Old temperatures must not affect the new ones.
    model, tokenizer = target_from_options(target, dtype, device, threads)
    rounds = _collect(model, tokenizer, attach(loaded, model), loaded_tasks, settings, output, others)
    num_slots = loaded.config.num_draft_tokens
    calibration = fit_temperatures(ConfidenceRounds.from_records(rounds, num_slots), min_rounds=min_rounds)
    written = _write(drafter, calibration, output, in_place)
    document = asdict(calibration) | {"num_rounds": len(rounds), "drafter": str(written)}
    write_text(output / "calibration.json", json_module.dumps(document, indent=1) + "\n")
    save_figure(lambda: plot_reliability(calibration), output / "reliability.png")
    if json:
        print(json_module.dumps(document))
        return
    _print_calibration(calibration)
    print(f"{len(rounds)} rounds. The calibrated drafter is in {written}.")


def _collect(
    model: Any,
    tokenizer: Any,
    drafter: dspark_hf.Drafter,
    tasks: Any,
    settings: Any,
    output: Path,
    names: dict[str, str],
) -> list[Any]:
    """Rounds in which every draft was verified, including those of an interrupted run."""
    from dspark_hf.evaluation.methods import calibration_method

    from .running import measured_run

    methods = [calibration_method(drafter)]
    with measured_run(model, tokenizer, methods, tasks, settings, output, names) as (_, file):
        return [round_ for record in file.records.values() for round_ in record.rounds]


def _check_in_place(drafter: str) -> None:
    """
    Raises:
        typer.BadParameter: when the drafter is not a folder in this library's format; other formats cannot store temperatures.
    """
    from transformers import PreTrainedConfig

    from dspark_hf.registry import config_classes

    is_folder = Path(drafter).is_dir()
    if not is_folder or PreTrainedConfig.get_config_dict(drafter)[0].get("model_type") not in config_classes():
        raise typer.BadParameter(
            f"--in-place needs a folder that save_pretrained of a drafter wrote, and '{drafter}' is not one. Leave it out: the "
            "drafter is then written to the output folder."
        )


def _write(drafter: str, calibration: Calibration, output: Path, in_place: bool) -> Path:
    """Writes the temperatures to the drafter or a copy, without changing the dtype of the weights; returns the folder."""
    from transformers import AutoConfig

    from dspark_hf.drafter import Drafter
    from dspark_hf.storage.atomic import whole_files

    if in_place:
        config = AutoConfig.from_pretrained(drafter)
        config.confidence_temperatures = calibration.temperatures
        with whole_files(drafter) as part:
            config.save_pretrained(part)
        return Path(drafter)
    copy = Drafter.from_pretrained(drafter, dtype="auto")
    copy.config.confidence_temperatures = calibration.temperatures
    copy.save_pretrained(output / "drafter")
    return output / "drafter"


def _print_calibration(calibration: Calibration) -> None:
    from .running import print_table

    rows = []
    for slot, (t, b, a) in enumerate(zip(calibration.temperatures, calibration.before, calibration.after, strict=True)):
        pairs = [f"{vars(b)[name]:.4f} > {vars(a)[name]:.4f}" for name in ("ece", "auc", "brier", "predicted")]
        rows.append([str(slot + 1), str(b.weight), f"{t:.3f}", *pairs, f"{b.observed:.4f}"])
    print_table(
        "Calibration (before > after, on the rounds it was fitted to)",
        ["slot", "rounds", "T", "ECE", "AUC", "Brier", "predicted", "observed"],
        rows,
    )
    for slot, note in enumerate(calibration.notes):
        if note:
            print(f"slot {slot + 1}: {note}")
