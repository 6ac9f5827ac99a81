"""Which targets can be fed rows of different lengths, and up to which length."""

import pytest
import transformers
from ragged.families import target_of

import tiny
from dspark_hf.ragged.supported import length_limits, unsupported_reason


def test_every_target_but_hybrids_is_supported():
    served = {family for family, build in tiny.TARGETS.items() if unsupported_reason(build(), max_length=200) is None}
    assert served == set(tiny.TARGETS) - set(tiny.HYBRID_TARGETS)


def test_alibi():
    config = {"vocab_size": tiny.VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    falcon = transformers.FalconForCausalLM(transformers.FalconConfig(**config, alibi=True))
    assert "ALiBi" in unsupported_reason(falcon)
    assert unsupported_reason(transformers.FalconForCausalLM(transformers.FalconConfig(**config, alibi=False))) is None


def test_lengths_from_which_rows_would_influence_each_other():
    assert length_limits(tiny.qwen3(num_hidden_layers=1)) == {}
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
    target = tiny.llama(rope_parameters=dynamic, max_position_embeddings=32, num_hidden_layers=1)
    assert length_limits(target) == {"original RoPE length": 32}
    assert unsupported_reason(target, max_length=32) is None
    assert "original RoPE length of 32 tokens" in unsupported_reason(target, max_length=33)
    target = target_of("Llama4Text", floor_scale=40)
    assert length_limits(target) == {"unscaled attention": 39}
    assert unsupported_reason(target, max_length=39) is None
    assert "unscaled attention" in unsupported_reason(target, max_length=40)


def test_rows_that_may_outgrow_a_limit_are_not_drafted_for():
    target = target_of("Llama4Text", floor_scale=40)
    batch = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=4))
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    plain = target.generate(**batch, max_new_tokens=20, do_sample=False)
    assert target.generate(**batch, max_new_tokens=20, do_sample=False, assistant_model=drafter).equal(plain)
    with pytest.raises(ValueError, match="unscaled attention of Llama4ForCausalLM, 39 tokens"):
        target.generate(**batch, max_new_tokens=40, do_sample=False, assistant_model=drafter)
