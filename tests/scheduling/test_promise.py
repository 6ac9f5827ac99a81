"""
What schedulers promise: never more than 3 % below the better of plain decoding and whole blocks, and 10 % with a stale curve.

The asynchronous scheduler keeps that on every curve. Algorithm 1 keeps it where the cost of a pass has no steps, in front of
which it stops. Rounds are simulated: the cost of a pass is read from a curve and drafts are accepted with the probability that
the drafter gives, so that nothing is timed and every number is the same in each run.
"""

import numpy as np
import pytest
import torch

from dspark_hf.scheduling import AsyncThroughputScheduler, RowsBackoff, ThroughputCurve, ThroughputScheduler

NUM_ROUNDS = 400
BLOCK = 7
TOKENS = np.arange(1, 300)
CURVES = {
    "accelerator": 10 + 0.02 * TOKENS,
    "slow processor": 3 + 1.5 * TOKENS,
    "hills": 10 + 0.5 * TOKENS + np.where((TOKENS % 8 >= 2) & (TOKENS % 8 <= 6), 3.0, 0.0),
    "one hill at 12": np.where((TOKENS > 10) & (TOKENS < 16), 24.0, 10 + 0.6 * TOKENS),
}
QUALITY = {"good": (0.75, 0.98), "mixed": (0.2, 0.98), "useless": (0.0, 0.1)}


def curve_of(name, factor=1.0):
    """The curve of that name, in which each token beyond the first costs `factor` times as much."""
    seconds = CURVES[name]
    return ThroughputCurve(TOKENS, seconds[0] + factor * (seconds - seconds[0])).with_assumed_drafting(0.05)


def speed(num_rows, quality, true, scheduler=None, believed=None, drafts=BLOCK):
    """Tokens per second of simulated rounds; without a scheduler, `drafts` drafts of each row are verified."""
    rng = np.random.default_rng(0)
    seconds = 1 / true.table(num_rows * (1 + BLOCK), 0)
    backoff = RowsBackoff(believed or true, num_rows) if scheduler is not None else None
    tokens = elapsed = 0.0
    rows = list(range(num_rows))
    for _ in range(NUM_ROUNDS):
        confidence = rng.uniform(*QUALITY[quality], (num_rows, BLOCK))
        would_pass = (rng.random((num_rows, BLOCK)) < confidence).cumprod(1)
        wanted = [drafts > 0] * num_rows if backoff is None else backoff.wants_drafts(rows)
        most = [drafts if wants else 0 for wants in wanted]
        lengths = most
        if scheduler is not None and any(wanted):
            lengths = scheduler.schedule(torch.from_numpy(confidence), most, rows)
        accepted = [int(passed[:length].sum()) for passed, length in zip(would_pass, lengths, strict=True)]
        tokens += num_rows + sum(accepted)
        elapsed += seconds[num_rows + sum(lengths)] + true.drafting_seconds(num_rows) * any(wanted)
        if backoff is not None:
            backoff.observe(rows, lengths, accepted, has_drafted=any(wanted))
    return tokens / elapsed


def shortfall(num_rows, quality, curve, build, believed=None):
    """How far the scheduler is below the better of plain decoding and whole blocks; negative where it is above."""
    best = max(speed(num_rows, quality, curve, drafts=n) for n in (0, BLOCK))
    believed = believed or curve
    return 1 - speed(num_rows, quality, curve, build(believed), believed) / best


every_batch = pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32])
every_quality = pytest.mark.parametrize("quality", QUALITY)
every_curve = pytest.mark.parametrize("name", CURVES)


@every_batch
@every_quality
@every_curve
def test_never_more_than_3_percent_below_the_better(name, quality, num_rows):
    assert shortfall(num_rows, quality, curve_of(name), AsyncThroughputScheduler) <= 0.03


@every_batch
@every_quality
@pytest.mark.parametrize("name", ["accelerator", "slow processor"])
def test_algorithm_1_on_curves_without_steps(name, quality, num_rows):
    assert shortfall(num_rows, quality, curve_of(name), ThroughputScheduler) <= 0.03


@every_batch
@every_quality
@every_curve
@pytest.mark.parametrize("factor", [0.5, 2.0], ids=["tokens cost twice as much now", "tokens cost half as much now"])
def test_a_stale_curve_costs_at_most_10_percent(factor, name, quality, num_rows):
    stale = curve_of(name, factor)
    assert shortfall(num_rows, quality, curve_of(name), AsyncThroughputScheduler, stale) <= 0.1


def test_algorithm_1_stops_in_front_of_a_hill():
    """Negative control: the simulation sees a scheduler that does not keep the promise."""
    assert shortfall(4, "good", curve_of("hills"), ThroughputScheduler) > 0.1


class NeverFilled(AsyncThroughputScheduler):
    """Decides by the smoothed curve, as if a pass over more tokens were never cheaper."""

    def __init__(self, curve):
        super().__init__(ThroughputCurve(curve.token_counts, curve.pass_s, drafting=curve.drafting))


def test_a_hill_costs_more_than_that_if_nothing_is_filled_up():
    name = "one hill at 12"
    filled, not_filled = (
        max(shortfall(2, quality, curve_of(name), build) for quality in QUALITY)
        for build in (AsyncThroughputScheduler, NeverFilled)
    )
    assert filled <= 0.03 < not_filled
