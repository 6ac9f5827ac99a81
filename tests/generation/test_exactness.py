"""Greedy output is that of plain `generate`: targets, prompts, lengths, blocks, precisions."""

import pytest
import torch
from generation import rig

import tiny
from dspark_hf import record_speculation


@pytest.mark.parametrize("length", [1, 2, 5, 9, 33], ids=lambda n: f"prompt of {n} tokens")
def test_any_prompt_length(length):
    rig.compare(rig.target(), tiny.prompt(length))


@pytest.mark.parametrize("family", [f for f in tiny.TARGETS if f not in tiny.HYBRID_TARGETS])
def test_every_family_of_targets(family):
    rig.compare(rig.target(family))


@pytest.mark.parametrize("length", [5, 20], ids=lambda n: f"prompt of {n} tokens")
@pytest.mark.parametrize("family", tiny.SLIDING_TARGETS)
def test_sliding_windows_of_eight(family, length):
    rig.compare(rig.target(family), tiny.prompt(length))


@pytest.mark.parametrize("window", [3, 5], ids=lambda n: f"window of {n}")
def test_windows_shorter_than_a_block(window):
    rig.compare(rig.target("mistral", sliding_window=window), tiny.prompt(7))


@pytest.mark.parametrize("block_size", [1, 2, 7], ids=lambda n: f"block of {n}")
def test_block_sizes_and_whole_blocks_accepted(block_size):
    new_tokens = 1 + 2 * (block_size + 1)  # The prompt's token, then two whole rounds.
    outcome = rig.compare(rig.target(), drafter_fields={"block_size": block_size}, max_new_tokens=new_tokens)
    assert [r.committed for r in outcome.stats["accepting"].rounds] == [block_size + 1] * 2
    rig.compare(rig.target(), drafter_fields={"block_size": block_size}, max_new_tokens=new_tokens + 1)


def test_a_drafter_whose_anchor_slot_predicts_nothing():
    outcome = rig.compare(rig.target(), drafter_fields={"sample_from_anchor": False})
    assert {r.drafted for r in outcome.stats["accepting"].rounds[:-1]} == {rig.BLOCK_SIZE - 1}


@pytest.mark.parametrize("sample_from_anchor", [True, False], ids=["anchor slot predicts", "anchor slot is silent"])
def test_a_perfect_drafter_is_accepted_at_every_slot(sample_from_anchor):
    target = tiny.bigram(num_hidden_layers=2)
    drafter = tiny.perfect_drafter(target, sample_from_anchor=sample_from_anchor)
    plain = target.generate(**tiny.prompt(), max_new_tokens=41, do_sample=False)
    with record_speculation() as stats:
        drafted = target.generate(**tiny.prompt(), max_new_tokens=41, do_sample=False, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    assert stats.conditional_acceptance == [1.0] * drafter.config.num_draft_tokens


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn", None], ids=lambda h: f"{h} head" if h else "no head")
def test_every_sequential_head(head):
    fields = {"markov_head_type": head} if head else {"markov_rank": 0, "enable_confidence_head": False}
    target = rig.target()
    plain = target.generate(**tiny.prompt(), max_new_tokens=20, do_sample=False)
    for confidence in {False, head is not None}:
        drafter = tiny.random_drafter(target, **(fields | {"enable_confidence_head": confidence}))
        drafted = target.generate(
            **tiny.prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter, num_assistant_tokens=3
        )
        assert torch.equal(drafted, plain)


def test_four_hundred_tokens_with_every_pattern_of_acceptance():
    outcome = rig.compare(rig.target(), max_new_tokens=400)
    assert {r.accepted for r in outcome.stats["patterned"].rounds} == set(range(rig.BLOCK_SIZE + 1))


def many_prompts(num_prompts):
    target = rig.target()
    for seed in range(num_prompts):
        rig.compare(target, tiny.prompt(1 + seed % 13, seed=seed), max_new_tokens=10)


def test_twenty_random_prompts():
    many_prompts(20)


@pytest.mark.slow
def test_two_hundred_random_prompts():
    many_prompts(200)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_differs_only_where_two_tokens_tie(dtype):
    """
    One pass over several tokens rounds differently from several passes over one, so in half precision a draft-verified
    output may leave plain `generate`'s, but only where the two best tokens are a few units in the last place apart.
    """
    target = tiny.qwen3(num_hidden_layers=2).to(dtype)
    for seed in range(3):
        inputs = tiny.prompt(9, seed=seed)
        settings = inputs | {"max_new_tokens": 16, "do_sample": False}
        plain = target.generate(**settings, return_dict_in_generate=True, output_logits=True)
        sequence = rig.ids_of(plain)
        for kind in rig.KINDS:
            drafter = rig.drafter_of(kind, target, sequence).to(dtype)
            drafted = rig.ids_of(target.generate(**settings, assistant_model=drafter))
            assert len(drafted) == len(sequence)
            differing = [i for i, pair in enumerate(zip(drafted, sequence, strict=True)) if len(set(pair)) > 1]
            if differing:
                best, second = plain.logits[differing[0] - 9][0].topk(2).values.tolist()
                gap = (best - second) / (abs(best) * torch.finfo(dtype).eps)
                assert gap <= 8, f"token {differing[0]} differs at a gap of {gap:.1f} units in the last place ({kind})"


def test_the_mask_token_survives_where_the_target_says_it():
    target = tiny.qwen3(num_hidden_layers=2)
    target.lm_head.weight[tiny.MASK_ID] *= 3
    outcome = rig.compare(target)
    assert tiny.MASK_ID in rig.ids_of(outcome.plain)[9:]


def test_equal_calls_draft_verify_and_accept_the_same():
    target, drafter = rig.target(), tiny.random_drafter(rig.target(), num_hidden_layers=1)
    before = drafter.generation_config.to_dict()
    counts, confidences = [], []
    for _ in range(2):
        with record_speculation() as stats:
            target.generate(**tiny.prompt(), max_new_tokens=16, do_sample=False, assistant_model=drafter)
        counts.append([(r.drafted, r.verified, r.accepted, r.committed) for r in stats.rounds])
        confidences.append([c for r in stats.rounds for c in r.confidence])
    assert counts[0] == counts[1]
    assert confidences[0] == pytest.approx(confidences[1], abs=1e-5)
    assert drafter.generation_config.to_dict() == before


def test_greedy_decoding_draws_no_random_number():
    before = torch.get_rng_state()
    rig.compare(rig.target(), max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_seed_gives_the_same_sample():
    target, drafter = rig.target(), tiny.random_drafter(rig.target(), num_hidden_layers=1)
    samples = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        samples.append(
            target.generate(**tiny.prompt(), max_new_tokens=12, do_sample=True, assistant_model=drafter).tolist()
        )
    assert samples[0] == samples[1] != samples[2]
