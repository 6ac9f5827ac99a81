"""Two drafters along the same answers, and what is said of it."""

import numpy as np
import pytest
import torch

import tiny
from dspark_hf.adapting.comparison import Change, compare, verdict
from dspark_hf.evaluation.replay import replay
from dspark_hf.evaluation.statistics import Estimate


@pytest.fixture(scope="module")
def answers():
    target, prompt = tiny.bigram(), torch.arange(5, 9)
    rows = []
    for start in range(6):
        ids = target.generate((prompt + start)[None], max_new_tokens=12, do_sample=False, eos_token_id=None)[0]
        rows.append({"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= len(prompt)})
    return target, rows


def test_gain_is_the_ratio_of_rounds(answers):
    target, rows = answers
    random, perfect = tiny.random_drafter(target), tiny.perfect_drafter(target)
    change = compare(random, perfect, target, rows)
    rounds = [sum(replay(drafter, target, row).rounds for row in rows) for drafter in (random, perfect)]
    assert change.answers == len(rows)
    np.testing.assert_allclose(change.gain.value, rounds[0] / rounds[1] - 1)
    assert change.gain.low > 0 and change.after.value > change.before.value


def test_the_same_drafter_gains_nothing(answers):
    target, rows = answers
    drafter = tiny.random_drafter(target)
    change = compare(drafter, drafter, target, rows)
    assert change.gain == Estimate(0.0, 0.0, 0.0)


def change(gain, low, high):
    return Change(20, Estimate(2.0, 1.9, 2.1), Estimate(2.0 * (1 + gain), 1.9, 2.1), Estimate(gain, low, high))


def test_verdicts():
    gained, even, lost = change(0.2, 0.1, 0.3), change(0.0, -0.1, 0.1), change(-0.1, -0.15, -0.05)
    assert verdict(gained, even, "out").endswith("Use out.")
    assert verdict(gained, None, "out").endswith("Use out.")
    assert "+20.0 % (+10.0 to +30.0)" in verdict(gained, None, "out")
    assert "for prompts like yours only" in verdict(gained, lost, "out")
    assert "keep the drafter that you have" in verdict(even, even, "out")
