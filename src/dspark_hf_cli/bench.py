"""`dspark-hf bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import (
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

# A greedy answer that departs where the target's logits are this close is a tie that rounding decides.
TIES = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
EXIT_DIFFERENT = 3


def bench(
    target: Target,
    drafter: Drafters,
    tasks: Tasks = "gsm8k,math500,aime25,mbpp,humaneval,livecodebench,mt-bench,alpaca,arena-hard",
    output: Output = Path("bench"),
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            help="How many drafts to verify: fixed, fixed:N, threshold:P (such as threshold:0.5), throughput or "
            "async_throughput (by cost: the drafter's curve, see `profile`, or one measured at the start). May be repeated; "
            "fixed by default."
        ),
    ] = None,
    assistant: Annotated[
        str | None, typer.Option(help="A small model of the same vocabulary, for transformers' assisted generation.")
    ] = None,
    prompt_lookup: Annotated[bool, typer.Option(help="Compare with transformers' prompt lookup as well.")] = True,
    dflash: Annotated[
        bool, typer.Option(help="Compare with transformers' DFlash generator, where a drafter is a plain DFlash one.")
    ] = True,
    max_prompts: MaxPrompts = None,
    max_new_tokens: MaxNewTokens = 2048,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    compile: Compile = False,
    profile: Annotated[bool, typer.Option("--profile", help="Also say where the time of a round goes.")] = False,
    json: Json = False,
) -> None:
    """
    Measure what a drafter is worth on a target, prompts and this machine.

    All methods answer the same prompts, one after the other in changing order. Results are printed and written to the
    output folder: `results.json`, `report.html`, `records.jsonl` (from which a stopped run continues) and the figures.

    Exit code 3: some greedy answers are not those of plain generate, and not because of a tie.
    """
    from dspark_hf.evaluation import BenchSettings

    from .loading import compile_models, load_drafter, load_target, load_tasks
    from .running import finish, run

    loaded_tasks = load_tasks(tasks, max_prompts, seed)
    model, tokenizer = load_target(target, dtype, device, threads)
    drafters = [load_drafter(name, model) for name in drafter]
    methods = _compared(model, drafter, drafters, schedule or ["fixed"], assistant, prompt_lookup, dflash)
    if compile:
        compile_models(model, *drafters)
    settings = BenchSettings(max_new_tokens, temperature, seed)
    document = run(
        model,
        tokenizer,
        methods,
        loaded_tasks,
        settings,
        output,
        {"target": target, "drafters": drafter, "compile": compile, "assistant": assistant},
        profile=profile,
    )
    finish(document, output, json)
    tie = TIES.get(document["settings"]["dtype"], 1e-3)
    if wrong_answers(document["identity"], tie):
        raise typer.Exit(EXIT_DIFFERENT)


def wrong_answers(identity: dict[str, Any], tie: float) -> int:
    """Greedy answers that depart from plain `generate` where the target's logits are further apart than `tie`."""
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
    from transformers import AutoModelForCausalLM

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

    from .loading import labels_of

    methods = [plain_method()]
    if prompt_lookup:
        methods.append(prompt_lookup_method())
    if assistant is not None:
        small = AutoModelForCausalLM.from_pretrained(assistant, dtype=model.dtype).to(model.device).eval()
        methods.append(assistant_method(small))
    for label, loaded in zip(labels_of(names), drafters, strict=True):
        if dflash and is_dflash(loaded):
            suffix = "" if len(names) == 1 else f" {label}"
            methods.append(dflash_method(loaded, f"dflash{suffix} (transformers)"))
        weighs_costs = loaded.config.gives_confidence and any(schedule in BY_COST for schedule in schedules)
        curve = curve_here(model, loaded) if weighs_costs else None
        try:
            methods += [schedule_method(loaded, schedule, label, curve) for schedule in schedules]
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
    return methods
