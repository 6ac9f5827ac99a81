"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Option("--target", "-t", help="The target: a folder or a model of the Hub.")]
Drafters = Annotated[
    list[str], typer.Option("--drafter", "-d", help="A drafter: a folder or a model of the Hub. May be repeated.")
]
Tasks = Annotated[
    str,
    typer.Option(
        help="Comma-separated: gsm8k, math500, aime25, mbpp, humaneval, livecodebench, mt-bench, alpaca, arena-hard, or paths "
        "of JSONL files whose lines hold `turns`, `messages` or `prompt`."
    ),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output", "-o", help="Folder for measurements and reports. A run that was stopped continues from it."
    ),
]
MaxPrompts = Annotated[int | None, typer.Option(min=1, help="A random sample of so many prompts of each task.")]
MaxNewTokens = Annotated[int, typer.Option(min=2, help="Tokens of an answer at most.")]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 decodes greedily; then answers are compared with plain ones.")
]
Seed = Annotated[int, typer.Option(help="Of samples and of the choice of prompts.")]
Dtype = Annotated[
    str, typer.Option(help="Number type of the target and the drafter: auto, float32, bfloat16, float16.")
]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda; an accelerator by default, where there is one.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads; torch's own choice by default.")]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the target and the drafter.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document to standard output, and nothing else there.")
]


def whole_numbers(text: str, option: str) -> list[int]:
    """
    The numbers of a comma-separated list, each once and in ascending order.

    Raises:
        typer.BadParameter: for what is not a whole number of at least 1.
    """
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError as error:
        raise typer.BadParameter(f"{option} must be whole numbers separated by commas, got {text!r}.") from error
    if numbers[0] < 1:
        raise typer.BadParameter(f"{option} must be 1 or more, got {text!r}.")
    return numbers
