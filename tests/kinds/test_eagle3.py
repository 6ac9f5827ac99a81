"""Configuration and files of EAGLE-3 drafters: ours, and those of public formats."""

import json

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel

import tiny
from dspark_hf import Drafter, DSparkDrafter, Eagle3Config, Eagle3Drafter
from dspark_hf.checkpoints import inspect_checkpoint

pytestmark = pytest.mark.integration

# The layer fields that every public format copies from a decoder's configuration.
DECODER = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
)


@pytest.fixture(scope="module")
def drafter():
    """As SpecForge makes them: three taps, no norms on queries and keys, a head of a reduced vocabulary."""
    fields = {"qk_norm": False, "draft_vocab_size": 40, "has_lm_head": True, "target_layer_ids": [1, 2, 3]}
    drafter = tiny.eagle3_drafter(tiny.llama(), **fields)
    drafter.draft_token_ids.copy_(torch.arange(40) * 3)
    return drafter


# ------------------------------------------------------------------ configuration


def test_what_a_chain_does_not_have_is_refused_in_one_message():
    with pytest.raises(ValueError, match="Eagle3Config has no markov_rank, sample_from_anchor"):
        Eagle3Config.for_target(tiny.llama().config, markov_rank=4, sample_from_anchor=False)
    with pytest.raises(ValueError, match="num_hidden_layers=2: an EAGLE-3 drafter has one layer"):
        Eagle3Config(target_layer_ids=[0], num_hidden_layers=2)


def test_a_configuration_has_the_fields_of_its_kind_alone():
    config = Eagle3Config.for_target(tiny.llama().config)
    assert not {"markov_rank", "mask_token_id", "sample_from_anchor", "layer_types"} & config.own_fields().keys()
    assert not config.gives_confidence
    assert config.describe()["heads"] == "none"


def test_for_target_needs_no_mask_token():
    config = Eagle3Config.for_target(tiny.llama().config)
    assert (config.block_size, config.num_draft_tokens) == (7, 7)


# ------------------------------------------------------------------ our own files


def test_a_saved_drafter_is_loaded_by_every_name(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    for kind in (Eagle3Drafter, Drafter, AutoModel):
        loaded = kind.from_pretrained(tmp_path)
        assert type(loaded) is Eagle3Drafter
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name


def test_a_drafter_of_another_kind_is_refused(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "chain")
    tiny.random_drafter(tiny.qwen3()).save_pretrained(tmp_path / "block")
    with pytest.raises(ValueError, match="load it with Eagle3Drafter or Drafter"):
        DSparkDrafter.from_pretrained(tmp_path / "chain")
    with pytest.raises(ValueError, match="load it with DSparkDrafter or Drafter"):
        Eagle3Drafter.from_pretrained(tmp_path / "block")
    assert type(Drafter.from_pretrained(tmp_path / "block")) is DSparkDrafter


def test_it_is_not_exported_as_a_block_drafter(drafter, tmp_path):
    with pytest.raises(ValueError, match="EAGLE-3"):
        drafter.save_pretrained(tmp_path / "out", format="vllm-sglang")
    assert not (tmp_path / "out").exists()


def test_it_is_inspected_as_what_it_is(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.engines == {} and len(found.oddities) == 1 and "taps the target's last layer" in found.oddities[0]
    assert "method: EAGLE-3" in str(found) and "drafts: one after the other, up to 4 per round" in str(found)
    assert "(llama)" in str(found) and "Markov" not in str(found)


def test_more_drafts_than_it_was_trained_for_are_refused():
    target = tiny.llama()
    with pytest.raises(ValueError, match=r"num_assistant_tokens=9.*at most 4.*one after the other"):
        target.generate(**tiny.prompt(), assistant_model=tiny.eagle3_drafter(target), num_assistant_tokens=9)


# ------------------------------------------------------------------ public formats


def decoder(drafter):
    fields = {name: getattr(drafter.config, name) for name in DECODER}
    return fields | {"num_hidden_layers": 1, "rope_theta": 10_000.0, "attention_bias": False}


def tensors(drafter, layer):
    ids = drafter.draft_token_ids
    named = {
        name.replace("layers.0.", layer): tensor.clone()
        for name, tensor in drafter.state_dict().items()
        if name != "draft_token_ids"
    }
    marked = torch.zeros(drafter.config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return named | {"d2t": ids - torch.arange(len(ids)), "t2d": marked}


def specforge(drafter):
    """Taps are outputs in `eagle_config`."""
    config = decoder(drafter) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    config |= {"draft_vocab_size": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    return config, tensors(drafter, "midlayer.")


def speculators(drafter):
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 40,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in drafter.config.target_layer_ids],
        "speculators_config": {"verifier": {"name_or_path": "the/target"}},
        "transformer_layer_config": decoder(drafter) | {"model_type": "llama"},
    }
    return config, tensors(drafter, "layers.0.")


def write(folder, config, named):
    (folder / "config.json").write_text(json.dumps(config))
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("spell", [specforge, speculators], ids=["SpecForge and AngelSlim", "speculators"])
def test_public_files_give_the_drafter(drafter, spell, tmp_path):
    loaded = Drafter.from_pretrained(write(tmp_path, *spell(drafter)))
    assert type(loaded) is Eagle3Drafter
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.config.target_layer_ids == [1, 2, 3]
    assert loaded.config.norm_before_residual == (spell is speculators)
    assert loaded.layers[0].norm_before_residual == (spell is speculators)
    inputs, settings = tiny.prompt(), {"max_new_tokens": 6, "do_sample": False}
    target = tiny.llama()
    assert torch.equal(
        target.generate(**inputs, **settings, assistant_model=loaded.eval()), target.generate(**inputs, **settings)
    )
