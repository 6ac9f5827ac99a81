"""A block sees the context before its anchor and itself, through either attention, and nothing of other blocks."""

import pytest
import torch

import tiny
from dspark_hf.training.anchors import Anchors
from dspark_hf.training.features import target_features

BLOCK = tiny.BLOCK_SIZE
ANCHORS = Anchors(torch.tensor([[4, 7, 8, 15], [3, 5, 0, 0]]), torch.tensor([[True] * 4, [True, True, False, False]]))
FAMILIES = {
    "full": {},
    "causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5},
    "anchor_slot_unused": {"sample_from_anchor": False},
}


@pytest.fixture
def batch():
    ids = tiny.prompt(20, num_rows=2)["input_ids"]
    attention_mask = torch.ones_like(ids).bool()
    attention_mask[1, 12:] = False
    return ids, attention_mask


def hidden_states(drafter, target, ids, attention_mask, attention="sdpa", block_ids=None, features=None):
    drafter.set_attn_implementation(attention)
    inputs = drafter.training_inputs(ids, attention_mask, *ANCHORS)
    inputs["block_ids"] = inputs["block_ids"] if block_ids is None else block_ids
    features = (
        target_features(target, drafter.config.hidden_state_indices, ids).context_features
        if features is None
        else features
    )
    # Compiling flex_attention takes longer than all other tests together.
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return drafter(
            **inputs,
            context_features=features,
            embeddings=drafter.bind(target),
        ).last_hidden_state


def differences(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Which slots of `[B, slots, D]` changed by more than rounding, `[B, slots]`."""
    return ((after - before).abs() > 1e-5).any(dim=-1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "flex_attention"])
def test_every_attention_gives_what_sdpa_gives(attention, family, batch):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, **FAMILIES[family])
    expected = hidden_states(drafter, target, *batch)
    found = hidden_states(drafter, target, *batch, attention=attention)
    kept = ANCHORS.keep.repeat_interleave(BLOCK, dim=1)
    torch.testing.assert_close(found[kept], expected[kept], rtol=1e-4, atol=1e-5)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("changed", range(4))
def test_a_token_in_one_block_changes_no_other(changed, family, batch):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, **FAMILIES[family])
    before = hidden_states(drafter, target, *batch)
    block_ids = drafter.block_inputs(batch[0], ANCHORS.positions)["block_ids"]
    block_ids[:, changed * BLOCK + 2] = 33
    after = hidden_states(drafter, target, *batch, block_ids=block_ids)
    differs = differences(before, after).view(2, 4, BLOCK)
    assert differs[:, changed, 2:].all()
    assert not differs[:, [i for i in range(4) if i != changed]].any()
    if family == "causal":
        assert not differs[:, changed, :2].any()


def test_the_feature_at_the_anchor_and_after_it_is_invisible(batch):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    features = target_features(target, drafter.config.hidden_state_indices, batch[0]).context_features
    before = hidden_states(drafter, target, *batch, features=features)
    features = features.clone()
    features[0, 7:] += 1.0
    differs = differences(before, hidden_states(drafter, target, *batch, features=features))[0].view(4, BLOCK)
    assert differs.any(dim=-1).tolist() == [False, False, True, True]  # Anchors 4 and 7 see what is before them.


def test_padding_is_invisible_and_a_block_in_a_batch_is_the_block_drafted_alone(batch):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    expected = hidden_states(drafter, target, *batch)[1].view(4, BLOCK, -1)
    for index, anchor in enumerate((3, 5)):
        ids = batch[0][1:, : anchor + 1]
        inputs = drafter.block_inputs(ids, torch.tensor([[anchor]]))
        features = target_features(target, drafter.config.hidden_state_indices, batch[0][1:, :12]).context_features[
            :, :anchor
        ]
        alone = drafter(**inputs, context_features=features, embeddings=drafter.bind(target)).last_hidden_state[0]
        torch.testing.assert_close(alone, expected[index], rtol=1e-4, atol=1e-5)
