"""Where the time of a round goes. Timers are put around the parts of the loop while profiling, and nowhere else.

Each part counts its own time only: what a part called by another takes is taken off the other. What no timer sees is
Python.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase

from ..draft_cache import DraftCache
from ..generation.candidate_generator import DSparkCandidateGenerator
from ..generation.logits_process import SequentialHeadLogitsProcessor
from ..generation.target_pass import TargetPass
from ..generation.telemetry import Round
from ..generation.token_choice import TokenChoice
from ..modeling_dspark import DSparkDrafter
from .meter import synchronize
from .methods import Method
from .runner import BenchSettings, answer
from .tasks import Task

PYTHON = "Python"
# Methods and the part that their time counts to. A part that is called inside another takes its time off that one.
TIMED: tuple[tuple[type, str, str], ...] = (
    (DSparkDrafter, "forward", "backbone"),
    (DSparkDrafter, "base_logits", "draft LM head"),
    (DSparkDrafter, "project_context", "context features"),
    (DSparkDrafter, "extend_cache", "context features"),
    (DraftCache, "append", "cache handling"),
    (SequentialHeadLogitsProcessor, "__call__", "sequential stage"),
    (DSparkCandidateGenerator, "_sequential_stage", "sequential stage"),
    (DSparkCandidateGenerator, "_confidence", "confidence"),
    (TargetPass, "commit", "cache handling"),
    (TokenChoice, "all_tokens", "acceptance"),
    (TokenChoice, "_verify_slot", "acceptance"),
    (LogitsProcessorList, "__call__", "processors"),
)
PARTS = tuple(dict.fromkeys(["target pass", *(part for _, _, part in TIMED), PYTHON]))


@dataclass
class RoundProfile:
    """
    Args:
        seconds: Of each part, all rounds together.
        rounds_s: Of the rounds as a whole.
        num_rounds: Rounds timed.
    """

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    rounds_s: float = 0.0
    num_rounds: int = 0

    def add(self, rounds: list[Round]) -> None:
        """Says which rounds ran, as `record_speculation` recorded them."""
        self.num_rounds += len(rounds)
        self.rounds_s += sum(r.drafting_s + r.verifying_s + r.elsewhere_s for r in rounds)

    def to_dict(self) -> dict[str, Any]:
        """Milliseconds a round and share of a round, by part."""
        total = sum(self.seconds.values()) or float("nan")
        return {
            "num_rounds": self.num_rounds,
            "round_ms": 1e3 * total / self.num_rounds if self.num_rounds else None,
            "parts": {
                part: {"ms": 1e3 * seconds / max(self.num_rounds, 1), "share": seconds / total}
                for part, seconds in self.seconds.items()
            },
        }


@contextlib.contextmanager
def profiled(target: PreTrainedModel) -> Iterator[RoundProfile]:
    """
    Times the rounds of the `generate` calls with a DSpark drafter made inside; prompts' passes do not count. The rounds have
    to be recorded and given to [`~RoundProfile.add`] before leaving.
    """
    profile, clock = RoundProfile(), _Clock(target.device)
    with contextlib.ExitStack() as stack:
        for owner, name, part in TIMED:
            stack.enter_context(_patched(owner, name, functools.partial(clock.timing, part)))
        # Rounds begin with the first draft and end with the call.
        stack.enter_context(_patched(DSparkCandidateGenerator, "draft", clock.counting_from))
        stack.enter_context(_patched(TargetPass, "__init__", clock.pausing_at))
        forward = target.forward
        target.forward = clock.timing("target pass", forward)
        stack.callback(_restore_forward, target, forward)
        yield profile
    profile.seconds |= clock.seconds
    profile.seconds[PYTHON] = max(profile.rounds_s - sum(clock.seconds.values()), 0.0)


def profile_methods(
    target: PreTrainedModel,
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
        with profiled(target) as profile:
            for task in tasks:
                for index, prompt in enumerate(task.prompts[:num_prompts]):
                    for turn in answer(target, tokenizer, method, prompt, settings, index):
                        profile.add(turn.rounds)
        profiles[method.name] = profile.to_dict()
    return profiles


class _Clock:
    """Adds up the time that each part takes by itself."""

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = {}
        self._device = device
        self._is_counting = False
        self._inner: list[float] = []  # time of timed parts inside each of those that are running

    def timing(self, part: str, function: Callable) -> Callable:
        """`function`, timed as `part`."""

        @functools.wraps(function)
        def timed(*args, **kwargs):
            if not self._is_counting:
                return function(*args, **kwargs)
            synchronize(self._device)
            started = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                synchronize(self._device)
                elapsed = time.perf_counter() - started
                own = elapsed - self._inner.pop()
                self.seconds[part] = self.seconds.get(part, 0.0) + own
                if self._inner:
                    self._inner[-1] += elapsed

        return timed

    def counting_from(self, function: Callable) -> Callable:
        return self._switching(True, function)

    def pausing_at(self, function: Callable) -> Callable:
        return self._switching(False, function)

    def _switching(self, on: bool, function: Callable) -> Callable:
        @functools.wraps(function)
        def switched(*args, **kwargs):
            self._is_counting = on
            return function(*args, **kwargs)

        return switched


@contextlib.contextmanager
def _patched(owner: type, name: str, wrap: Callable[[Callable], Callable]) -> Iterator[None]:
    own = owner.__dict__.get(name)
    setattr(owner, name, wrap(getattr(owner, name)))
    try:
        yield
    finally:
        if own is None:  # It is a base class's.
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _restore_forward(target: PreTrainedModel, forward: Callable) -> None:
    if getattr(forward, "__self__", None) is target:
        del target.forward  # the class's own again
    else:
        target.forward = forward
