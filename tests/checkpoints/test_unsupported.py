"""Drafters that are not loaded are recognised, and the refusal says what they are and what they would need."""

import json
from pathlib import Path

import pytest
import spellings
import torch
from safetensors.torch import load_file

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import inspect_checkpoint

V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "hidden_size": 32,
    "num_hidden_layers": 43,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 99,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 8,
}

KINDS = {
    "NeMo's dense DeepSeek-V4": (
        {"architectures": ["DeepseekV4DSparkModel"]},
        ["layers.0.self_attn.o_a_proj.weight"],
        "dense DeepSeek-V4",
        "without streams and experts",
    ),
    "Domino": ({}, ["prefix_gru.weight_ih_l0"], "Domino", "GRU"),
    "xpress": ({}, ["refiner_head.in_proj.weight"], "xpress", "refiner head"),
    "latent attention": (
        {"architectures": ["K3DSparkModel"]},
        ["layers.0.self_attn.kv_a_proj_with_mqa.weight"],
        "MLA",
        "latent attention",
    ),
    "Bonsai": ({}, ["log_snr_embed.fc1.weight"], "Bonsai", "log-SNR"),
    "P-EAGLE": ({"speculators_model_type": "peagle"}, [], "P-EAGLE", "candidate generator"),
    "DFly by name": ({"architectures": ["Qwen3DFlyModel"]}, [], "DFly", "fusion of the taps"),
    "DFly by tensor": ({}, ["layer_fusion_weights"], "DFly", "correction of hidden states"),
    "GPTQ": ({}, ["layers.0.mlp.up_proj.qweight"], "quantized", "GPTQ"),
    "zero points": ({}, ["layers.0.mlp.up_proj.weight_zero_point"], "quantized", "zero points"),
}


def unsupported(folder: Path, fields, tensors) -> Path:
    drafter = tiny.random_drafter(tiny.qwen3())
    spellings.specforge(drafter, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    added = {name: torch.zeros(2, 2) for name in tensors}
    return spellings.write(folder, config, load_file(folder / "model.safetensors") | added)


@pytest.mark.parametrize(("fields", "tensors", "name", "needs"), KINDS.values(), ids=KINDS)
def test_it_is_named_with_what_it_needs(fields, tensors, name: str, needs: str, tmp_path: Path):
    folder = unsupported(tmp_path, fields, tensors)
    with pytest.raises(ValueError, match=f"{name}.* drafter, which is not loaded here.*{needs}"):
        DSparkDrafter.from_pretrained(folder)
    found = inspect_checkpoint(folder)
    assert name in found.format
    assert needs in found.refusal
    assert "not loaded" in str(found)
    json.dumps(found.to_dict())


def embedded(folder: Path, config=V4) -> Path:
    names = [f"mtp.{stage}.attn_norm.weight" for stage in range(3)] + ["mtp.2.markov_head.markov_w1.weight"]
    target = ["model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"]
    return spellings.write(folder, config, {name: torch.zeros(2, 2) for name in names + target})


def test_the_embedded_drafter_of_deepseek_v4_1_is_shown(tmp_path: Path):
    folder = embedded(tmp_path, {"model_type": "deepseek_v41", "text_config": V4})
    with pytest.raises(ValueError, match=r"DeepSeek-V4\.1 embedded DSpark drafter, which is not loaded here"):
        DSparkDrafter.from_pretrained(folder)
    found = inspect_checkpoint(folder)
    assert found.embedded == {
        "dspark_block_size": 5,
        "dspark_noise_token_id": 99,
        "dspark_target_layer_ids": [40, 41, 42],
        "dspark_markov_rank": 8,
        "stages": 3,
    }
    assert "stages: 3" in str(found)


def test_a_sharded_target_is_refused_without_its_shards(tmp_path: Path):
    """They are hundreds of gigabytes; the index alone tells."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v41", "text_config": V4}))
    weight_map = {f"mtp.{stage}.attn_norm.weight": f"model-{stage}.safetensors" for stage in range(3)}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert inspect_checkpoint(tmp_path).embedded["stages"] == 3
