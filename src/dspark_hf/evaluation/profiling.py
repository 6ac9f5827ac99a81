"""The time of a round by stages, as the decoding loop records them."""

from __future__ import annotations

import functools
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from ..generation import StageClock
from ..generation.telemetry import InnerStage
from ..transformers_names import GenerativeModel, compute_device
from .meter import synchronize
from .methods import Method
from .runner import BenchSettings, answer
from .tasks import Task

PYTHON = "Python"  # Time outside the inner stages.
PARTS = (*get_args(InnerStage), PYTHON)


def profile_methods(
    target: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: list[Method],
    tasks: list[Task],
    settings: BenchSettings,
    num_prompts: int = 2,
) -> dict[str, Any]:
    """Profiles each of our methods over the first prompts of each task, by the method's name."""
    profiles = {}
    for method in methods:
        if method.drafter is None:
            continue
        answer(target, tokenizer, method, tasks[0].prompts[0], settings)  # warms up
        clock = StageClock(functools.partial(synchronize, compute_device(target)))
        num_rounds = 0
        for task in tasks:
            for index, prompt in enumerate(task.prompts[:num_prompts]):
                turns = answer(target, tokenizer, method, prompt, settings, index, clock)
                num_rounds += sum(len(turn.rounds) for turn in turns)
        profiles[method.name] = profile_of(clock, num_rounds)
    return profiles


def profile_of(clock: StageClock, num_rounds: int) -> dict[str, Any]:
    """
    Milliseconds per round and share of a round, by part. Prompts do not count.

    Args:
        clock: Has timed the calls.
        num_rounds: Rounds in them.
    """
    seconds = dict.fromkeys(PARTS, 0.0)
    for (outermost, name), elapsed in clock.seconds.items():
        if outermost != "prompt":
            seconds[name if name in PARTS else PYTHON] += elapsed
    total = sum(seconds.values()) or float("nan")
    return {
        "num_rounds": num_rounds,
        "round_ms": 1e3 * total / num_rounds if num_rounds else None,
        "parts": {
            part: {"ms": 1e3 * elapsed / max(num_rounds, 1), "share": elapsed / total}
            for part, elapsed in seconds.items()
        },
    }
