"""The private names of transformers: all there in this version, and what each is taken to mean."""

import pytest
import torch
from generation import rig
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation import PrefixConstrainedLogitsProcessor

import tiny
from dspark_hf import transformers_names as names

pytestmark = pytest.mark.integration


def test_this_version_has_every_name(recwarn):
    names.check_transformers()
    assert not recwarn.list


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Cache, "crop"),
        (Cache, "is_croppable"),
        (Cache, "activate_past_recording"),
        (GenerationConfig, "_get_default_generation_params"),
        (PreTrainedConfig, "_attn_implementation"),
        (PreTrainedModel, "_is_stateful"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_name_that_is_missing_is_reported(monkeypatch, owner, name):
    monkeypatch.delattr(owner, name)
    with pytest.warns(RuntimeWarning, match=f"{owner.__name__}.{name}"):
        names.check_transformers()


@pytest.fixture
def handed():
    """What transformers prepares for a decoding loop."""
    handed = {}

    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        handed.update(kwargs, config=generation_config, criteria=stopping_criteria, processors=logits_processor)
        return input_ids

    def call(**kwargs):
        handed.clear()
        rig.target().generate(**tiny.prompt(), max_new_tokens=12, custom_generate=loop, **kwargs)
        return handed

    return call


def test_a_loop_is_handed_what_it_reads(handed):
    given = handed()
    assert isinstance(given[names.CACHE_KEY], Cache)
    assert given["use_cache"] is True
    assert given["position_ids"].shape == (1, 9)
    assert isinstance(given["criteria"], StoppingCriteriaList)
    assert given["config"].max_length == 9 + 12
    assert names.prompt_mask_length(given, given["config"]) == 9


def test_the_padding_token(handed):
    assert names.pad_token_of(handed(pad_token_id=5)["config"]) == 5
    assert names.pad_token_of(GenerationConfig()) == 0


def test_whose_cache_it_is(handed):
    assert names.is_callers_cache(handed(**{names.CACHE_KEY: DynamicCache()})[names.CACHE_KEY])
    assert not names.is_callers_cache(handed()[names.CACHE_KEY])


def test_the_function_of_allowed_tokens(handed):
    def allowed(row, ids):
        return [3, 4]

    processors = handed(prefix_allowed_tokens_fn=allowed)["processors"]
    (constrained,) = [p for p in processors if isinstance(p, PrefixConstrainedLogitsProcessor)]
    assert names.allowed_tokens_function(constrained) is allowed


def test_arguments_of_more_tokens(handed):
    target, given = rig.target(), handed()
    longer = names.extended_model_kwargs(target, {"attention_mask": torch.ones(1, 9), "use_cache": True}, 3)
    assert longer["attention_mask"].shape == (1, 12)
    assert names.extended_model_kwargs(target, given, 0) == given


def test_attention():
    target = rig.target()
    target.set_attn_implementation("eager")
    assert names.attention_name(target.config) == "eager"
    assert names.has_exchangeable_attention(target)
    assert names.supports_sdpa(target)
    assert not names.is_stateful(target)


def test_modules_that_others_changed():
    plain = nn.Linear(2, 2)
    assert not names.has_device_hook(plain)
    assert names.uncompiled(plain) is None
    assert names.uncompiled(torch.compile(plain)) is plain
    accelerate = pytest.importorskip("accelerate")
    accelerate.hooks.add_hook_to_module(plain, accelerate.hooks.ModelHook())
    assert names.has_device_hook(plain)


def test_adapters(monkeypatch):
    peft = pytest.importorskip("peft")
    # Newer versions of transformers ask for a PEFT that may not be released yet.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18")
    target = rig.target()
    assert not names.has_own_adapter(target)
    target.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    assert names.has_own_adapter(target)
