"""A target's own attention is exchanged only for passes of rows, and comes back as it was."""

import copy
import threading

import pytest
import torch
import transformers

import tiny
from dspark_hf.ragged import exchange
from dspark_hf.ragged.exchange import attention_in_place, can_exchange_attention, following
from dspark_hf.ragged.plan import RaggedPlan
from dspark_hf.transformers_names import attention_name


def settings_of(target):
    """The attention implementation of every configuration in the target, by the identity of the configuration."""
    configs = [target.config, *(getattr(target.config, name, None) for name in target.config.sub_configs)]
    configs += [getattr(module, "config", None) for module in target.modules()]
    return {
        id(config): attention_name(config) for config in configs if isinstance(config, transformers.PreTrainedConfig)
    }


def composite(**implementations):
    """A tiny text model and a tiny vision tower, whose attention implementations differ."""
    text = tiny.target_config(
        "Gemma3Text", num_hidden_layers=2, layer_types=tiny.ALTERNATING[:2], sliding_window=8, query_pre_attn_scalar=8
    )
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text.to_dict(),
        vision_config=tower | {"image_size": 8, "patch_size": 4},
        mm_tokens_per_image=1,
        image_token_index=120,
    )
    target = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    for name, weight in target.named_parameters():
        if weight.dim() > 1 and "language_model" in name:
            weight.normal_(0, 0.4)
    target.set_attn_implementation(implementations)
    return target


IMPLEMENTATIONS = [
    {"text_config": "eager", "vision_config": "sdpa"},
    {"text_config": "sdpa", "vision_config": "eager"},
    {"": "eager", "text_config": "sdpa", "vision_config": "sdpa"},
]


@pytest.mark.parametrize("implementations", IMPLEMENTATIONS, ids=str)
def test_the_parts_of_a_composite_target_keep_their_settings(implementations):
    target = composite(**implementations)
    before = settings_of(target)
    assert set(before.values()) == {"eager", "sdpa"}, "the case is about settings that differ"
    batch = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=4))
    plain = target.generate(**batch, max_new_tokens=6, do_sample=False)
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    drafted = target.generate(**batch, max_new_tokens=6, do_sample=False, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    assert settings_of(target) == before


class Failing(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] > 11:
            raise RuntimeError("the criterion fails")
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("implementations", IMPLEMENTATIONS, ids=str)
def test_settings_come_back_after_an_exception(implementations):
    target = composite(**implementations)
    before = settings_of(target)
    batch = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=4))
    with pytest.raises(RuntimeError, match="the criterion fails"):
        target.generate(
            **batch,
            max_new_tokens=8,
            do_sample=False,
            stopping_criteria=[Failing()],
            assistant_model=tiny.random_drafter(target, num_hidden_layers=1),
        )
    assert settings_of(target) == before


def test_the_vision_tower_is_not_touched():
    target = composite(text_config="eager", vision_config="sdpa")
    with attention_in_place(target):
        assert attention_name(target.config.vision_config) == "sdpa"
        assert attention_name(target.config.text_config) not in ("eager", "sdpa")


def test_contexts_may_overlap():
    target = tiny.qwen3(num_hidden_layers=1)
    first, second = attention_in_place(target), attention_in_place(target)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert attention_name(target.config) != "sdpa"
    second.__exit__(None, None, None)
    assert attention_name(target.config) == "sdpa"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_other_passes_attend_as_before(implementation):
    target = tiny.gpt_oss() if implementation == "eager" else tiny.qwen3()
    target.set_attn_implementation(implementation)
    batch = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=4))
    before = target(**batch, output_attentions=implementation == "eager")
    with attention_in_place(target):
        within = target(**batch, output_attentions=implementation == "eager")
    torch.testing.assert_close(within.logits, before.logits)
    if implementation == "eager":
        torch.testing.assert_close(within.attentions, before.attentions)


class DerivedAttention(transformers.models.llama.modeling_llama.LlamaAttention):
    """A user's own attention layer, in a file that has no attention functions."""


def test_a_derived_attention_layer_finds_its_eager_function():
    target = tiny.llama()
    target.set_attn_implementation("eager")
    for layer in target.model.layers:
        layer.self_attn.__class__ = DerivedAttention
    before = target(**tiny.prompt()).logits
    with attention_in_place(target):
        torch.testing.assert_close(target(**tiny.prompt()).logits, before)


def test_threads_that_share_a_target_do_not_disturb_each_other():
    target = tiny.qwen3(num_hidden_layers=2)
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    settings = {"max_new_tokens": 24, "do_sample": False}
    batches = [tiny.left_padded(tiny.prompt(9, seed=i), tiny.prompt(4, seed=10 + i)) for i in range(3)]
    expected = [target.generate(**batch, **settings) for batch in batches]
    found: dict[str, bool] = {}

    def drafting(index):
        output = target.generate(**batches[index], **settings, assistant_model=copy.copy(drafter))
        found[f"drafting {index}"] = torch.equal(output, expected[index])

    def plain(index):
        found[f"plain {index}"] = torch.equal(target.generate(**batches[index], **settings), expected[index])

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3) for run in (drafting, plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(found, True) and len(found) == 6
    assert attention_name(target.config) == "sdpa"
    assert not exchange._exchanged


def test_a_plan_is_followed_by_one_thread_only():
    plan, seen = RaggedPlan.of([0], [1]), []
    with following(plan):
        thread = threading.Thread(target=lambda: seen.append(exchange._plan.get()))
        thread.start()
        thread.join()
        assert exchange._plan.get() is plan
    assert seen == [None]
    assert exchange._plan.get() is None


def test_targets_without_the_attention_interface_cannot_exchange_theirs():
    assert can_exchange_attention(tiny.qwen3(num_hidden_layers=1))
    config = transformers.BloomConfig(vocab_size=tiny.VOCAB_SIZE, hidden_size=32, n_layer=1, n_head=4)
    assert not can_exchange_attention(transformers.BloomForCausalLM(config))
