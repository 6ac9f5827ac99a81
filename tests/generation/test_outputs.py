"""What `return_dict_in_generate=True` returns is what plain `generate` returns, field for field."""

import pytest
import torch
from generation import rig
from transformers.generation import GenerateDecoderOnlyOutput

import tiny
from dspark_hf.transformers_names import CACHE_KEY

EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}


def assert_same(ours, plain, where=""):
    """The same nesting, shapes and values."""
    if isinstance(plain, torch.Tensor):
        assert ours.shape == plain.shape, where
        assert ours.dtype == plain.dtype, where
        torch.testing.assert_close(ours, plain, atol=2e-4, rtol=1e-3, msg=lambda m: f"{where}: {m}")
    elif plain is None:
        assert ours is None, where
    else:
        assert len(ours) == len(plain), where
        for i, pair in enumerate(zip(ours, plain, strict=True)):
            assert_same(*pair, where=f"{where}[{i}]")


def assert_all_fields_same(outcome):
    for kind, ours in outcome.drafted.items():
        assert type(ours) is GenerateDecoderOnlyOutput
        assert ours.keys() == outcome.plain.keys()
        for name in ("scores", "logits", "hidden_states", "attentions"):
            assert_same(getattr(ours, name), getattr(outcome.plain, name), f"{name} of the {kind} drafter ")
        assert_same_cache(ours[CACHE_KEY], outcome.plain[CACHE_KEY])


def assert_same_cache(ours, plain):
    assert type(ours) is type(plain)
    assert int(ours.get_seq_length()) == int(plain.get_seq_length())
    length = int(plain.get_seq_length())
    for a, b in zip(ours.layers, plain.layers, strict=True):
        # A static buffer holds anything behind its length.
        torch.testing.assert_close(a.keys[:, :, :length], b.keys[:, :, :length], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(a.values[:, :, :length], b.values[:, :, :length], atol=2e-4, rtol=1e-3)
        assert getattr(a, "record_past", False) == getattr(b, "record_past", False)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"], ids=["full attention", "sliding windows"])
def test_scores_logits_hidden_states_and_cache(family):
    outcome = rig.compare(rig.target(family), **EVERYTHING)
    assert len(outcome.plain.scores) == rig.NEW_TOKENS
    assert_all_fields_same(outcome)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [3, 12], ids=lambda n: f"prompt of {n}")
def test_attentions(family, length):
    target = rig.target(family, attn_implementation="eager")
    outcome = rig.compare(target, tiny.prompt(length), **EVERYTHING, output_attentions=True)
    assert_all_fields_same(outcome)


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.5},
        {"suppress_tokens": [3, 5]},
        {"eos_token_id": 5, "forced_eos_token_id": 5, "pad_token_id": 0},
        {"prefill_chunk_size": 4},
        {"min_new_tokens": 8, "eos_token_id": 9, "pad_token_id": 0},
    ],
    ids=["a processor of tokens", "a processor of scores", "a forced end", "the prompt in chunks", "a minimal length"],
)
def test_with_processors(settings):
    assert_all_fields_same(rig.compare(rig.target(), **EVERYTHING, **settings))


@pytest.mark.parametrize("slot", range(rig.BLOCK_SIZE + 2), ids=lambda n: f"after {n} tokens")
def test_with_an_end_inside_a_block(slot):
    text = rig.ids_of(rig.target().generate(**tiny.prompt(), max_new_tokens=rig.NEW_TOKENS, do_sample=False))
    outcome = rig.compare(rig.target(), **EVERYTHING, eos_token_id=text[9 + slot], pad_token_id=0)
    assert_all_fields_same(outcome)


@pytest.mark.parametrize("name", ["output_scores", "output_logits", "output_hidden_states"])
def test_nothing_is_returned_that_was_not_asked_for(name):
    outcome = rig.compare(rig.target(), return_dict_in_generate=True, max_new_tokens=6, **{name: True})
    assert_all_fields_same(outcome)
    plain = rig.compare(rig.target(), max_new_tokens=6, **{name: True}).drafted["accepting"]
    assert isinstance(plain, torch.Tensor)


def test_states_of_a_half_precision_target_keep_their_type():
    target = tiny.qwen3(num_hidden_layers=2).to(torch.bfloat16)
    settings = tiny.prompt() | EVERYTHING | {"max_new_tokens": 6, "do_sample": False}
    plain = target.generate(**settings)
    drafted = target.generate(**settings, assistant_model=tiny.random_drafter(target).to(torch.bfloat16))
    for name in ("scores", "logits"):
        assert getattr(drafted, name)[0].dtype == getattr(plain, name)[0].dtype == torch.float32
    assert drafted.hidden_states[1][0].dtype == plain.hidden_states[1][0].dtype == torch.bfloat16


@pytest.mark.parametrize("user_wants_all", [False, True], ids=["for the drafter alone", "for the user as well"])
def test_only_the_tapped_hidden_states_are_kept(user_wants_all):
    from dspark_hf.transformers_names import output_hidden_states

    if output_hidden_states([0]) is True:
        pytest.skip("this transformers keeps all hidden states or none")
    target, kept = tiny.qwen3(), []
    drafter = tiny.random_drafter(target, target_layer_ids=[-1, 1])
    target.register_forward_hook(lambda m, a, output: kept.append([s is not None for s in output.hidden_states]))
    target.generate(
        **tiny.prompt(),
        max_new_tokens=6,
        do_sample=False,
        assistant_model=drafter,
        return_dict_in_generate=True,
        output_hidden_states=user_wants_all,
    )
    wanted = [user_wants_all or i in (0, 2) for i in range(5)]
    assert all(k == wanted for k in kept)
