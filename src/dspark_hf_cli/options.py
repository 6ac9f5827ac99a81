"""Options that several commands share, each defined once, and the groups in which `--help` shows options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# Groups of options.
MODELS = "Models"
DATA = "Data"
ANSWERS = "Answers"
MEASUREMENT = "Measurement"
OUTPUT = "Output"
MACHINE = "Machine"

# ---------------------------------------------------------------------- models

_TARGET_HELP = "The target model: a folder or a model on the Hub."
Target = Annotated[str, typer.Option("--target", "-t", metavar="MODEL", rich_help_panel=MODELS, help=_TARGET_HELP)]

Drafter = Annotated[
    str,
    typer.Option(
        "--drafter", "-d", metavar="MODEL", rich_help_panel=MODELS, help="The drafter: a folder or a model on the Hub."
    ),
]
Drafters = Annotated[
    list[str],
    typer.Option(
        "--drafter",
        "-d",
        metavar="MODEL",
        rich_help_panel=MODELS,
        help="A drafter: a folder or a model on the Hub. Give the option several times to compare drafters.",
    ),
]
Revision = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=MODELS, help="Branch, tag or commit on the Hub.")
]
Subfolder = Annotated[
    str | None, typer.Option(metavar="NAME", rich_help_panel=MODELS, help="Folder inside the repository.")
]
TargetLayerIds = Annotated[
    str | None,
    typer.Option(
        metavar="IDS",
        rich_help_panel=MODELS,
        help="Target layers whose output the drafter reads, comma-separated, such as 1,9,17,25,33. Id 1 is the output of "
        "the second decoder layer. By default five layers spread over the target.",
    ),
]

# ---------------------------------------------------------------------- data

Tasks = Annotated[
    str,
    typer.Option(
        metavar="NAMES",
        rich_help_panel=DATA,
        help="Prompts to answer, comma-separated: gsm8k, math500, aime25, mbpp, humaneval, livecodebench, mt-bench, alpaca, "
        "arena-hard, or paths of JSONL files whose lines hold `turns`, `messages` or `prompt`.",
    ),
]
MaxPrompts = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", rich_help_panel=DATA, help="Use a random sample of N prompts of each task."),
]
Data = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="NAME",
        rich_help_panel=DATA,
        help="What to learn from: a JSONL file of the target's responses (see `dspark-hf regenerate`) or a data set on the "
        "Hub with a `messages` column. May be given several times.",
    ),
]
Split = Annotated[
    str, typer.Option(metavar="NAME", rich_help_panel=DATA, help="Split of a data set on the Hub, such as train.")
]
MaxLength = Annotated[
    int, typer.Option(min=2, metavar="N", rich_help_panel=DATA, help="Cut conversations after N tokens.")
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking",
        rich_help_panel=DATA,
        help="Set the chat template's `enable_thinking` switch, where it has one. Use the same setting for making "
        "responses, caching features and training.",
    ),
]
NumAnchors = Annotated[
    int,
    typer.Option(
        min=1,
        metavar="N",
        rich_help_panel=DATA,
        help="Number of blocks sampled from each conversation; short conversations have fewer.",
    ),
]

# ---------------------------------------------------------------------- answers

MaxNewTokens = Annotated[
    int, typer.Option(min=2, metavar="N", rich_help_panel=ANSWERS, help="Longest answer, in tokens.")
]
Temperature = Annotated[
    float,
    typer.Option(min=0.0, metavar="T", rich_help_panel=ANSWERS, help="Sampling temperature; 0 decodes greedily."),
]
Seed = Annotated[
    int,
    typer.Option(metavar="N", rich_help_panel=ANSWERS, help="Seed of sampling and of every random choice of data."),
]
Check = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        rich_help_panel=MEASUREMENT,
        help="Compare N greedy answers of each method with those of plain `generate` before sampling is measured. With "
        "--temperature 0 every answer is compared.",
    ),
]

# ---------------------------------------------------------------------- output

Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FOLDER",
        rich_help_panel=OUTPUT,
        help="Folder for measurements and reports. An interrupted run resumes from it.",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json", rich_help_panel=OUTPUT, help="Print one JSON document to standard output and nothing else there."
    ),
]

# ---------------------------------------------------------------------- machine

Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        rich_help_panel=MACHINE,
        help="Floating-point type of the models: float32, bfloat16 or float16; auto takes that of the target's files.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", rich_help_panel=MACHINE, help="Device, such as cpu or cuda:1. By default a GPU if there is one."
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, metavar="N", rich_help_panel=MACHINE, help="Number of CPU threads.")
]
Compile = Annotated[
    bool, typer.Option("--compile", rich_help_panel=MACHINE, help="Run the models through torch.compile.")
]


def whole_numbers(text: str, option: str, smallest: int = 1) -> list[int]:
    """
    The numbers of a comma-separated list, each once and in ascending order.

    Raises:
        typer.BadParameter: for what is not a whole number of at least `smallest`.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"{option} must be whole numbers separated by commas, got {text!r}.") from error
    if numbers[0] < smallest:
        raise typer.BadParameter(f"{option} must be {smallest} or more, got {text!r}.")
    return numbers
