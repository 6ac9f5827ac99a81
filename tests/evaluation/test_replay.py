"""Following an answer gives the rounds that decoding takes: exactly where it is greedy, on average where drafts are sampled."""

import math
import statistics

import pytest
import torch

import tiny
from dspark_hf import record_speculation
from dspark_hf.evaluation.replay import acceptance_by_slot, acceptance_length, replay

PROMPT_LENGTH, NEW_TOKENS = 9, 24


def blurred_drafter(target, **fields):
    """Sometimes right: the distribution of a perfect drafter, with noise."""
    drafter = tiny.perfect_drafter(target, **fields)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        weight = drafter.markov_head.markov_w2.weight
        weight += 0.5 * weight.std() * torch.randn_like(weight)
    return drafter


def as_row(output: torch.Tensor, eos: int) -> dict[str, torch.Tensor]:
    ids = output.tolist()
    answer = ids[PROMPT_LENGTH:]
    length = PROMPT_LENGTH + (answer.index(eos) + 1 if eos in answer else len(answer))
    return {"input_ids": output[:length], "loss_mask": torch.arange(length) >= PROMPT_LENGTH}


def decoded(target, drafter, **settings):
    """Answers, and how often each slot of each answer's rounds was verified and accepted."""
    with record_speculation() as stats:
        output = target.generate(
            **tiny.prompt(PROMPT_LENGTH),
            assistant_model=drafter,
            max_new_tokens=NEW_TOKENS,
            assistant_confidence_threshold=0.0,
            drafting_backoff=False,
            **settings,
        )
    return [as_row(row, target.generation_config.eos_token_id) for row in output], stats


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 24}, {"sample_from_anchor": False}, {"block_size": 1}])
@pytest.mark.parametrize("seed", range(3))
def test_greedy_answers_take_the_rounds_that_decoding_takes(fields, seed):
    target = tiny.bigram(seed)
    drafter = blurred_drafter(target, **fields)
    [row], stats = decoded(target, drafter, do_sample=False)
    followed = replay(drafter, target, row)
    assert followed.rounds == len(stats.rounds)
    assert followed.acceptance_length == pytest.approx(stats.acceptance_length)
    # Decoding drafts nothing where only one more token fits; following an answer does not know of limits.
    assert followed.passed[0] - sum(r.accepted > 0 for r in stats.rounds) in (0, 1)


def surprise(temperature: float) -> float:
    """By how many standard errors the rounds of sampled answers differ from those that following them predicts."""
    target = tiny.bigram()
    drafter = blurred_drafter(target)
    torch.manual_seed(0)
    rows, stats = decoded(target, drafter, do_sample=True, temperature=0.7, top_k=0, num_return_sequences=192)
    taken = [sum(r.row == row for r in stats.rounds) for row in range(len(rows))]
    expected = [replay(drafter, target, row, temperature).rounds for row in rows]
    differences = [t - e for t, e in zip(taken, expected, strict=True)]
    assert statistics.stdev(differences) > 0.2, "nothing was left to chance"
    return abs(statistics.mean(differences)) / (statistics.stdev(differences) / math.sqrt(len(differences)))


@pytest.mark.statistical
def test_sampled_answers_take_the_expected_rounds():
    assert surprise(temperature=0.7) < 3.5


@pytest.mark.statistical
def test_a_wrong_distribution_is_noticed():
    assert surprise(temperature=1.3) > 5


def test_a_perfect_drafter_is_accepted_everywhere():
    target = tiny.bigram()
    drafter = tiny.perfect_drafter(target)
    rows, _ = decoded(target, drafter, do_sample=True, top_k=0, num_return_sequences=4)
    followed = [replay(drafter, target, row, temperature=1.0) for row in rows]
    assert acceptance_by_slot(followed) == pytest.approx([1.0] * drafter.config.num_draft_tokens, abs=1e-4)
    assert acceptance_length(followed) > drafter.config.num_draft_tokens * 0.8


def test_an_answer_of_one_token_takes_no_round():
    target = tiny.bigram()
    row = {"input_ids": torch.arange(5), "loss_mask": torch.arange(5) == 4}
    followed = replay(tiny.random_drafter(target), target, row)
    assert (followed.tokens, followed.rounds) == (0, 0.0)
    assert math.isnan(followed.acceptance_length)


def test_several_answers_in_a_row_are_refused():
    target = tiny.bigram()
    row = {"input_ids": torch.arange(9), "loss_mask": torch.tensor([0, 0, 1, 1, 0, 0, 1, 1, 1])}
    with pytest.raises(ValueError, match="several answers"):
        replay(tiny.random_drafter(target), target, row)
