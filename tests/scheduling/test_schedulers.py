"""The verify schedulers: reference instances, exhaustive search, causality, cost."""

import itertools
import json
import sys

import numpy as np
import pytest
import torch

from dspark_hf.scheduling import (
    AsyncThroughputScheduler,
    ConfidenceThreshold,
    FixedLength,
    ThroughputCurve,
    ThroughputScheduler,
    build_scheduler,
)
from dspark_hf.scheduling.admission import (
    admitted_lengths,
    count_of_best,
    count_until_no_gain,
    rank_candidates,
    throughputs,
)

SMOOTH = ThroughputCurve.from_steps_per_second({b: 1 / (10 + b) for b in range(1, 65)})
STEPS = ThroughputCurve.from_steps_per_second({b: 1 / (1 + 0.4 * (b // 4)) for b in range(1, 65)})
FLAT = ThroughputCurve([1], [0.01])
HILL = ThroughputCurve(
    range(1, 65), [10 + b + 6 * (5 <= b % 8 <= 7) for b in range(1, 65)]
)  # Twelve cost more than sixteen.
CLIFF = ThroughputCurve([3, 4, 5], [1.0, 2.0, 2.0])


class Unconstrained(ThroughputScheduler):
    """What a scheduler must not do: the best choice over the confidences of the drafts it decides about."""

    def _count(self, ranking, row_ids, rates):
        return count_of_best(throughputs(ranking, len(row_ids), rates))


def warmed_up(scheduler, num_rows, num_slots, seed=1):
    """The scheduler after a few rounds, so that one with state uses it."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        scheduler.schedule(torch.rand(num_rows, num_slots, generator=generator), [num_slots] * num_rows)
    return scheduler


SCHEDULERS = {
    "fixed length": lambda curve: FixedLength(2),
    "threshold": lambda curve: ConfidenceThreshold(0.5),
    "throughput": ThroughputScheduler,
    "asynchronous": AsyncThroughputScheduler,
}
every_scheduler = pytest.mark.parametrize("build", SCHEDULERS.values(), ids=SCHEDULERS)
every_curve = pytest.mark.parametrize(
    "curve", [SMOOTH, STEPS, HILL, FLAT], ids=["smooth curve", "curve with steps", "curve with hills", "flat curve"]
)


# ---------------------------------------------------------------------- reference instances


@pytest.fixture(scope="module")
def reference(data):
    return json.loads((data / "scheduling" / "h_scheduler.json").read_text())


def exact_curve(sps):
    return ThroughputCurve.from_steps_per_second({int(b): s for b, s in sps.items()})


@pytest.mark.parametrize("index", range(12))
def test_lengths_and_path_of_the_reference_instances(reference, index):
    case = reference["instances"][index]
    confidence = torch.tensor(case["confidences"], dtype=torch.float64)
    num_rows, num_slots = confidence.shape
    curve = exact_curve(case["sps"])
    scheduler = ThroughputScheduler(curve)
    assert scheduler.schedule(confidence, [num_slots] * num_rows) == case["expected_prefix_lengths"]

    ranking = rank_candidates(confidence.numpy(), np.full(num_rows, num_slots))
    expected = [row for row, _ in case["sorted_candidates_request_position"]]
    assert ranking.rows.tolist() == expected
    theta = throughputs(ranking, num_rows, curve.table(num_rows * (1 + num_slots)))
    path = case["greedy_path"]
    np.testing.assert_allclose(theta[: len(path)], path, rtol=1e-12)
    assert theta[count_until_no_gain(theta)] == pytest.approx(case["expected_theta"], rel=1e-12)
    unconstrained = admitted_lengths(ranking, count_of_best(theta), num_rows)
    assert unconstrained == case["retrospective_no_break_prefix_lengths"]


@pytest.mark.parametrize("index", range(2))
def test_appendix_lengths(reference, index):
    appendix = reference["appendix_a"]
    case, curve = appendix["cases"][index], exact_curve(appendix["sps"])
    confidence = torch.tensor([case["confidences"]], dtype=torch.float64)
    assert ThroughputScheduler(curve).schedule(confidence, [2]) == [case["early_stopping_prefix_length"]]
    assert Unconstrained(curve).schedule(confidence, [2]) == [case["retrospective_prefix_length"]]


def test_ties_go_by_row_then_by_slot():
    ranking = rank_candidates(np.array([[0.5, 1.0, 1.0], [0.5, 1.0, 0.5]]), np.array([3, 3]))
    assert ranking.rows.tolist() == [0, 0, 0, 1, 1, 1]
    lengths = [admitted_lengths(ranking, n, 2) for n in range(7)]
    assert lengths == [[0, 0], [1, 0], [2, 0], [3, 0], [3, 1], [3, 2], [3, 3]]


def test_a_draft_that_only_keeps_the_throughput_is_not_admitted():
    # 1 * 1.0 == 2 * 0.5: not strictly better.
    curve = ThroughputCurve.from_steps_per_second({1: 1.0, 2: 0.5, 3: 0.5})
    assert ThroughputScheduler(curve).schedule(torch.ones(1, 2), [2]) == [0]


# ---------------------------------------------------------------------- against exhaustive search


def best_of_all(confidence, curve):
    """The highest throughput over every combination of lengths."""
    survival = confidence.double().cumprod(1)
    num_rows, num_slots = confidence.shape
    best = 0.0
    for lengths in itertools.product(range(num_slots + 1), repeat=num_rows):
        tau = num_rows + sum(float(survival[r, :n].sum()) for r, n in enumerate(lengths))
        best = max(best, tau * float(curve.steps_per_second(num_rows + sum(lengths))))
    return best


def throughput_of(lengths, confidence, curve):
    survival = confidence.double().cumprod(1)
    tau = len(lengths) + sum(float(survival[r, :n].sum()) for r, n in enumerate(lengths))
    return tau * float(curve.steps_per_second(len(lengths) + sum(lengths)))


@pytest.mark.parametrize("seed", range(40))
def test_early_stop_is_optimal_where_the_throughput_is_unimodal(seed):
    rng = np.random.default_rng(seed)
    num_rows, num_slots = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    confidence = torch.from_numpy(rng.uniform(0, 1, (num_rows, num_slots)))
    # Seconds that grow ever faster: with gains that only fall, the throughput rises, then falls.
    curve = ThroughputCurve(range(1, 20), 1 + rng.uniform(0, 0.3) * np.arange(19) ** rng.uniform(1, 2))
    lengths = ThroughputScheduler(curve).schedule(confidence, [num_slots] * num_rows)
    assert throughput_of(lengths, confidence, curve) == pytest.approx(best_of_all(confidence, curve), rel=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_capacity_search_is_optimal_on_any_curve(seed):
    rng = np.random.default_rng(seed)
    num_rows, num_slots = int(rng.integers(1, 4)), int(rng.integers(1, 5))
    confidence = torch.from_numpy(rng.uniform(0, 1, (num_rows, num_slots)))
    curve = ThroughputCurve(range(1, 20), np.cumsum(rng.choice([0.0, 0.0, 0.5], 19)) + 1)
    scheduler = AsyncThroughputScheduler(curve)
    for _ in range(2):
        scheduler.schedule(confidence, [num_slots] * num_rows)
    lengths = scheduler.schedule(confidence, [num_slots] * num_rows)  # the same confidences as two rounds ago
    assert throughput_of(lengths, confidence, curve) == pytest.approx(best_of_all(confidence, curve), rel=1e-12)


# ---------------------------------------------------------------------- causality


def admissions_that_moved(scheduler, num_rows=3, num_slots=5, num_trials=200):
    """How often a decision about slots 1..k of a row changed when the confidences after slot k did, as they do with `x_k`."""
    generator = torch.Generator().manual_seed(0)
    moved = 0
    for trial in range(num_trials):
        confidence = torch.rand(num_rows, num_slots, generator=generator)
        if trial % 2:  # Exact ties: few values, certainty among them.
            confidence = torch.tensor([0.0, 0.5, 1.0])[torch.randint(3, confidence.shape, generator=generator)]
        row, slot = trial % num_rows, trial % num_slots
        other = confidence.clone()
        other[row, slot + 1 :] = torch.rand(num_slots - slot - 1, generator=generator)
        before, after = (scheduler._lengths(c, [num_slots] * num_rows, None)[row] for c in (confidence, other))
        moved += min(before, slot + 1) != min(after, slot + 1)
    return moved


@every_scheduler
@every_curve
def test_a_token_does_not_decide_about_itself(build, curve):
    assert admissions_that_moved(warmed_up(build(curve), 3, 5)) == 0


def test_the_causality_test_sees_a_search_that_looks_ahead():
    assert admissions_that_moved(Unconstrained(CLIFF), num_trials=1000) > 20


@every_scheduler
@every_curve
def test_drafting_ends_only_where_no_later_draft_would_be_verified(build, curve):
    generator = torch.Generator().manual_seed(0)
    scheduler = warmed_up(build(curve), 3, 5)
    scheduler.most_drafts = 5 + 5 + 4
    for _ in range(50):
        confidence = torch.rand(3, 5, generator=generator)
        longest = max(scheduler._lengths(confidence, [5, 5, 4], None))
        needed = [scheduler.keeps_drafting(confidence[:, : k + 1], [5, 5, 4]) for k in range(5)]
        stopped = needed.index(False) if False in needed else 5
        assert stopped >= longest
        # What was verified with all drafts is verified with those made.
        made = confidence[:, : max(stopped, 1)]
        assert scheduler._lengths(made, [min(n, stopped) for n in (5, 5, 4)], None) == scheduler._lengths(
            confidence, [5, 5, 4], None
        )


def test_confidences_of_two_rounds_ago_decide_how_many_and_current_ones_which():
    curve = ThroughputCurve.from_steps_per_second({b: 1 / (1 + b // 4) for b in range(1, 17)})
    scheduler = AsyncThroughputScheduler(curve)
    sure, unsure = torch.full((2, 4), 0.99), torch.full((2, 4), 0.01)
    first = scheduler.schedule(sure, [4, 4])
    scheduler.schedule(unsure, [4, 4])
    mixed = torch.stack([torch.full((4,), 0.3), torch.full((4,), 0.9)])
    assert sum(scheduler.schedule(mixed, [4, 4])) == 5  # up to the step at 8 tokens, as seen in the sure round
    assert sum(first) == 1  # Algorithm 1 stopped in front of the step at 4 tokens
    assert scheduler.schedule(mixed, [4, 4]) == [
        0,
        1,
    ]  # the unsure round: up to the step at 4 tokens, the likelier ones
    scheduler.start()
    assert scheduler.schedule(sure, [4, 4]) == first


def test_rows_that_left_do_not_count_for_the_capacity():
    scheduler = AsyncThroughputScheduler(SMOOTH)
    confidence = torch.tensor([[0.99] * 4, [0.001] * 4])
    for _ in range(2):
        scheduler.schedule(confidence, [4, 4], rows=[7, 9])
    today = torch.full((1, 4), 0.9)
    assert scheduler.schedule(today, [4], rows=[9]) == [0]
    scheduler.start()
    for _ in range(2):
        scheduler.schedule(confidence, [4, 4], rows=[7, 9])
    assert scheduler.schedule(today, [4], rows=[7]) == [4]


# ---------------------------------------------------------------------- the interface


@every_scheduler
def test_no_row_gets_more_than_it_may(build):
    scheduler = warmed_up(build(FLAT), 4, 3)
    assert scheduler.schedule(torch.ones(4, 3), [0, 1, 2, 3]) == [
        0,
        1,
        2,
        2 if isinstance(scheduler, FixedLength) else 3,
    ]
    assert scheduler.schedule(torch.ones(4, 3), [0, 0, 0, 0]) == [0, 0, 0, 0]
    assert scheduler.schedule(torch.ones(2, 0), [0, 0]) == [0, 0]


@every_scheduler
def test_drafts_of_zero_confidence(build):
    lengths = warmed_up(build(FLAT), 2, 3).schedule(torch.zeros(2, 3), [3, 3])
    assert lengths == ([2, 2] if build(FLAT).needs_confidence is False else [0, 0])


def test_threshold_compares_each_slot_and_ends_at_the_first_below():
    confidence = torch.tensor([[0.9, 0.6, 0.4, 0.9], [0.4, 0.9, 0.9, 0.9], [0.9, 0.5, 0.9, 0.9]])
    assert ConfidenceThreshold(0.5).schedule(confidence, [4, 4, 3]) == [2, 0, 3]
    assert ConfidenceThreshold(0.0).schedule(confidence, [4, 4, 4]) == [4, 4, 4]
    assert ConfidenceThreshold(1.5).schedule(torch.ones(1, 4), [4]) == [0]


def test_fewer_drafts_are_verified_as_passes_get_more_expensive():
    confidence = torch.full((4, 8), 0.8)
    curves = [ThroughputCurve([1, 100], [1.0, 1.0 + slope]) for slope in (0.0, 2.0, 10.0, 100.0)]
    totals = [sum(ThroughputScheduler(curve).schedule(confidence, [8] * 4)) for curve in curves]
    assert totals == sorted(totals, reverse=True) and totals[0] == 32 and totals[-1] == 0


def test_a_fixed_overhead_makes_drafts_worth_more():
    curve = ThroughputCurve([1, 100], [1.0, 40.0])
    confidence = torch.full((1, 8), 0.8)
    assert ThroughputScheduler(curve).schedule(confidence, [8]) < ThroughputScheduler(
        curve.with_overhead(2.0)
    ).schedule(confidence, [8])


@pytest.mark.parametrize(
    "scheduler", [ConfidenceThreshold(0.5), ThroughputScheduler(FLAT), AsyncThroughputScheduler(FLAT)]
)
def test_a_drafter_without_confidence_is_refused(scheduler):
    with pytest.raises(ValueError, match="enable_confidence_head"):
        scheduler.schedule(None, [3])
    assert FixedLength(2).schedule(None, [3]) == [2]


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 3\] do not fit 3 rows"):
        ThroughputScheduler(FLAT).schedule(torch.ones(2, 3), [3, 3, 3])
    with pytest.raises(ValueError, match="with 4 drafts"):
        ThroughputScheduler(FLAT).schedule(torch.ones(2, 3), [3, 4])


@pytest.mark.parametrize(
    "build", [lambda: FixedLength(-1), lambda: ConfidenceThreshold(float("nan"))], ids=["length", "threshold"]
)
def test_invalid_settings_are_refused(build):
    with pytest.raises(ValueError, match=r"must be|cannot be"):
        build()


def test_schedulers_by_name():
    assert type(build_scheduler("fixed")) is FixedLength
    assert build_scheduler("threshold", threshold=0.3).threshold == 0.3
    assert type(build_scheduler("throughput", curve=FLAT)) is ThroughputScheduler
    assert type(build_scheduler("async_throughput", curve=FLAT)) is AsyncThroughputScheduler
    with pytest.raises(ValueError, match="Unknown verify scheduler 'fast'"):
        build_scheduler("fast")
    with pytest.raises(ValueError, match="measure that once"):
        build_scheduler("throughput")


# ---------------------------------------------------------------------- cost


def num_lines(function, *args) -> int:
    """How many lines of Python a call runs, in the function itself and in all that it calls."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("build", [ThroughputScheduler, AsyncThroughputScheduler], ids=["throughput", "asynchronous"])
def test_no_python_loop_runs_over_the_drafts(build):
    """The work for each draft is left to numpy: a larger batch or block runs the same lines of Python."""
    counts = []
    for num_rows, num_slots in ((2, 4), (256, 16)):
        scheduler = warmed_up(build(ThroughputCurve([1, 5000], [0.01, 0.1])), num_rows, num_slots)
        counts.append(num_lines(scheduler.schedule, torch.rand(num_rows, num_slots), [num_slots] * num_rows))
    assert 0 < counts[1] <= counts[0] + 10


def test_a_python_loop_would_be_counted():
    def loop():
        total = 0
        for row in range(256):
            total += row

    assert num_lines(loop) > 256


def test_tokens_fed_again_count_as_part_of_the_pass():
    """On a curve with a cliff at five tokens, what is fed again decides how many drafts still fit in front of it."""
    curve = ThroughputCurve([1, 4, 5, 20], [1.0, 1.0, 3.0, 3.0])
    confidence = torch.full((1, 6), 0.9)
    for fed_again, length in ((0, 3), (2, 1), (3, 0)):
        scheduler = ThroughputScheduler(curve)
        scheduler.num_fed_again = fed_again
        assert scheduler.schedule(confidence, [6]) == [length]
