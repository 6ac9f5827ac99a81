"""Figures of merit agree with numbers worked out by hand, and intervals with their definitions."""

import math
import sys

import numpy as np
import pytest

from dspark_hf.evaluation.records import Record, Turn
from dspark_hf.evaluation.statistics import (
    conditional_acceptance,
    confidence_quality,
    confident_prefix,
    counts_of,
    ratio_of_sums,
    summarize,
    threshold_sweep,
    wilson_interval,
)
from dspark_hf.generation.telemetry import Round

pytest.importorskip("scipy.stats")


def a_round(accepted, verified=4, confidence=(0.9, 0.8, 0.4, 0.3), committed=None):
    committed = accepted + 1 if committed is None else committed
    return Round(4, verified, accepted, committed, list(confidence), 0.001, 0.002, 0.0005)


def ours(prompt=0, seconds=2.0):
    """Two rounds: 1 of 4 and 4 of 4 drafts accepted; 8 tokens with the prompt's."""
    return Record("task", prompt, "dspark", [Turn([1] * 8, seconds, 0.5, [5, 5], 2**30, [a_round(1), a_round(4)])])


def plain(prompt=0, seconds=4.0):
    return Record("task", prompt, "plain", [Turn([1] * 8, seconds, 0.5, [1] * 7)])


def test_figures_of_merit_by_hand():
    found = {name: estimate.value for name, estimate in summarize([ours()], [plain()]).items()}
    assert found == pytest.approx(
        {
            "acceptance_length": 7 / 2,
            "acceptance_rate": 5 / 8,
            "draft_length": 4,
            "verify_length": 4,
            "tokens_per_second": 4,
            "decode_tokens_per_second": 7 / 1.5,
            "drafting_ms": 1,
            "verifying_ms": 2,
            "overhead_ms": 0.5,
            "round_ms": 750,
            "speedup": 2,
            "peak_gib": 1,
        }
    )


def test_plain_decoding_has_acceptance_length_one_and_nothing_drafted():
    found = summarize([plain()], [plain()])
    assert found["acceptance_length"].value == found["speedup"].value == 1
    assert found["verify_length"].value == 0
    assert all(math.isnan(found[name].value) for name in ("acceptance_rate", "drafting_ms", "peak_gib"))


def test_other_methods_are_judged_by_what_was_fed_to_the_target():
    """Passes over 4, 1 and 3 tokens gave 6: 5 drafts verified, 3 accepted."""
    counts = counts_of(Record("task", 0, "prompt-lookup", [Turn([1] * 7, 1.0, 0.1, [4, 1, 3])]))
    assert (counts.passes, counts.verified, counts.accepted, counts.committed) == (3, 5, 3, 6)


def test_speed_is_compared_on_the_same_prompts_only():
    assert summarize([ours(0)], [plain(0), plain(1, seconds=100)])["speedup"].value == 2
    assert math.isnan(summarize([ours(0)], [plain(1)])["speedup"].value)


def test_pairing_takes_away_what_prompts_have_in_common():
    hard = np.random.default_rng(0).lognormal(sigma=1.0, size=30)
    ours_, plain_ = ([f(i, s * k) for i, s in enumerate(hard)] for f, k in ((ours, 1.0), (plain, 2.0)))
    speedup = summarize(ours_, plain_)["speedup"]
    assert (speedup.low, speedup.value, speedup.high) == pytest.approx((2, 2, 2))


def test_the_interval_is_that_of_the_mean():
    """With a constant bottom the ratio is a mean, whose interval theory knows."""
    top = np.random.default_rng(0).normal(5, 2, 200)
    estimate = ratio_of_sums(top, np.ones(200))
    half = 1.96 * top.std() / math.sqrt(200)
    assert estimate.value == pytest.approx(top.mean())
    assert (estimate.low, estimate.high) == pytest.approx((top.mean() - half, top.mean() + half), rel=0.02)


def test_one_prompt_has_no_interval():
    estimate = ratio_of_sums(np.array([3.0]), np.array([2.0]))
    assert estimate.value == 1.5 and math.isnan(estimate.low)


def test_nothing_measured_gives_nan():
    assert math.isnan(ratio_of_sums(np.zeros(0), np.zeros(0)).value)


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (7, 10), (500, 1000)])
def test_wilson_intervals_solve_their_equation(successes, trials):
    """Both ends `p` satisfy `|share - p| = z sqrt(p (1 - p) / trials)`."""
    share = successes / trials
    for end in wilson_interval(successes, trials):
        assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / trials), abs=1e-6)


def test_no_trials_have_no_interval():
    assert all(math.isnan(end) for end in wilson_interval(0, 0))


@pytest.mark.parametrize(
    "compute",
    [lambda: wilson_interval(1, 2), lambda: ratio_of_sums(np.ones(3), np.ones(3))],
    ids=["Wilson", "bootstrap"],
)
def test_without_scipy_the_extra_is_named(compute, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"dspark-hf\[eval\]"):
        compute()


def test_conditional_acceptance_counts_only_slots_that_were_reached():
    curve = conditional_acceptance([a_round(0), a_round(1), a_round(2, verified=2), a_round(4)])
    assert [e.value for e in curve] == pytest.approx([3 / 4, 2 / 3, 1, 1])


def test_a_threshold_is_replayed():
    rounds = [a_round(1), a_round(4)]
    points = threshold_sweep(rounds, [0.0, 0.5, 0.85, 0.95])
    assert [(p.accepted, p.rejected) for p in points] == [(2.5, 1.5), (1.5, 0.5), (1.0, 0.0), (0.0, 0.0)]
    assert [p.rate for p in points[:3]] == [5 / 8, 3 / 4, 1] and math.isnan(points[3].rate)


def test_a_prefix_ends_before_the_first_slot_below_the_threshold():
    assert confident_prefix([0.9, 0.2, 0.9], 0.5) == 1
    assert confident_prefix([0.9, 0.2], 0.0) == 2


def test_confidence_is_judged_by_the_survival_of_prefixes():
    rng = np.random.default_rng(0)
    rounds = []
    for _ in range(2000):  # Survival .8 and .4, and outcomes as it says.
        accepted = int(rng.random() < 0.8)
        accepted += accepted and int(rng.random() < 0.5)
        rounds.append(Round(2, 2, accepted, accepted + 1, [0.8, 0.5]))
    means = confidence_quality(rounds, None).means()
    assert means["ece"] < 0.03
    assert means["brier"] == pytest.approx((0.16 + 0.24) / 2, abs=0.02)
    assert confidence_quality(rounds, [1.0, 1.0]).after is not None
    assert confidence_quality([Round(2, 2, 1, 2)], None) is None
