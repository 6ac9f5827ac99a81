"""Calls without an exact answer here are refused, and the message says what to do."""

from pathlib import Path

import pytest
import target_families
import torch
from generation import rig
from transformers import T5Config, T5ForConditionalGeneration

import tiny
from dspark_hf import DSparkConfig, DSparkDrafter, dspark_generate


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_beams": 2}, ["num_beams=2", "leave out assistant_model="]),
        ({"num_beams": 2, "do_sample": True}, ["num_beams=2"]),
        ({"use_cache": False}, ["use_cache=False", "needs one"]),
        ({"synced_gpus": True}, ["synced_gpus", "hang"]),
        ({"penalty_alpha": 0.6, "top_k": 4}, ["penalty_alpha", "contrastive search"]),
        ({"prompt_lookup_num_tokens": 3}, ["prompt_lookup_num_tokens", "prompt lookup"]),
        ({"assistant_early_exit": 1}, ["assistant_early_exit", "early-exit"]),
        ({"dola_layers": "low"}, ["dola_layers", "DoLa"]),
        ({"cache_implementation": "paged"}, ["paged", "continuous batching"]),
        ({"token_healing": True}, ["token_healing"]),
    ],
    ids=lambda v: ", ".join(v) if isinstance(v, dict) else "",
)
def test_other_ways_of_decoding(settings, words):
    message = rig.refusing(rig.target(), **settings)
    assert all(word in message for word in words), message


def test_settings_of_the_target_count_too():
    target = tiny.qwen3(num_hidden_layers=2)
    target.generation_config.num_beams = 3
    assert "num_beams=3" in rig.refusing(target)


def test_encoder_decoders():
    config = T5Config(
        vocab_size=tiny.VOCAB_SIZE, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    target = T5ForConditionalGeneration(config).eval()
    drafter = tiny.random_drafter(rig.target())
    assert "encoder-decoder" in rig.refusing(target, drafter=drafter)
    with pytest.raises(ValueError, match="encoder-decoder"):
        DSparkConfig.for_target(config)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"vocab_size": 160}, ["128", "160"]),
        ({"hidden_size": 16}, ["32", "16"]),
        ({"num_hidden_layers": 1}, ["layer 2", "1 layers"]),
    ],
    ids=["another vocabulary", "another width", "too few layers"],
)
def test_a_drafter_of_another_target(fields, words):
    made_for = rig.target("qwen3", num_hidden_layers=4)
    drafter = tiny.random_drafter(made_for, target_layer_ids=[0, 2], target_name_or_path="some/target")
    message = rig.refusing(tiny.qwen3(**fields), drafter=drafter)
    assert all(word in message for word in [*words, "some/target", "DSparkConfig.for_target"]), message


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("moshi", ["keeps the last 8 tokens", "masks hide no others"]),
        ("rwkv", ["transformers makes no cache for RwkvForCausalLM"]),
        ("xlstm", ["transformers makes no cache for xLSTMForCausalLM"]),
        ("cpmant", ["other logits for several tokens in one pass on top of others"]),
        ("jamba", ["other logits for several tokens in one pass on top of its recurrent state"]),
        ("rembert", ["has width 256", "needs its own embedding"]),
        ("xlm", ["XLMWithLMHeadModel"]),
    ],
)
def test_families_that_cannot_be_exact(family, words):
    message = rig.refusing(target_families.build("causal", family), max_new_tokens=12)
    assert all(word in message for word in words), message


def test_a_window_that_the_text_does_not_outgrow():
    rig.compare(target_families.build("causal", "moshi"), tiny.prompt(3), max_new_tokens=5)


def test_a_configuration_that_turns_the_cache_off():
    target = tiny.qwen3(num_hidden_layers=2)
    target.generation_config.use_cache = False
    assert "use_cache=False in the configuration of Qwen3ForCausalLM" in rig.refusing(target)
    rig.compare(target, use_cache=True)


def test_a_refused_call_does_not_change_the_target():
    target = tiny.qwen3(num_hidden_layers=2)
    before = target.generation_config.to_dict()
    rig.refusing(target, num_beams=2)
    assert target.generation_config.to_dict() == before
    rig.compare(target, max_new_tokens=4)


def test_a_base_model_has_no_head_to_draft_with():
    target = tiny.qwen3(num_hidden_layers=2)
    target.lm_head = None
    target.get_output_embeddings = lambda: None
    with pytest.raises(ValueError, match="no LM head"):
        tiny.random_drafter(rig.target()).bind(target)


def test_ranks_that_diverge_are_refused_where_the_target_is_sharded(monkeypatch):
    """Without `synced_gpus` being said, transformers finds out; so do we."""
    from dspark_hf.generation import registration

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *a: 2)
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: True)
    with pytest.raises(ValueError, match="ZeRO-3"):
        registration._refuse_synced_ranks(rig.target(), None)
    registration._refuse_synced_ranks(rig.target(), False)
    monkeypatch.setattr("transformers.integrations.deepspeed.is_deepspeed_zero3_enabled", lambda: False)
    registration._refuse_synced_ranks(rig.target(), None)


@pytest.mark.parametrize("spelling", ["assistant_model", "drafter"])
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("some/drafter", ["'some/drafter'", "from_pretrained('some/drafter')"]),
        (Path("runs") / "1", ["runs", "from_pretrained("]),
        (DSparkDrafter, ["the class DSparkDrafter", "from_pretrained("]),
        (DSparkConfig(), ["a configuration (DSparkConfig)", "from_pretrained("]),
    ],
    ids=["a name", "a path", "a class", "a configuration"],
)
def test_what_is_not_a_loaded_drafter(given, words, spelling):
    settings = {"assistant_model": given}
    if spelling == "drafter":
        settings = {"custom_generate": dspark_generate, "drafter": given}
    with pytest.raises(ValueError, match="takes a loaded drafter") as error:
        rig.target().generate(**tiny.prompt(), max_new_tokens=4, **settings)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize("is_random", [False, True], ids=["no assistant", "a model of another kind"])
def test_other_assistants_are_left_to_transformers(is_random):
    target = rig.target()
    call = tiny.prompt() | {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(target.generate(**call, assistant_model=target if is_random else None), target.generate(**call))


def test_a_drafter_in_a_wrapper_is_refused_by_name():
    drafter = tiny.random_drafter(rig.target())
    message = rig.refusing(rig.target(), drafter=torch.nn.DataParallel(drafter))
    assert (
        message == "DataParallel wraps the drafter away from generate: pass the drafter inside, which is its `.module`."
    )
