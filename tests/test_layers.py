"""Options of the decoder layer, each against its formula."""

import pytest
import torch

import tiny
from dspark_hf.layers import eager_attention_forward, rotate, with_sink

IMPLEMENTATIONS = ["eager", "sdpa"]


@torch.no_grad()
def block(drafter, target, features=None) -> torch.Tensor:
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = torch.randn(1, 7, width, generator=generator) if features is None else features
    block_ids = torch.full((1, config.block_size), config.mask_token_id)
    block_ids[0, 0] = 5
    positions = 7 + torch.arange(config.block_size)[None]
    drafter.bind(target)
    return drafter(block_ids, positions, context_features=features).last_hidden_state


@pytest.fixture(scope="module")
def target():
    return tiny.qwen3()


# ---------------------------------------------------------------------- interleaved rotation


def test_interleaved_rotation_turns_neighbours():
    """Channels 2i and 2i+1 are the real and imaginary part of a number that is turned by angle i."""
    states, angle = torch.randn(1, 2, 5, 8), torch.rand(1, 1, 5, 4)
    doubled = torch.cat([angle, angle], dim=-1)
    turned = torch.view_as_complex(states.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angle), angle)
    expected = torch.view_as_real(turned).flatten(-2)
    torch.testing.assert_close(rotate(states, (doubled.cos(), doubled.sin()), interleaved=True), expected)


def test_interleaved_rotation_of_a_part_leaves_the_rest():
    states, angle = torch.randn(1, 2, 5, 8), torch.rand(1, 1, 5, 2)
    doubled = torch.cat([angle, angle], dim=-1)
    assert torch.equal(rotate(states, (doubled.cos(), doubled.sin()), interleaved=True)[..., 4:], states[..., 4:])


def test_interleaved_rotation_is_the_usual_one_with_channels_in_another_order(target):
    usual = tiny.random_drafter(target)
    interleaved = tiny.random_drafter(target, rotary_interleaved=True)
    head_dim = usual.config.head_dim
    order = torch.arange(head_dim).view(2, -1).T.flatten()  # 0, h/2, 1, h/2 + 1, ...
    with torch.no_grad():
        for layer in interleaved.layers:
            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj):
                rows = projection.weight.view(-1, head_dim, projection.in_features)
                projection.weight.copy_(rows[:, order].reshape_as(projection.weight))
            for norm in (attention.q_norm, attention.k_norm):
                norm.weight.copy_(norm.weight[order])
    torch.testing.assert_close(block(interleaved, target), block(usual, target))


# ---------------------------------------------------------------------- attention sinks


@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_a_sink_takes_weight_away(mask: str):
    """softmax([scores, sink]) without its last entry, times the values."""
    queries, keys, values = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    sinks = torch.randn(4)
    keep = torch.ones(2, 1, 3, 6, dtype=torch.bool) if mask == "none" else torch.rand(2, 1, 3, 6) > 0.3
    given = {"none": None, "boolean": keep, "additive": torch.zeros(keep.shape).masked_fill(~keep, -1e9)}[mask]

    scores = queries @ keys.repeat_interleave(2, 1).transpose(2, 3) * 0.5
    scores = scores.masked_fill(~keep, -torch.inf)
    with_column = torch.cat([scores, sinks[None, :, None, None].expand(2, 4, 3, 1)], dim=-1)
    expected = with_column.softmax(-1)[..., :-1] @ values.repeat_interleave(2, 1)

    keys, values, additive = with_sink(sinks, queries, keys, values, given)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    found, _ = eager_attention_forward(module, queries, keys, values, additive, scaling=0.5)
    torch.testing.assert_close(found.transpose(1, 2), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_sinks_of_minus_infinity_are_none(target, implementation: str):
    plain = tiny.random_drafter(target)
    with_sinks = tiny.random_drafter(target, attention_sinks=True)
    with_sinks.load_state_dict(plain.state_dict(), strict=False)
    for drafter in (plain, with_sinks):
        drafter.set_attn_implementation(implementation)
    for layer in with_sinks.layers:
        torch.nn.init.constant_(layer.self_attn.attention_sink_bias, -1e9)
    torch.testing.assert_close(block(with_sinks, target), block(plain, target))


@pytest.mark.parametrize(
    "fields", [{}, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}], ids=["full", "sliding"]
)
def test_sinks_are_the_same_in_every_implementation(target, fields):
    drafter = tiny.random_drafter(target, attention_sinks=True, **fields)
    for layer in drafter.layers:
        torch.nn.init.normal_(layer.self_attn.attention_sink_bias)
    found = []
    for implementation in IMPLEMENTATIONS:
        drafter.set_attn_implementation(implementation)
        found.append(block(drafter, target))
    torch.testing.assert_close(found[0], found[1])


def test_an_implementation_without_sinks_is_refused(target):
    drafter = tiny.random_drafter(target, attention_sinks=True)
    drafter.config._attn_implementation = "flex_attention"
    with pytest.raises(ValueError, match=r"attention sinks.*attn_implementation='sdpa'"):
        block(drafter, target)


# ---------------------------------------------------------------------- scales and embeddings


def test_scaled_values_are_scaled_value_projections(target):
    scaled, usual = tiny.random_drafter(target, value_scale=0.25), tiny.random_drafter(target)
    with torch.no_grad():
        for layer in usual.layers:
            layer.self_attn.v_proj.weight.mul_(0.25)
    torch.testing.assert_close(block(scaled, target), block(usual, target))


def test_logits_are_scaled_before_they_are_capped(target):
    drafter = tiny.random_drafter(target, logit_scale=3.0, final_logit_softcapping=2.0)
    states = torch.randn(1, 4, tiny.HIDDEN_SIZE)
    raw = target.get_output_embeddings()(states)
    torch.testing.assert_close(drafter.base_logits(states, drafter.bind(target)), 2 * torch.tanh(3 * raw / 2))


def test_a_mask_embedding_replaces_the_row_of_the_mask_token(target):
    drafter = tiny.random_drafter(target, has_mask_embedding=True)
    usual = tiny.random_drafter(target)
    usual.load_state_dict(drafter.state_dict(), strict=False)
    with torch.no_grad():
        drafter.mask_embedding.copy_(target.get_input_embeddings().weight[tiny.MASK_ID])
    expected = block(usual, target)
    torch.testing.assert_close(block(drafter, target), expected)
    with torch.no_grad():
        drafter.mask_embedding.add_(1.0)
    assert not torch.allclose(block(drafter, target), expected, rtol=1e-2, atol=1e-2)


def test_raw_embeddings_pass_by_what_the_targets_module_does():
    target = tiny.gemma3()
    ids = torch.tensor([[3, 4]])
    raw = tiny.random_drafter(target, raw_embeddings=True, embedding_scale=1.0).bind(target)
    assert torch.equal(raw.embed(ids, like=torch.zeros(1)), target.get_input_embeddings().weight[ids])
