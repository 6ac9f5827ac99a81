"""All layers' keys and values of context by one product are those of the layers one by one."""

import pytest
import torch
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import tiny
from dspark_hf.context_projection import ContextProjection
from dspark_hf.layers import DSparkRMSNorm

OPTIONS = [
    {},
    {"attention_bias": True},
    {"attention_k_eq_v": True},
    {"qk_norm": False},
    {"v_norm": True, "value_scale": 0.5},
    {"rotary_interleaved": True},
]


def drafter_with(**fields):
    drafter = tiny.random_drafter(tiny.qwen3(), num_hidden_layers=3, **fields)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.dim() == 1:  # Biases and norms, so that none is 0 or 1 throughout.
                parameter.normal_(1.0)
    return drafter


def inputs_of(drafter, num_rows=2, num_tokens=5, dtype=torch.float32):
    context = torch.randn(num_rows, num_tokens, drafter.config.hidden_size).to(dtype)
    positions = torch.arange(num_tokens).expand(num_rows, -1) + torch.tensor([[3], [7]])[:num_rows]
    return context, drafter.rotary_emb(context, positions)


@pytest.mark.parametrize("fields", OPTIONS, ids=str)
@torch.no_grad()
def test_one_product_gives_what_the_layers_give(fields):
    drafter = drafter_with(**fields)
    projection, inputs = drafter.context_projection(), inputs_of(drafter)
    keys, values = projection(*inputs)
    expected = [layer.self_attn.key_values(*inputs) for layer in drafter.layers]
    torch.testing.assert_close(keys, torch.stack([k for k, _ in expected]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(values, torch.stack([v for _, v in expected]), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_norms_round_as_those_of_the_layers_in_bfloat16():
    drafter = drafter_with().to(torch.bfloat16)
    context, angles = inputs_of(drafter, dtype=torch.bfloat16)
    keys, _ = drafter.context_projection()(context, angles)
    expected = torch.stack([layer.self_attn.key_values(context, angles)[0] for layer in drafter.layers])
    assert (keys == expected).float().mean() > 0.95  # The product itself may add up in another order.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_norms_round_as_transformers_norms_do(dtype):
    ours, theirs = DSparkRMSNorm(64, eps=1e-6).to(dtype), Qwen3RMSNorm(64, eps=1e-6).to(dtype)
    ours.weight.normal_(1.0)
    theirs.load_state_dict(ours.state_dict())
    states = torch.randn(50, 64).to(dtype)
    assert torch.equal(ours(states), theirs(states))
    unscaled = DSparkRMSNorm(64, eps=1e-6, with_scale=False)(states)
    assert unscaled.dtype == dtype
    theirs.weight.fill_(1.0)
    assert torch.equal(unscaled, theirs(states))


def test_layers_that_are_more_than_their_weights_are_asked_themselves():
    def parts(change):
        drafter = drafter_with()
        attention = [layer.self_attn for layer in drafter.layers]
        change(attention[1])
        return ContextProjection.of(attention)

    class Quantized(torch.nn.Parameter):
        pass

    class Adapted(torch.nn.Linear):
        pass

    def with_weight(kind):
        def change(attention):
            attention.k_proj.weight = kind(attention.k_proj.weight.data)

        return change

    assert parts(lambda attention: None) is not None
    assert parts(with_weight(Quantized)) is None
    assert parts(lambda attention: setattr(attention, "v_proj", Adapted(32, 16, bias=False))) is None
    assert parts(lambda attention: attention.v_proj.register_forward_hook(lambda *args: None)) is None
    assert parts(lambda attention: attention.k_proj.double()) is None
    assert parts(lambda attention: setattr(attention, "k_norm", torch.nn.RMSNorm(8))) is None


@pytest.mark.parametrize("past_autograd", [False, True])
def test_each_call_projects_with_the_weights_as_they_are(past_autograd):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    target.generate(**tiny.prompt(9), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    with torch.no_grad():
        for layer in drafter.layers:
            for weight in (layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight):
                (weight.data if past_autograd else weight).fill_(1.0)
    made = []
    of = ContextProjection.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ContextProjection, "of", lambda layers: made.append(of(layers)) or made[-1])
        target.generate(**tiny.prompt(9), max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert (made[-1].weight == 1.0).all()
