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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_active_adapter_changes_between_calls(family):
    base = tiny.TARGETS[family]()
    wrapped = lora(base, task_type="CAUSAL_LM")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        wrapped.add_adapter(
            "other", peft.LoraConfig(target_modules=["o_proj", "down_proj"], r=8, init_lora_weights=False)
        )
    outputs = []
    for name in ("default", "other", "default"):
        wrapped.set_adapter(name)
        outputs.append(assert_all_kinds_equal(wrapped, base))
    with wrapped.disable_adapter():
        outputs.append(assert_all_kinds_equal(wrapped, base))
    outputs.append(assert_all_kinds_equal(wrapped, base, adapter_names=["other"]))
    wrapped.merge_adapter(["other"])
    outputs.append(assert_all_kinds_equal(wrapped, base))
    default, other, again, without, by_name, _ = outputs
    assert torch.equal(default, again) and torch.equal(other, by_name)
    assert not torch.equal(other, default) and not torch.equal(other, without)


def test_an_adapter_for_each_row_is_refused():
    base = tiny.qwen3(num_hidden_layers=2)
    wrapped = lora(base, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="adapter_names= gives each of 2 rows its adapter"):
        wrapped.generate(
            **tiny.prompt(num_rows=2),
            adapter_names=["default", "__base__"],
            max_new_tokens=4,
            assistant_model=tiny.random_drafter(base),
        )


def test_activated_lora_is_refused_where_it_is_invoked():
    prompt = tiny.prompt()["input_ids"][0].tolist()
    for invocation in (prompt[4:6], [120, 121, 122]):
        base = tiny.qwen3(num_hidden_layers=2)
        wrapped = lora(base, task_type="CAUSAL_LM", alora_invocation_tokens=invocation)
        if invocation == prompt[4:6]:
            with pytest.raises(ValueError, match="activated LoRA"):
                assert_all_kinds_equal(wrapped, base)
        else:
            assert_all_kinds_equal(wrapped, base)


@pytest.mark.parametrize("where", ["lm_head", "embed_tokens", "modules_to_save", "trainable_token_indices"])
@pytest.mark.parametrize("reads_rows", [False, True], ids=["", "a drafter that reads stored rows"])
def test_an_adapter_on_what_the_drafter_borrows(where, reads_rows):
    base = tiny.qwen3(num_hidden_layers=2)
    fields = {
        "modules_to_save": {"modules_to_save": ["lm_head", "embed_tokens"]},
        "trainable_token_indices": {"trainable_token_indices": [3, 5]},
    }.get(where, {"target_modules": ["q_proj", where]})
    config = peft.LoraConfig(**({"target_modules": ["q_proj"]} | fields), r=4, init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config).eval()
    embeddings = tiny.random_drafter(rig.target()).bind(base)
    states = torch.randn(1, 3, tiny.HIDDEN_SIZE)
    assert torch.equal(embeddings.logits(states), base.get_output_embeddings()(states))
    plain = wrapped.generate(**tiny.prompt(), **GREEDY)
    for settings in ({}, {"draft_vocab_size": 60}):
        drafter = tiny.random_drafter(rig.target(), raw_embeddings=reads_rows, **settings)
        assert torch.equal(wrapped.generate(**tiny.prompt(), **GREEDY, assistant_model=drafter), plain)


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
