"""Laguna's drafters (poolside): gated heads, norms over taps and context, fused projections, and their packagings."""

import pytest
import torch
from replicas import laguna as files
from replicas import laguna_speculators as speculators
from spellings import write

import tiny
from dspark_hf import Drafter, DSparkDrafter
from dspark_hf.checkpoints import inspect_checkpoint

pytestmark = pytest.mark.integration

BLOCK = 5


@pytest.fixture(scope="module")
def target():
    return tiny.qwen3()


def drafter_for(target, **fields):
    own = {
        "markov_rank": 0,
        "enable_confidence_head": False,
        "sample_from_anchor": False,
        "block_size": BLOCK,
        "attention_gate": "head",
        "fc_norm": True,
        "norm_context": True,
        "is_causal": True,
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 8,
        "target_layer_ids": [0, 1, 2],
    }
    drafter = tiny.random_drafter(target, **(own | fields))
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return drafter


def reference(drafter, block_states, features, first):
    """Laguna's backbone as vLLM computes it, tensor by tensor: `[Q, D]` from embedded slots and taps, without a window."""
    config, w = drafter.config, drafter.state_dict()
    heads, keys, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim

    def norm(x, name):
        return w[name] * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps)

    def rope(x, positions):  # [T, H, hd]
        frequencies = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
        angles = torch.cat([positions[:, None] * frequencies] * 2, dim=-1)[:, None]
        a, b = x.chunk(2, dim=-1)
        return x * angles.cos() + torch.cat([-b, a], dim=-1) * angles.sin()

    taps = features.chunk(config.num_taps, dim=-1)
    context = torch.cat([norm(tap, f"fc_norm.{i}.weight") for i, tap in enumerate(taps)], dim=-1) @ w["fc.weight"].T
    context, x = norm(context, "hidden_norm.weight"), block_states
    before, slots = torch.arange(len(context)), first + torch.arange(len(x))
    for i in range(config.num_hidden_layers):
        p = f"layers.{i}."
        normed = norm(x, p + "input_layernorm.weight")
        both = torch.cat([norm(context, p + "input_layernorm.weight"), normed])
        positions = torch.cat([before, slots])
        k = rope(
            norm((both @ w[p + "self_attn.k_proj.weight"].T).view(-1, keys, size), p + "self_attn.k_norm.weight"),
            positions,
        )
        v = (both @ w[p + "self_attn.v_proj.weight"].T).view(-1, keys, size)
        q = rope(
            norm((normed @ w[p + "self_attn.q_proj.weight"].T).view(-1, heads, size), p + "self_attn.q_norm.weight"),
            slots,
        )
        k, v = (t.repeat_interleave(heads // keys, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        scores = scores.masked_fill(positions[None] > slots[:, None], -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        gates = torch.log1p(torch.exp(normed @ w[p + "self_attn.g_proj.weight"].T))  # [Q, H]
        x = x + (attended * gates[..., None]).flatten(1) @ w[p + "self_attn.o_proj.weight"].T
        normed = norm(x, p + "post_attention_layernorm.weight")
        gate, up = (normed @ w[f"{p}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w[p + "mlp.down_proj.weight"].T
    return norm(x, "norm.weight")


@torch.no_grad()
def test_the_backbone_is_lagunas(target):
    drafter = drafter_for(target, layer_types=["full_attention"] * 2, sliding_window=None)
    embeddings = drafter.bind(target)
    features = torch.randn(1, 7, drafter.config.num_taps * 32)
    ids, positions = torch.tensor([[5, *[tiny.MASK_ID] * 4]]), torch.arange(7, 12)[None]
    mask = torch.ones(1, 1, 5, 12, dtype=torch.bool).tril(7)
    output = drafter(ids, positions, features, attention_mask=mask, embeddings=embeddings).last_hidden_state[0]
    wanted = reference(drafter, embeddings.embed(ids, like=drafter.norm.weight)[0], features[0], 7)
    assert torch.allclose(output, wanted, atol=1e-4)


@pytest.mark.parametrize("spell", [files, speculators], ids=["flat and fused", "speculators"])
def test_files_give_the_drafter(target, spell, tmp_path):
    made = drafter_for(target)
    folder = write(tmp_path, *spell(made))
    loaded = Drafter.from_pretrained(folder).eval()
    assert type(loaded) is DSparkDrafter
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.config.norm_context and loaded.config.fc_norm and loaded.config.attention_gate == "head"
    assert loaded.config.rope_parameters["rope_theta"] == 10_000.0 and loaded.config.is_causal
    assert inspect_checkpoint(folder).format == "Laguna DFlash"
    inputs, settings = tiny.prompt(), {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=loaded), plain)


def test_context_is_normed_in_the_cache_too(target):
    """Keys of short contexts, which other drafters project for all layers at once."""
    made = drafter_for(target)
    assert made.context_projection() is None


def test_another_rotation_for_sliding_layers(target, tmp_path):
    swa = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    config, tensors = files(drafter_for(target), swa_rope_parameters=swa)
    loaded = Drafter.from_pretrained(write(tmp_path, config, tensors))
    assert loaded.config.rope_parameters == swa


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gating": "per-element"}, "gating='per-element', but its tensors have head gates"),
        ({"gating": "strange"}, "gating='strange', but its tensors"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layers are of several types"),
        ({"num_key_value_heads": 3}, "cannot be split"),
        ({"num_attention_heads": None}, "cannot be split: num_attention_heads"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1]}, "do not name the same taps"),
    ],
)
def test_malformed_files_are_refused(target, change, message, tmp_path):
    config, tensors = files(drafter_for(target), **change)
    with pytest.raises(ValueError, match=message):
        Drafter.from_pretrained(write(tmp_path, config, tensors))


@pytest.mark.parametrize("lost", ["layers.1.self_attn.g_proj.weight", "aux_hidden_norms.1.weight"])
def test_a_lost_gate_or_norm_is_named(target, lost, tmp_path):
    config, tensors = files(drafter_for(target))
    del tensors[lost]
    with pytest.raises(ValueError, match=f"missing: {lost.replace('aux_hidden_norms', 'fc_norm')}"):
        Drafter.from_pretrained(write(tmp_path, config, tensors))


@torch.no_grad()
def test_gates_of_a_query_projection():
    """Qwen3.5's: the sigmoid of the second half of each head's queries."""
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, attention_gate="query")
    attention = drafter.layers[0].self_attn
    states = torch.randn(1, 3, 32)
    projected = (states @ attention.q_proj.weight.T).view(1, 3, 4, 16)
    queries, gates = attention._queries_and_gates(states)
    assert torch.allclose(queries, projected[..., :8], atol=1e-5)
    assert torch.allclose(gates, torch.sigmoid(projected[..., 8:]), atol=1e-5)
