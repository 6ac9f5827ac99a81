"""Steps within a time."""

from types import SimpleNamespace

import pytest

from dspark_hf.adapting.budget import LEAST_STEPS, Deadline, StepClock, steps_within


def test_steps_fill_the_time_that_evaluations_leave():
    assert steps_within(1000, step_s=2.0, evaluations=10, evaluated_batches=4) == 500 - 10 * 4 * 0.5
    assert steps_within(1, step_s=2.0, evaluations=10, evaluated_batches=4) == LEAST_STEPS


def test_the_first_step_is_not_typical():
    assert StepClock([60.0, 2.0, 3.0, 2.0]).step_s == 2.0


@pytest.mark.parametrize("elapsed", [9.0, 11.0])
def test_training_ends_when_its_time_is_up(monkeypatch, elapsed):
    now = iter([100.0, 100.0 + elapsed])
    monkeypatch.setattr("dspark_hf.adapting.budget.time.monotonic", lambda: next(now))
    control = SimpleNamespace(should_evaluate=False, should_save=False, should_training_stop=False)
    deadline = Deadline(10.0)
    deadline.on_train_begin(None, None, control)
    deadline.on_step_end(None, None, control)
    assert {control.should_evaluate, control.should_save, control.should_training_stop} == {elapsed > 10}
