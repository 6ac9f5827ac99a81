"""The pure functions that make speculative decoding lossless."""

import pytest
import torch
from scipy import stats

from dspark_hf import sampling
from dspark_hf.generation.draft_sampler import drafting_distribution
from dspark_hf.sampling import (
    NO_TOKEN,
    draw,
    draw_or_none,
    leading_true,
    passes,
    residual,
    verify_greedy,
    verify_sampled,
)

P = torch.tensor([0.5, 0.3, 0.2, 0.0])
Q = torch.tensor([0.2, 0.2, 0.2, 0.4])
NUM_ROWS = 20_000


def p_value(token_ids, distribution):
    """Of a chi-squared test that `token_ids` were drawn from `distribution`; tokens of probability zero must not occur."""
    counts = torch.bincount(token_ids, minlength=len(distribution)).double()
    possible = distribution > 0
    assert counts[~possible].sum() == 0
    expected = distribution[possible].double() / distribution.double().sum() * len(token_ids)
    return stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue


@pytest.mark.statistical
@pytest.mark.parametrize("scale", [1.0, 7.0], ids=["normalised", "not normalised"])
def test_draw(scale):
    assert p_value(draw((P * scale).expand(NUM_ROWS, -1)), P) > 1e-3
    assert p_value(draw((P * scale).expand(NUM_ROWS, -1)), torch.tensor([0.47, 0.33, 0.2, 0.0])) < 1e-6


def test_draw_keeps_leading_dimensions():
    assert draw(torch.ones(2, 3, 5)).shape == (2, 3)
    assert draw(torch.ones(5)).shape == ()


@pytest.mark.statistical
def test_a_draft_passes_with_the_ratio_of_its_probabilities():
    for token_id, expected in enumerate((1.0, 1.0, 1.0, 0.0)):
        ids = torch.full((1000,), token_id)
        assert passes(ids, Q.expand(1000, -1), P.expand(1000, -1)).float().mean() == expected
    ids = torch.zeros(NUM_ROWS, dtype=torch.long)
    accepted = passes(ids, P.expand(NUM_ROWS, -1), Q.expand(NUM_ROWS, -1)).sum().item()
    assert stats.binomtest(accepted, NUM_ROWS, 0.4).pvalue > 1e-3


def test_drafts_from_the_targets_distribution_always_pass():
    probs = torch.softmax(4 * torch.randn(500, 50), -1)
    assert passes(draw(probs), probs, probs).all()


def test_residual():
    torch.testing.assert_close(residual(P, Q), torch.tensor([0.3, 0.1, 0.0, 0.0]))
    torch.testing.assert_close(residual(P, P), P)  # Equal distributions leave nothing, and no draft is ever rejected.
    both = residual(torch.stack([P, P]), torch.stack([Q, P]))
    torch.testing.assert_close(both, torch.stack([residual(P, Q), P]))


@pytest.mark.parametrize(
    ("mask", "length"), [([1, 1, 0, 1], 2), ([0, 1, 1, 1], 0), ([1, 1, 1, 1], 4), ([], 0)], ids=str
)
def test_leading_true(mask, length):
    assert leading_true(torch.tensor([mask], dtype=torch.bool)).tolist() == [length]


def test_greedy_verification_of_rows():
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    own = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    num_accepted, follow = verify_greedy(drafts, own)
    assert num_accepted.tolist() == [3, 1, 0]
    assert follow.tolist() == [4, 2, 1]


def test_greedy_verification_without_drafts():
    num_accepted, follow = verify_greedy(torch.zeros(2, 0, dtype=torch.long), torch.tensor([[5], [6]]))
    assert num_accepted.tolist() == [0, 0] and follow.tolist() == [5, 6]


def two_tokens(verify=verify_sampled):
    """Drafts two tokens from fixed distributions and verifies them: the first two tokens of each row, `[N, 2]`."""
    drafts = draw(Q.expand(NUM_ROWS, 2, -1))
    target = torch.stack([P, P2, P2]).expand(NUM_ROWS, -1, -1)
    num_accepted, follow = verify(drafts, Q.expand(NUM_ROWS, 2, -1), target)
    tokens = torch.cat([drafts, torch.zeros(NUM_ROWS, 1, dtype=torch.long)], dim=1)
    tokens[torch.arange(NUM_ROWS), num_accepted] = follow
    fresh = draw(P2.expand(NUM_ROWS, -1))  # Rows that got no second token draw it as the next round would.
    return torch.stack([tokens[:, 0], torch.where(num_accepted >= 1, tokens[:, 1], fresh)], dim=1)


P2 = torch.tensor([0.1, 0.1, 0.3, 0.5])
JOINT = (P[:, None] * P2).flatten()


@pytest.mark.statistical
def test_verified_tokens_follow_the_targets_distribution():
    tokens = two_tokens()
    assert p_value(tokens[:, 0] * 4 + tokens[:, 1], JOINT) > 1e-3


def always_passes(draft_ids, draft_probs, target_probs):
    return torch.ones_like(draft_ids, dtype=torch.bool)


@pytest.mark.statistical
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("passes", always_passes),
        ("passes", lambda ids, q, p: passes(ids, q.sqrt(), p)),
        ("residual", lambda p, q: p),
        ("residual", lambda p, q: (p - q).abs()),
    ],
    ids=[
        "all drafts pass",
        "a distribution that the draft was not drawn from",
        "q is not taken away",
        "q is taken away twice",
    ],
)
def test_a_wrong_sampler_fails_the_same_test(monkeypatch, name, wrong):
    monkeypatch.setattr(sampling, name, wrong)
    tokens = two_tokens()
    impossible = (JOINT[tokens[:, 0] * 4 + tokens[:, 1]] == 0).any()
    assert impossible or p_value(tokens[:, 0] * 4 + tokens[:, 1], JOINT) < 1e-6


def test_sampled_verification_without_drafts():
    num_accepted, follow = verify_sampled(
        torch.zeros(3, 0, dtype=torch.long), torch.zeros(3, 0, 4), torch.eye(4)[None, 2].expand(3, 1, -1)
    )
    assert num_accepted.tolist() == [0, 0, 0] and follow.tolist() == [2, 2, 2]


INF = float("inf")


@pytest.mark.parametrize(
    ("scores", "distribution"),
    [
        ([0.0, 0.0, -INF, -INF], [0.5, 0.5, 0.0, 0.0]),
        ([0.0, float("nan"), -INF, 0.0], [0.5, 0.0, 0.0, 0.5]),
        ([-INF] * 4, [0.25] * 4),
        ([float("nan")] * 4, [0.25] * 4),
        ([0.0, INF, 0.0, -INF], [0.0, 1.0, 0.0, 0.0]),
        ([float("nan"), -INF, -INF, -3.0], [0.0, 0.0, 0.0, 1.0]),
    ],
    ids=[
        "usual scores",
        "a score that is no number",
        "nothing is possible",
        "no numbers",
        "an overflow",
        "one is left",
    ],
)
def test_the_drafting_distribution_sums_to_one_whatever_the_scores(scores, distribution):
    usual = torch.tensor([1.0, 2.0, -INF, 0.0])
    both = drafting_distribution(torch.tensor([scores, usual.tolist()]))
    torch.testing.assert_close(both[0], torch.tensor(distribution))
    torch.testing.assert_close(both[1], usual.softmax(-1))


def test_draws_are_those_of_multinomial():
    probs = torch.softmax(3 * torch.randn(200, 60), -1)
    torch.manual_seed(5)
    expected = torch.multinomial(probs, 1)[:, 0]
    for drawing in (draw, draw_or_none):
        torch.manual_seed(5)
        assert torch.equal(drawing(probs), expected)


def test_nothing_is_drawn_where_there_is_no_distribution():
    rows = torch.tensor([[0.5, 0.5, 0.0], [0.5, float("nan"), 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    drawn = draw_or_none(rows).tolist()
    assert drawn[0] in (0, 1)
    assert drawn[1:] == [NO_TOKEN, NO_TOKEN, 2]
    probs = torch.stack([P, torch.full_like(P, float("nan"))])[None]
    accepted, follow = verify_sampled(torch.tensor([[0]]), torch.eye(4)[None, :1], probs[:, [1, 0]])
    assert (accepted.item(), follow.item()) == (0, NO_TOKEN)


def test_drafts_from_no_distribution_are_rejected_and_the_target_decides():
    rows = NUM_ROWS
    nothing = torch.full((rows, 1, 4), float("nan"))
    accepted, follow = verify_sampled(
        torch.zeros(rows, 1, dtype=torch.long), nothing, torch.stack([P, Q]).expand(rows, -1, -1)
    )
    assert not accepted.any()
    assert p_value(follow, P) > 1e-3
