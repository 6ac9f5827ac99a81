"""`dspark-hf sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import (
    MEASUREMENT,
    Check,
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

# Fields in which drafters may differ: the value of --over, and the field of the configuration.
FIELDS = {"block-size": "num_draft_tokens", "rank": "markov_rank", "depth": "num_hidden_layers"}


def sweep(
    target: Target,
    drafter: Drafters,
    over: Annotated[
        Literal["tokens", "threshold", "block-size", "rank", "depth"],
        typer.Option(
            rich_help_panel=MEASUREMENT,
            help="What to vary: drafts per round or the confidence threshold, each with several values for every drafter; or "
            "the block size, the rank of the sequential head or the number of layers, in which the drafters differ.",
        ),
    ],
    values: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBERS",
            rich_help_panel=MEASUREMENT,
            help="Values for --over tokens or threshold, comma-separated. By default several that cover the range.",
        ),
    ] = None,
    tasks: Tasks = "gsm8k,humaneval,mt-bench",
    output: Output = Path("sweep"),
    max_prompts: MaxPrompts = None,
    max_new_tokens: MaxNewTokens = 512,
    temperature: Temperature = 1.0,
    seed: Seed = 0,
    check: Check = 4,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """
    Vary one setting, or compare drafters, and show the effect on acceptance and speed.

    `--over tokens` and `--over threshold` try several settings of each drafter; `--over block-size`, `rank` and `depth`
    compare drafters that were trained with different ones. Everything is measured as in `bench`.
    """
    from dspark_hf.evaluation import BenchSettings, plain_method
    from dspark_hf.evaluation.figures import sweep_figure

    from .loading import attach, labels_of, load_drafter, load_tasks, target_from_options
    from .running import check_resumable, finish, run

    settings = BenchSettings(max_new_tokens, temperature, seed)
    loaded_tasks = load_tasks(tasks, max_prompts, seed)
    others = {"target": target, "drafters": drafter, "over": over, "values": values}
    check_resumable(output, loaded_tasks, settings, dtype, device, others)
    drafters = [load_drafter(name) for name in drafter]
    methods = [plain_method()]
    for label, one in zip(labels_of(drafter), drafters, strict=True):
        methods += methods_over(one, label, over, values)
    model, tokenizer = target_from_options(target, dtype, device, threads)
    for one in drafters:
        attach(one, model)
    document = run(model, tokenizer, methods, loaded_tasks, settings, output, others, check)
    document["sweep"] = {"over": over, "points": points_of(document)}
    try:
        figures = {"sweep": sweep_figure(document["sweep"]["points"], over)}
    except ImportError:
        figures = {}  # `finish` says so
    finish(document, output, json, figures)


def methods_over(drafter: Any, label: str, over: str, values: str | None) -> list[Method]:
    """
    The methods that one drafter adds to a sweep.

    Raises:
        typer.BadParameter: for values that are not numbers, or given although the drafters are what varies.
    """
    from dspark_hf.evaluation.methods import dspark_method

    if over in FIELDS:
        if values is not None:
            raise typer.BadParameter(f"--values goes with --over tokens or threshold; --over {over} compares drafters.")
        x = drafter.config.named([FIELDS[over]])[FIELDS[over]]
        return [dspark_method(drafter, label, threshold=0.0, fields={"x": x, "label": "all drafters"})]
    longest = drafter.config.num_draft_tokens
    try:
        if over == "tokens":
            numbers = [int(v) for v in values.split(",")] if values else list(range(1, longest + 1))
            return [
                dspark_method(drafter, f"{label} {n}", num_tokens=n, threshold=0.0, fields={"x": n, "label": label})
                for n in numbers
            ]
        thresholds = [float(v) for v in values.split(",")] if values else [0.0, 0.2, 0.4, 0.6, 0.8]
    except ValueError as error:
        raise typer.BadParameter(f"--values must be numbers separated by commas, got {values!r}.") from error
    if not drafter.config.gives_confidence:
        raise typer.BadParameter(f"--over threshold needs drafters with a confidence head, and {label} has none.")
    return [dspark_method(drafter, f"{label} {t:g}", threshold=t, fields={"x": t, "label": label}) for t in thresholds]


def points_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of the figure: every domain (or task, where it is the only one) and value."""
    kinds = {result["kind"] for result in document["results"]}
    kind = "domain" if "domain" in kinds else "task"
    drafters = {result["fields"]["label"] for result in document["results"] if result["fields"]}
    return [
        {
            "label": result["group"] if len(drafters) == 1 else f"{result['fields']['label']}, {result['group']}",
            "x": result["fields"]["x"],
            "method": result["method"],
            "acceptance_length": result["estimates"]["acceptance_length"],
            "speedup": result["estimates"]["speedup"],
        }
        for result in document["results"]
        if result["kind"] == kind and result["fields"]
    ]
