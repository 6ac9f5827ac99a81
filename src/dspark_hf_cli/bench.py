"""`dspark-hf bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import exit_codes
from .options import (
    MEASUREMENT,
    MODELS,
    Check,
    Compile,
    Device,
    Drafters,
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
    from dspark_hf.evaluation import Method

# Where two tokens have logits this close, rounding decides which of them a greedy answer takes.
TIES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}


def bench(
    target: Target,
    drafter: Drafters,
    tasks: Tasks = "gsm8k,math500,aime25,mbpp,humaneval,livecodebench,mt-bench,alpaca,arena-hard",
    output: Output = Path("bench"),
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MEASUREMENT,
            help="How many drafts are verified per round: fixed (all, the default), fixed:N, threshold:P (up to the first "
            "draft less confident than P), throughput or async_throughput (by their cost, which is read from the drafter's "
            "folder or measured at the start). Give the option several times to compare schedules.",
        ),
    ] = None,
    assistant: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            rich_help_panel=MODELS,
            help="Also measure transformers' assisted generation with this small model, which has the target's tokenizer.",
        ),
    ] = None,
    prompt_lookup: Annotated[
        bool,
        typer.Option(
            "--prompt-lookup/--no-prompt-lookup",
            rich_help_panel=MEASUREMENT,
            help="Also measure transformers' prompt lookup.",
        ),
    ] = True,
    dflash: Annotated[
        bool,
        typer.Option(
            "--dflash/--no-dflash",
            rich_help_panel=MEASUREMENT,
            help="Also measure transformers' DFlash generation, for drafters that it can use.",
        ),
    ] = True,
    check: Check = 4,
    max_prompts: MaxPrompts = None,
    max_new_tokens: MaxNewTokens = 2048,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    compile: Compile = False,
    profile: Annotated[
        bool,
        typer.Option("--profile", rich_help_panel=MEASUREMENT, help="Also measure where the time of a round goes."),
    ] = False,
    json: Json = False,
) -> None:
    """
    Measure how much faster a target decodes with a drafter, on this machine.

    Plain `generate` and all other methods answer the same prompts, one after the other in changing order. Some prompts are
    also answered greedily, and these answers are compared with those of plain `generate`. Results are printed and written to
    the output folder: `results.json`, `report.html`, figures, and `records.jsonl`, from which an interrupted run resumes.

    Exit code 3: a greedy answer differs from that of plain `generate`, and not by a tie between two tokens.
    """
    from dspark_hf.evaluation import BenchSettings

    from .loading import attach, compile_models, load_drafter, load_tasks, target_from_options
    from .running import check_resumable, finish, run

    settings = BenchSettings(max_new_tokens, temperature, seed)
    loaded_tasks = load_tasks(tasks, max_prompts, seed)
    schedules = schedule or ["fixed"]
    others: dict[str, Any] = {
        "target": target,
        "drafters": drafter,
        "schedules": schedules,
        "assistant": assistant,
        "prompt_lookup": prompt_lookup,
        "dflash": dflash,
        "compile": compile,
    }
    check_resumable(output, loaded_tasks, settings, dtype, device, others)
    drafters = [load_drafter(name) for name in drafter]
    model, tokenizer = target_from_options(target, dtype, device, threads)
    drafters = [attach(one, model) for one in drafters]
    methods = _compared(model, drafter, drafters, schedules, assistant, prompt_lookup, dflash)
    if compile:
        compile_models(model, *drafters)
    document = run(model, tokenizer, methods, loaded_tasks, settings, output, others, check, profile)
    finish(document, output, json)
    tie = TIES.get(document["settings"]["dtype"], 1e-3)
    if wrong_answers(document["identity"], tie):
        raise typer.Exit(exit_codes.DIFFERENT_ANSWERS)


def wrong_answers(identity: dict[str, Any], tie: float) -> int:
    """How many greedy answers differ from plain `generate` where the target's logits are further apart than `tie`."""
    return sum(d["gap"] is None or abs(d["gap"]) > tie for method in identity.values() for d in method["differences"])


def _compared(
    model: Any,
    names: list[str],
    drafters: list[Any],
    schedules: list[str],
    assistant: str | None,
    prompt_lookup: bool,
    dflash: bool,
) -> list[Method]:
    """The methods to compare, plain `generate` first."""
    from dspark_hf.evaluation.costs import curve_here
    from dspark_hf.evaluation.methods import (
        BY_COST,
        assistant_method,
        dflash_method,
        is_dflash,
        plain_method,
        prompt_lookup_method,
        schedule_method,
    )
    from dspark_hf.transformers_names import is_stateful

    from .loading import labels_of, load_language_model, say

    methods = [plain_method()]
    if is_stateful(model) and (prompt_lookup or (dflash and any(map(is_dflash, drafters)))):
        say(f"transformers cannot roll {type(model).__name__} back, so its own prompt lookup and DFlash are left out.")
        prompt_lookup = dflash = False
    if prompt_lookup:
        methods.append(prompt_lookup_method())
    if assistant is not None:
        methods.append(assistant_method(load_language_model(assistant, model, "assistant")))
    for label, loaded in zip(labels_of(names), drafters, strict=True):
        if dflash and is_dflash(loaded):
            suffix = "" if len(names) == 1 else f" {label}"
            methods.append(dflash_method(loaded, f"dflash{suffix} (transformers)"))
        needs_costs = loaded.config.gives_confidence and any(schedule in BY_COST for schedule in schedules)
        if needs_costs:
            say("Reading or measuring the cost of target passes ...")
        curve = curve_here(model, loaded) if needs_costs else None
        try:
            methods += [schedule_method(loaded, schedule, label, curve) for schedule in schedules]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return methods
