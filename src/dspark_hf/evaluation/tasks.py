"""Prompts to measure with: nine public benchmarks by name, or any JSONL file of prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..conversations.data_sets import read_data_set
from ..conversations.prompts import as_message, read_prompts

STEP_BY_STEP = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PYTHON = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"


@dataclass(frozen=True)
class Prompt:
    """
    One conversation, without the answers, which the target gives.

    Args:
        turns: The user's turns.
        system: The system prompt.
    """

    turns: list[str]
    system: str | None = None


@dataclass(frozen=True)
class Task:
    """
    Args:
        name: Name of the task in tables.
        domain: `"math"`, `"code"`, `"chat"`, or `"other"`.
        prompts: The prompts, in the order of the data set.
    """

    name: str
    domain: str
    prompts: list[Prompt]


@dataclass(frozen=True)
class HubTask:
    """
    Where a task comes from and how a row becomes a prompt.

    Args:
        domain: As in [`Task`].
        dataset: Data set on the Hub.
        num_rows: Number of rows that are used, from the first.
        to_turns: The user's turns of a row.
        config, split: Configuration and split of the data set.
        data_files: Files to read instead of a configuration.
    """

    domain: str
    dataset: str
    num_rows: int
    to_turns: Callable[[Mapping[str, Any]], list[str]]
    config: str | None = None
    split: str = "test"
    data_files: list[str] = field(default_factory=list)


def _alpaca(row: Mapping[str, Any]) -> list[str]:
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]]


def _live_code_bench(row: Mapping[str, Any]) -> list[str]:
    starter = row.get("starter_code")
    if starter:
        return [f"{row['question_content']}\n\nWrite Python code that starts like this:\n```python\n{starter}\n```"]
    return [f"{row['question_content']}\n\nWrite Python code that reads standard input and prints the answer."]


def _mbpp(row: Mapping[str, Any]) -> list[str]:
    tests = "\n".join(row["test_list"])
    return [PYTHON.format(f'"""\n{row["prompt"]}\n{tests}\n"""')]


HUB_TASKS = {
    "gsm8k": HubTask("math", "openai/gsm8k", 500, lambda row: [STEP_BY_STEP.format(row["question"])], "main"),
    "math500": HubTask("math", "HuggingFaceH4/MATH-500", 500, lambda row: [STEP_BY_STEP.format(row["problem"])]),
    "aime25": HubTask(
        "math", "MathArena/aime_2025", 30, lambda row: [STEP_BY_STEP.format(row["problem"])], split="train"
    ),
    "mbpp": HubTask("code", "google-research-datasets/mbpp", 256, _mbpp, "sanitized"),
    "humaneval": HubTask("code", "openai/openai_humaneval", 164, lambda row: [PYTHON.format(row["prompt"])]),
    "livecodebench": HubTask(
        "code",
        "livecodebench/code_generation_lite",
        500,
        _live_code_bench,
        data_files=["test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7))],
    ),
    "mt-bench": HubTask("chat", "HuggingFaceH4/mt_bench_prompts", 80, lambda row: list(row["prompt"]), split="train"),
    "alpaca": HubTask("chat", "tatsu-lab/alpaca", 500, _alpaca, split="train"),
    "arena-hard": HubTask(
        "chat",
        "lmarena-ai/arena-hard-auto",
        500,
        lambda row: [row["prompt"]],
        data_files=["data/arena-hard-v2.0/question.jsonl"],
    ),
}
TASK_NAMES = tuple(HUB_TASKS)
DOMAINS = ("math", "code", "chat", "other")


def load_task(name: str, max_prompts: int | None = None, seed: int = 0) -> Task:
    """
    Loads a task.

    Args:
        name: One of `TASK_NAMES`, read from the Hub, or a path of a JSONL file. Each line of a file has `turns` (a list
            of user turns), `messages` (role and content; answers in it are skipped) or
            `prompt` (a string). A file named after one of the tasks belongs to that task's domain.
        max_prompts: Size of a random sample to take instead of all prompts.
        seed: Seed of the sample.

    Raises:
        ValueError: for an unknown name, or a file with lines that hold no prompt.
        ImportError: when a task is on the Hub and `datasets` is not installed.
    """
    if name in HUB_TASKS:
        task = _from_hub(name, HUB_TASKS[name])
    elif Path(name).is_file():
        path = Path(name)
        known = HUB_TASKS.get(path.stem)
        task = Task(path.stem, known.domain if known else "other", prompts_of_file(path))
    else:
        raise ValueError(f"Task {name!r} is neither a file nor one of {', '.join(TASK_NAMES)}.")
    return Task(task.name, task.domain, sampled(task.prompts, max_prompts, seed))


def prompts_of_file(path: Path) -> list[Prompt]:
    """
    The prompts of a file.

    Raises:
        ValueError: naming every row that holds no prompt.
    """
    prompts, wrong = [], []
    for number, row in enumerate(read_prompts(path), start=1):
        try:
            prompts.append(to_prompt(row))
        except (ValueError, KeyError, TypeError):
            wrong.append(number)
    if wrong:
        numbers = f"{', '.join(map(str, wrong[:10]))}{' and more' if len(wrong) > 10 else ''}"
        raise ValueError(
            f"'{path}' is not a file of prompts: there is no prompt in row{'s' * (len(wrong) > 1)} {numbers}. Each row must be a "
            "JSON object with 'turns' (list of strings), 'messages' (list of role and content) or 'prompt' (string)."
        )
    return prompts


def to_prompt(row: Mapping[str, Any]) -> Prompt:
    """
    The prompt in a row of `turns`, `messages` or `prompt`.

    Raises:
        ValueError: when there is none.
    """
    system = None
    if "turns" in row:
        turns = list(row["turns"])
    elif "messages" in row:
        messages = [as_message(message) for message in row["messages"]]
        turns = [message["content"] for message in messages if message["role"] == "user"]
        system = next((message["content"] for message in messages if message["role"] == "system"), None)
    else:
        turns = [row["prompt"]]
    if not turns or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"No prompt in {sorted(row)}.")
    return Prompt(turns, system)


def sampled(prompts: list[Prompt], max_prompts: int | None, seed: int) -> list[Prompt]:
    """At most `max_prompts` prompts, drawn at random because data sets are often sorted by category; their order is kept."""
    if max_prompts is None or max_prompts >= len(prompts):
        return prompts
    chosen = sorted(random.Random(seed).sample(range(len(prompts)), max_prompts))
    return [prompts[i] for i in chosen]


def _from_hub(name: str, source: HubTask) -> Task:
    if source.data_files:
        files = [f"hf://datasets/{source.dataset}/{file}" for file in source.data_files]
        rows = read_data_set("json", files=files)
    else:
        rows = read_data_set(source.dataset, source.config, split=source.split)
    rows = rows.select(range(min(source.num_rows, len(rows))))
    return Task(name, source.domain, [Prompt(source.to_turns(row)) for row in rows])
