"""Targets and drafters that PEFT has wrapped."""

import copy

import pytest
import torch
from generation import rig

import tiny
from dspark_hf import DSparkDrafter, record_speculation

peft = pytest.importorskip("peft")
# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

GREEDY = {"do_sample": False, "max_new_tokens": 12}


def lora(model, **fields):
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False, **fields)
    return peft.get_peft_model(model, config).eval()


def assert_all_kinds_equal(wrapped, base, **kwargs):
    """As `rig.compare`, for a target that is no `PreTrainedModel` itself."""
    call = tiny.prompt() | GREEDY | kwargs
    plain = wrapped.generate(**call)
    for kind in rig.KINDS:
        drafter = rig.drafter_of(kind, base, rig.ids_of(plain))
        with record_speculation() as stats:
            assert torch.equal(wrapped.generate(**call, assistant_model=drafter), plain), kind
        assert stats.rounds
        assert kind != "accepting" or stats.acceptance_rate == 1.0
    return plain


def test_a_target_with_lora():
    base = tiny.qwen3(num_hidden_layers=2)
    without = base.generate(**tiny.prompt(), **GREEDY)
    wrapped = lora(base, task_type="CAUSAL_LM")
    assert not torch.equal(assert_all_kinds_equal(wrapped, base), without)


def test_a_target_with_prefix_tuning():
    base = tiny.qwen3(num_hidden_layers=2)
    config = peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    wrapped = peft.get_peft_model(base, config).eval()
    assert_all_kinds_equal(wrapped, base)


@pytest.mark.parametrize("config_class", ["PromptTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_are_refused(config_class):
    config = getattr(peft, config_class)(task_type="CAUSAL_LM", num_virtual_tokens=4)
    base = tiny.qwen3(num_hidden_layers=2)
    wrapped = peft.get_peft_model(base, config).eval()
    with pytest.raises(ValueError, match="virtual tokens"):
        wrapped.generate(**tiny.prompt(), **GREEDY, assistant_model=tiny.random_drafter(base))


def test_a_drafter_with_lora_drafts_through_its_adapter():
    target = rig.target()
    drafter = tiny.random_drafter(target)
    wrapped = lora(copy.deepcopy(drafter))
    plain = target.generate(**tiny.prompt(), **GREEDY)
    confidences = []
    for assistant in (drafter, wrapped):
        with record_speculation() as stats:
            assert torch.equal(target.generate(**tiny.prompt(), **GREEDY, assistant_model=assistant), plain)
        confidences.append(stats.rounds[0].confidence)
    assert confidences[0] != pytest.approx(confidences[1], abs=1e-3)


@pytest.mark.parametrize("where", ["lm_head", "embed_tokens"])
def test_a_head_or_embedding_with_an_adapter_is_not_copied(where, tmp_path):
    target = tiny.qwen3(num_hidden_layers=2)
    config = peft.LoraConfig(target_modules=[where], r=4, init_lora_weights=False, task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(target, config)
    drafter = tiny.random_drafter(rig.target())
    drafter.bind(target)
    with pytest.raises(ValueError, match="or has an adapter"):
        drafter.save_pretrained(tmp_path, include_embeddings=True)
    drafter.bind(wrapped.merge_and_unload())
    drafter.save_pretrained(tmp_path, include_embeddings=True)
    assert DSparkDrafter.from_pretrained(tmp_path).lm_head is not None
