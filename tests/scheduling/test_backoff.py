"""Drafting is left out while it loses time."""

import random

import pytest

from dspark_hf.scheduling import DraftingBackoff, RowsBackoff, ThroughputCurve


def run(backoff, accept, num_tokens, cost=0.5):
    """
    Time, in plain passes, of `num_tokens` tokens, and for each round its first token and whether it was drafted.

    Args:
        accept: Accepted drafts of the round that starts at a token.
        cost: Time of a drafted round beyond that of a plain one.
    """
    token, elapsed, rounds = 0, 0.0, []
    while token < num_tokens:
        drafts = backoff.should_draft()
        accepted = accept(token) if drafts else 0
        rounds.append((token, drafts))
        backoff.observe(accepted, 7 if drafts else 0)
        token += 1 + accepted
        elapsed += 1 + cost * drafts
    return elapsed, rounds


class Always(DraftingBackoff):
    """Drafts in every round."""

    def should_draft(self):
        return True


@pytest.mark.parametrize("cost", [0.2, 0.5, 1.0, 1.5])
@pytest.mark.parametrize("num_tokens", [128, 512, 4096])
def test_a_useless_drafter_costs_less_than_a_tenth(cost, num_tokens):
    elapsed, _ = run(DraftingBackoff(cost), lambda _: 0, num_tokens, cost)
    assert elapsed / num_tokens - 1 < 0.1


def test_without_back_off_it_costs_the_drafting():
    elapsed, _ = run(Always(0.5), lambda _: 0, 512)
    assert elapsed / 512 - 1 == pytest.approx(0.5)


def test_pauses_double_up_to_the_longest():
    backoff = DraftingBackoff(0.5, patience=1.0, first_pause=2, longest_pause=8)
    _, rounds = run(backoff, lambda _: 0, 40)
    tried = [token for token, drafted in rounds if drafted]
    assert tried[:2] == [0, 1]
    assert [b - a - 1 for a, b in zip(tried[1:], tried[2:])] == [2, 4, 8, 8, 8]


def geometric(p, seed):
    """Accepted drafts of 7 when each passes with probability `p`."""
    rng = random.Random(seed)
    return lambda _: next((k for k in range(7) if rng.random() >= p), 7)


@pytest.mark.parametrize("p", [0.5, 0.6, 0.7, 0.8, 0.9])
def test_a_useful_drafter_is_rarely_paused(p):
    with_backoff = sum(run(DraftingBackoff(0.5), geometric(p, seed), 512)[0] for seed in range(20))
    always = sum(run(Always(0.5), geometric(p, seed), 512)[0] for seed in range(20))
    assert with_backoff < 1.03 * always


def test_drafting_resumes_when_the_text_gets_easier():
    _, rounds = run(DraftingBackoff(0.5), lambda token: 3 if token >= 200 else 0, 1000)
    first = min(token for token, drafted in rounds if drafted and token >= 200)
    assert first <= 400  # The pause that was running is no longer than all that came before.
    assert all(drafted for token, drafted in rounds if token >= first)


def test_savings_carry_over_a_bad_stretch():
    _, rounds = run(DraftingBackoff(0.5), lambda token: 0 if 100 <= token < 110 else 3, 200)
    assert all(drafted for _, drafted in rounds)


def test_a_full_account_makes_the_next_pause_short_again():
    backoff = DraftingBackoff(0.5, patience=1.0, savings=1.0, first_pause=2)
    for _ in range(20):
        backoff.observe(0, 7 if backoff.should_draft() else 0)
    while not backoff.should_draft():
        backoff.observe(0, 0)
    for _ in range(5):
        backoff.observe(3, 7)
    for _ in range(2):
        backoff.observe(0, 7)
    skipped = 0
    while not backoff.should_draft():
        backoff.observe(0, 0)
        skipped += 1
    assert skipped == 2


def test_a_round_that_breaks_even_does_not_cause_a_pause():
    backoff = DraftingBackoff(1.0, patience=0.5)
    for _ in range(50):
        backoff.observe(1, 7)
    assert backoff.should_draft()


def test_rounds_of_known_cost():
    dear, cheap = DraftingBackoff(0.5), DraftingBackoff(0.5)
    for _ in range(3):
        dear.observe(1, 7, cost=2.0)
        cheap.observe(1, 7, cost=0.1)
    assert cheap.should_draft() and not dear.should_draft()


def test_start_forgets():
    backoff = DraftingBackoff(0.5, patience=0.5)
    backoff.observe(0, 7)
    assert not backoff.should_draft()
    backoff.start()
    assert backoff.should_draft()


# ---------------------------------------------------------------------- several rows

CURVE = ThroughputCurve([1, 2], [1.0, 1.05], drafting={1: 0.2})


def decode(backoff, accept, num_rounds, num_rows=4, block=4):
    """Drafts sent in each round by each row, `[num_rounds, num_rows]`; `accept` holds what each row accepts of a block."""
    sent = []
    for _ in range(num_rounds):
        lengths = [block if wants else 0 for wants in backoff.wants_drafts(range(num_rows))]
        backoff.observe(range(num_rows), lengths, [min(n, a) for n, a in zip(lengths, accept, strict=True)])
        sent.append(lengths)
    return sent


def test_drafting_together_ends_when_no_row_profits():
    sent = decode(RowsBackoff(CURVE, 4), [0, 0, 0, 0], 100)
    assert sum(any(lengths) for lengths in sent) < 10
    assert all(any(lengths) == all(lengths) for lengths in sent)


def test_a_row_whose_drafts_are_rejected_stops_sending_them_and_the_others_continue():
    sent = decode(RowsBackoff(CURVE, 4), [3, 3, 3, 0], 200)
    assert all(all(lengths[:3]) for lengths in sent)
    assert sum(bool(lengths[3]) for lengths in sent) < 60


def test_many_rows_know_sooner_that_drafting_does_not_pay():
    first = {n: decode(RowsBackoff(CURVE, n), [0] * n, 20, num_rows=n).index([0] * n) for n in (1, 16)}
    assert first[16] < first[1]


def test_a_round_costs_its_drafting_and_the_longer_pass():
    curve = ThroughputCurve([1, 2, 9], [1.0, 1.1, 1.8], drafting={1: 0.3, 2: 0.4})
    assert curve.round_cost(num_rows=1, num_drafts=8) == pytest.approx(1.1)
    assert curve.round_cost(num_rows=2, num_drafts=7) == pytest.approx((1.8 + 0.4) / 1.1 - 1)
    assert curve.pass_cost(num_rows=1, num_drafts=0) == 0.0
    assert curve.drafting_seconds(4) == pytest.approx(0.8)


@pytest.mark.parametrize("is_accelerated", [True, False], ids=["accelerator", "cpu"])
def test_assumed_costs(is_accelerated):
    curve = ThroughputCurve.assumed(0.2, is_accelerated)
    assert curve.round_cost(1, 7) == pytest.approx(0.2 + 7 * (0.005 if is_accelerated else 0.07))
    # The drafter reads its weights once for all rows, as the target does.
    assert curve.drafting_seconds(32) == pytest.approx(0.2 * curve.seconds(32))


def test_each_row_has_its_own_context():
    """What a pass takes for its rows alone makes drafts a smaller part of it."""
    one, several = ({}, {2: 1.0})
    costs = [ThroughputCurve([1, 2, 4], [1.0, 1.0, 2.0], rows=rows).pass_cost(2, 2) for rows in (one, several)]
    assert costs == [pytest.approx(1.0), pytest.approx(0.5)]


@pytest.mark.parametrize(
    "settings", [{"break_even": -1.0}, {"patience": 0.0}, {"first_pause": 0}, {"longest_pause": 4}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValueError, match="must not be negative"):
        DraftingBackoff(**settings)


def test_tokens_fed_again_cost_as_much_as_drafts():
    """Drafting that just pays no longer does when every round feeds tokens again."""
    costs = ThroughputCurve([1, 2], [1.0, 1.3])  # Each further token costs .3 of a pass.

    def rounds_until_pause(fed_again):
        backoff = RowsBackoff(costs, 1)
        for index in range(100):
            if not any(backoff.wants_drafts([0])):
                return index
            backoff.observe([0], [3], [1], [fed_again])
        return None

    assert rounds_until_pause(0) is None
    assert rounds_until_pause(2) is not None
