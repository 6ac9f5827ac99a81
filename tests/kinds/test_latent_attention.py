"""Latent attention of EAGLE-3 drafters, against transformers' own for DeepSeek-V3, and what its files may lack."""

import json

import pytest
import torch
import transformers
from replicas import LATENT, REPLICAS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import tiny
from dspark_hf import Drafter, Eagle3Config
from dspark_hf.kinds.eagle3.latent_attention import LatentAttention
from dspark_hf.layers import DSparkRotaryEmbedding

pytestmark = pytest.mark.integration

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, YARN], ids=["plain", "YaRN with mscale"])
@torch.no_grad()
def test_it_computes_what_transformers_computes(rope):
    rope = rope | {"rope_theta": 10_000.0}
    shared = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256}
    shared |= {"rms_norm_eps": 1e-6, "rope_parameters": rope}
    theirs = transformers.DeepseekV3Config(**shared, **LATENT, qk_rope_head_dim=4, attn_implementation="eager")
    reference = DeepseekV3Attention(theirs, 0).eval()
    ours = Eagle3Config(target_layer_ids=[0], qk_norm=False, head_dim=4, rotary_interleaved=True, **shared, **LATENT)
    attention = LatentAttention(ours, 0, input_size=32).eval()
    for parameter in reference.parameters():
        parameter.normal_(std=0.3)
    attention.load_state_dict(reference.state_dict())
    states, positions = torch.randn(1, 7, 32), torch.arange(7)[None] + 3
    mask = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    wanted, _ = reference(states, DeepseekV3RotaryEmbedding(theirs)(states, positions), mask)[:2]
    angles = DSparkRotaryEmbedding(ours)(states, positions)
    assert torch.allclose(attention(states, angles, None, mask), wanted, atol=1e-5)
    # The last three behind keys and values of the first four.
    early = attention.key_values(states[:, :4], tuple(part[:, :, :4] for part in angles))
    late = attention(states[:, 4:], tuple(part[:, :, 4:] for part in angles), early, mask[:, :, 4:])
    assert torch.allclose(late, wanted[:, 4:], atol=1e-5)


@pytest.mark.parametrize("name", [*LATENT, "qk_rope_head_dim"])
def test_a_missing_size_is_named(name, tmp_path):
    folder = REPLICAS["EAGLE-3, latent attention"].build(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config[name]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"latent \\(MLA\\), but its configuration lacks {name}"):
        Drafter.from_pretrained(folder)


def test_sizes_that_contradict_each_other():
    with pytest.raises(ValueError, match="needs q_lora_rank, qk_nope_head_dim, v_head_dim as well"):
        Eagle3Config(target_layer_ids=[0], kv_lora_rank=8)
    with pytest.raises(ValueError, match="set qk_norm=False"):
        Eagle3Config(target_layer_ids=[0], head_dim=4, **LATENT)
    with pytest.raises(ValueError, match="v_head_dim=99 is more than the 10 channels of a key"):
        Eagle3Config(target_layer_ids=[0], head_dim=4, **(LATENT | {"v_head_dim": 99}))


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_and_sampling(rows, tmp_path):
    replica = REPLICAS["EAGLE-3.1, latent attention"]
    drafter, target = Drafter.from_pretrained(replica.build(tmp_path)).eval(), replica.target()
    inputs, settings = tiny.prompt(num_rows=rows), {"max_new_tokens": 16}
    plain = target.generate(**inputs, **settings, do_sample=False)
    assert torch.equal(target.generate(**inputs, **settings, do_sample=False, assistant_model=drafter), plain)
    assert target.generate(**inputs, **settings, do_sample=True, assistant_model=drafter).shape == plain.shape
    assert "latent attention" in drafter.config.describe()["layers"]
