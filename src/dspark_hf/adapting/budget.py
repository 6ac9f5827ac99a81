"""How many steps fit into the time that training may take."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerCallback

PROBED_STEPS = 5
# A step of evaluation is a forward pass alone.
EVALUATION_COST = 0.5
LEAST_STEPS = 10


@dataclass
class StepClock(TrainerCallback):
    """Takes the time of each step."""

    seconds: list[float] = field(default_factory=list)
    _started: float = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self._started)

    @property
    def step_s(self) -> float:
        """Seconds of a typical step; the first one also allocates and compiles."""
        return statistics.median(self.seconds[1:])


class Deadline(TrainerCallback):
    """Ends training when its time is up, for machines that have become slower since the steps were timed."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if time.monotonic() - self._started > self.seconds:
            control.should_evaluate = control.should_save = control.should_training_stop = True


def steps_within(seconds: float, step_s: float, evaluations: int, evaluated_batches: int) -> int:
    """
    Training steps that fit into some time, with the evaluations between them.

    Args:
        seconds: The time.
        step_s: Seconds per training step.
        evaluations: How often the drafter is evaluated.
        evaluated_batches: Batches of an evaluation.
    """
    spent = evaluations * evaluated_batches * EVALUATION_COST
    return max(LEAST_STEPS, int(seconds / step_s - spent))
