"""The decoder of many requests: against plain `generate`, independence of the rows, the order of requests."""

from __future__ import annotations

import pytest
import torch
from ragged.families import target_of
from responses.decoding import completed, greedy_by_generate, p_value_of, ragged_prompts
from transformers import PreTrainedModel

import tiny
from dspark_hf.ragged.supported import unsupported_reason
from dspark_hf.responses.decoder import SlotDecoder
from dspark_hf.responses.plain_decoder import PlainDecoder
from dspark_hf.responses.requests import Request
from dspark_hf.responses.token_sampling import Sampling
from dspark_hf.transformers_names import attention_name

END_ID = 0


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny.llama(eos_token_id=END_ID)


@pytest.mark.parametrize(("family", "slots"), [*((family, 4) for family in tiny.TARGETS), ("llama", 1), ("qwen3", 16)])
def test_greedy_rows_equal_plain_generate(family: str, slots: int) -> None:
    target, limit, end_ids = tiny.TARGETS[family](), 8, [3, 9, 17, 25, 40, 77]
    prompts = ragged_prompts()
    kind = SlotDecoder if unsupported_reason(target, max_length=60) is None else PlainDecoder
    requests = [Request(i, prompt, limit) for i, prompt in enumerate(prompts)]
    completions = completed(kind(target, Sampling(do_sample=False), end_ids, slots), requests)
    for i, prompt in enumerate(prompts):
        expected = greedy_by_generate(target, prompt, limit, end_ids)
        finished = expected[-1] in end_ids
        assert completions[i].token_ids == (expected[:-1] if finished else expected)
        assert completions[i].end_id == (expected[-1] if finished else None)


@pytest.mark.parametrize("family", ["Gemma4Text", "Llama4Text", "Gemma2"])
def test_other_kinds_of_attention(family: str) -> None:
    target, prompts = target_of(family), ragged_prompts()
    assert unsupported_reason(target, max_length=60) is None
    decoder = SlotDecoder(target, Sampling(do_sample=False), [], 4)
    completions = completed(decoder, [Request(i, prompt, 12) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert completions[i].token_ids == greedy_by_generate(target, prompt, 12, [])
    assert not decoder.cache.pads


LENGTH_DEPENDENT_ROPE = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    },
}


@pytest.mark.parametrize("kind", LENGTH_DEPENDENT_ROPE)
def test_frequencies_that_follow_the_longest_row_are_served_up_to_where_they_start_to(kind: str) -> None:
    target = tiny.llama(rope_parameters=LENGTH_DEPENDENT_ROPE[kind], max_position_embeddings=32)
    assert unsupported_reason(target, max_length=32) is None
    assert "original RoPE length of 32 tokens" in unsupported_reason(target, max_length=33)
    prompts = [prompt for prompt in ragged_prompts() if len(prompt) <= 20]
    completions = completed(
        SlotDecoder(target, Sampling(do_sample=False), [], 4), [Request(i, p, 12) for i, p in enumerate(prompts)]
    )
    for i, prompt in enumerate(prompts):
        assert completions[i].token_ids == greedy_by_generate(target, prompt, 12, [])


def test_the_attention_implementation_comes_back(target: PreTrainedModel) -> None:
    before = attention_name(target.config)
    run = SlotDecoder(target, Sampling(do_sample=False), [], 2).run([Request(0, [5, 6], 4), Request(1, [7], 9)])
    next(run)
    run.close()
    assert attention_name(target.config) == before


def test_submitted_requests_are_served_before_the_rest(target: PreTrainedModel) -> None:
    decoder = SlotDecoder(target, Sampling(do_sample=False), [], slots=1)
    order = []
    for completion in decoder.run([Request(0, [5, 6], 3), Request(1, [7], 3)]):
        order.append(completion.key)
        if completion.key == 0:
            decoder.submit(Request(2, [9, 9], 3))
    assert order == [0, 2, 1]


def test_sampled_responses_do_not_depend_on_their_neighbours(target: PreTrainedModel) -> None:
    requests = [Request(i, prompt, 10, seed=100 + i) for i, prompt in enumerate(ragged_prompts())]
    sampling = Sampling(temperature=0.8)
    few = completed(SlotDecoder(target, sampling, [END_ID], slots=2), requests)
    many = completed(SlotDecoder(target, sampling, [END_ID], slots=16), requests[::-1])
    assert few == many
    other_seeds = [Request(r.key, r.input_ids, 10, seed=r.seed + 50) for r in requests]
    assert completed(SlotDecoder(target, sampling, [END_ID], slots=16), other_seeds) != many


def test_an_empty_prompt_is_refused(target: PreTrainedModel) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        list(SlotDecoder(target, Sampling(), [], 2).run([Request(0, [], 4)]))


@pytest.mark.statistical
def test_first_two_tokens_of_responses_follow_the_target() -> None:
    target = tiny.bigram()
    draws, first = 3000, 5
    distribution = (tiny.transition_logits(target) / 1.5).softmax(-1)  # [V, V]
    requests = [Request(i, [8, first], 2, seed=i) for i in range(draws)]
    completions = completed(SlotDecoder(target, Sampling(temperature=1.5), [], slots=500), requests).values()
    counts = torch.zeros(2, tiny.VOCAB_SIZE)
    for completion in completions:
        counts[0, completion.token_ids[0]] += 1
        counts[1, completion.token_ids[1]] += 1
    assert p_value_of(counts[0], distribution[first]) > 1e-4
    assert p_value_of(counts[1], distribution[first] @ distribution) > 1e-4
    assert p_value_of(counts[0], distribution[8]) < 1e-6
