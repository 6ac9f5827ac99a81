"""Targets whose rotary positions change with the length of a pass: equal to plain `generate` on both sides of the change."""

import pytest
import torch
from generation import rig
from transformers import DynamicCache

import tiny
from dspark_hf import record_speculation
from dspark_hf.rope_limit import RopeLimit, rope_limit
from dspark_hf.transformers_names import CACHE_KEY

LIMIT = 24
NEW_TOKENS = 40
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [1.0, 2.0, 5.0, 9.0],
    "original_max_position_embeddings": LIMIT,
}


def llama_dynamic():
    return tiny.llama(num_hidden_layers=2, max_position_embeddings=LIMIT, rope_parameters=DYNAMIC)


def llama_longrope():
    return tiny.llama(num_hidden_layers=2, max_position_embeddings=4 * LIMIT, rope_parameters=LONG)


def phi3_longrope():
    """Discards its cache at the change and is fed the whole sequence again."""
    config = tiny.target_config(
        "Phi3",
        num_hidden_layers=2,
        max_position_embeddings=4 * LIMIT,
        original_max_position_embeddings=LIMIT,
        rope_parameters=LONG | {"partial_rotary_factor": 1.0},
    )
    return tiny.build_target(config)


def gemma3_dynamic():
    """Only one of the layer types changes."""
    usual = {"rope_type": "default", "rope_theta": 10_000.0}
    return tiny.gemma3(
        max_position_embeddings=LIMIT, rope_parameters={"full_attention": DYNAMIC, "sliding_attention": usual}
    )


TARGETS = [llama_dynamic, llama_longrope, phi3_longrope, gemma3_dynamic]
TARGETS = {make.__name__.replace("_", " "): make for make in TARGETS}


@pytest.fixture(params=TARGETS.values(), ids=TARGETS.keys())
def target(request):
    return request.param()


def test_one_row_across_the_limit(target):
    outcome = rig.compare(target, max_new_tokens=NEW_TOKENS)
    below = outcome.stats["accepting"].rounds[:3]
    assert all(r.accepted == rig.BLOCK_SIZE for r in below), "drafts are used below the limit"


@pytest.mark.parametrize("length", [LIMIT - 1, LIMIT, LIMIT + 1, LIMIT + 9], ids=lambda n: f"prompt of {n} tokens")
def test_prompts_around_the_limit(target, length):
    def at_original_frequencies():
        target(torch.ones(1, 1, dtype=torch.long))  # Longer prompts would start from what the call before them left.
        return {}

    rig.compare(target, tiny.prompt(length), at_original_frequencies, max_new_tokens=12)


def test_a_padded_row(target):
    padded = tiny.left_padded(tiny.prompt(12), tiny.prompt(7, seed=1))
    rig.compare(target, {name: value[1:] for name, value in padded.items()}, max_new_tokens=NEW_TOKENS)


def test_chains_of_drafts(target):
    rig.compare(target, kinds=rig.EAGLE3_KINDS, max_new_tokens=NEW_TOKENS)


def test_what_is_returned(target):
    """The cache can be continued, and states are those of plain `generate`."""
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True, "output_hidden_states": True}
    outcome = rig.compare(target, **settings)
    for drafted in outcome.drafted.values():
        assert drafted[CACHE_KEY].get_seq_length() == outcome.plain[CACHE_KEY].get_seq_length()
        assert len(drafted.hidden_states) == len(outcome.plain.hidden_states)
        for ours, theirs in zip(drafted.hidden_states, outcome.plain.hidden_states, strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("first", [6, 20], ids=["a turn below the limit", "a turn across the limit"])
def test_a_second_turn(target, first):
    def two_turns(**drafting):
        cache = DynamicCache(config=target.config)
        turn = target.generate(
            **tiny.prompt(),
            max_new_tokens=first,
            do_sample=False,
            return_dict_in_generate=True,
            **{CACHE_KEY: cache},
            **drafting,
        )
        ids = torch.cat([turn.sequences, tiny.prompt(3, seed=5)["input_ids"]], dim=1)
        return target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            **{CACHE_KEY: turn[CACHE_KEY]},
            **drafting,
        )

    plain = two_turns()
    for kind in rig.KINDS:
        drafter = rig.drafter_of(kind, target, rig.ids_of(plain))
        assert torch.equal(two_turns(assistant_model=drafter), plain), kind


def test_rows_that_stay_below_the_limit(target):
    batch = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    settings = {"max_new_tokens": LIMIT - 9, "do_sample": False}
    plain = target.generate(**batch, **settings)
    assert torch.equal(target.generate(**batch, **settings, assistant_model=tiny.random_drafter(target)), plain)


def test_rows_that_may_reach_the_limit_are_refused(target):
    batch = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    message = rig.refusing(target, **batch, max_new_tokens=LIMIT - 8)
    assert all(word in message for word in ("RoPE length", str(LIMIT), type(target).__name__, "each row")), message


@pytest.mark.parametrize("make", [llama_longrope, phi3_longrope], ids=lambda make: make.__name__)
def test_drafts_come_back_beyond_the_change_of_longrope(make):
    target = make()
    plain = target.generate(**tiny.prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, return_dict_in_generate=True)
    if plain[CACHE_KEY].get_seq_length() < LIMIT:
        pytest.skip("this version of transformers loses the context beyond the change")
    drafter = rig.drafter_of("accepting", target, rig.ids_of(plain))
    with record_speculation() as stats:
        target.generate(**tiny.prompt(), max_new_tokens=NEW_TOKENS, do_sample=False, assistant_model=drafter)
    assert max(r.accepted for r in stats.rounds[-3:-1]) == rig.BLOCK_SIZE


def test_the_limit():
    assert rope_limit(llama_dynamic()) == RopeLimit("dynamic", LIMIT)
    assert rope_limit(llama_longrope()) == rope_limit(phi3_longrope()) == RopeLimit("longrope", LIMIT)
    assert rope_limit(gemma3_dynamic()) == RopeLimit("dynamic", LIMIT)
    assert rope_limit(tiny.qwen3()) is rope_limit(tiny.gemma3()) is None


def test_drafts_that_fit():
    dynamic, long = RopeLimit("dynamic", 24), RopeLimit("longrope", 24, num_padding=3)
    assert [dynamic.max_drafts(n) for n in (20, 24, 25, 90)] == [4, 0, 0, 0]
    assert [long.max_drafts(n) for n in (20, 24, 25, 28)] == [4, 0, 0, 0] and long.max_drafts(29) > 1000
