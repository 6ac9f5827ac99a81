"""Tokens are drawn from exactly the distribution of `generate`, each with one uniform number."""

from __future__ import annotations

import pytest
import torch
from responses.decoding import p_value_of

from dspark_hf.responses.token_sampling import Sampling, draw_uniforms, invert_cumulative, sample_tokens


def warped(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The distribution by transformers' own warpers."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].float())
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0]


DISTRIBUTIONS = {
    "temperature": Sampling(temperature=0.7),
    "top-k": Sampling(temperature=1.3, top_k=7),
    "top-p": Sampling(temperature=1.0, top_p=0.8),
    "top-k and top-p": Sampling(temperature=0.9, top_k=20, top_p=0.9),
}


@pytest.mark.statistical
@pytest.mark.parametrize("sampling", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
@pytest.mark.parametrize("vocab_size", [40, 1000])
def test_drawn_tokens_follow_the_distribution_of_generate(sampling: Sampling, vocab_size: int) -> None:
    logits, draws = 2 * torch.randn(vocab_size), 20_000
    rows = logits.expand(2000, -1)
    tokens = torch.cat([sample_tokens(rows, torch.rand(2000), sampling) for _ in range(draws // 2000)])
    counts = torch.bincount(tokens, minlength=vocab_size)
    assert p_value_of(counts, warped(logits, sampling)) > 1e-4
    wrong = Sampling(temperature=1.5 * sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)
    assert p_value_of(counts, warped(logits, wrong)) < 1e-6


def test_top_p_beyond_the_first_sorted_tokens() -> None:
    logits = torch.zeros(2000)  # uniform: 90 % of the mass needs 1800 tokens
    uniforms = torch.linspace(0, 0.9999, 5000)
    kept = sample_tokens(logits.expand(5000, -1), uniforms, Sampling(top_p=0.9)).unique()
    assert 1795 <= len(kept) <= 1805


def test_inverting_never_takes_a_token_of_weight_zero() -> None:
    weights = torch.zeros(3, 700)
    weights[:, 300] = 1e-30
    weights[1, 600] = 1.0
    uniforms = torch.tensor([0.0, 1 - 2**-24, 1 - 2**-24])
    assert invert_cumulative(weights, uniforms).tolist() == [300, 600, 300]


def test_sampling_leaves_the_logits_alone() -> None:
    logits = torch.randn(2, 50)
    before = logits.clone()
    sample_tokens(logits, torch.rand(2), Sampling(temperature=0.5, top_p=0.9))
    assert torch.equal(logits, before)


def test_uniform_numbers_come_from_the_seed() -> None:
    assert torch.equal(draw_uniforms(3, 8), draw_uniforms(3, 8))
    assert not torch.equal(draw_uniforms(3, 8), draw_uniforms(4, 8))


@pytest.mark.parametrize("wrong", [{"temperature": 0.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}])
def test_contradictory_sampling_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Sampling(**wrong)
