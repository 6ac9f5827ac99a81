"""The mask of a pass over rows is that of transformers for each row, and so is the attention."""

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from dspark_hf.ragged.attention import NotPackable, RaggedMask, ragged_attention
from dspark_hf.ragged.plan import RaggedPlan

RULES = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(5),
    "chunks": chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.long)),
}
PASSES = {
    "blocks": ([9, 0, 4], [3, 1, 4]),
    "prompts": ([0, 0, 0], [7, 3, 12]),
    "a prompt while others decode": ([12, 0, 7, 9], [1, 30, 1, 1]),
}


def of_one_row(rule, length, count, kept=None):
    """What transformers' mask function gives for `count` new tokens of a row that holds `length`, `[count, length + count]`."""
    mask = sdpa_mask(1, count, length + count, length, 0, rule, kept, allow_is_causal_skip=False)
    return mask[0, 0]


@pytest.mark.parametrize("by_index", [True, False], ids=["tensors of indices", "one index at a time"])
@pytest.mark.parametrize(("lengths", "counts"), PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_masks_are_those_of_each_row(rule, lengths, counts, by_index):
    plan = RaggedPlan.of(lengths, counts)
    mask = RaggedMask(plan, rule, by_index=by_index)
    for index, group in enumerate(plan.groups):
        visible, rows = mask.visible(index, torch.device("cpu")), torch.arange(len(counts))[group.rows].tolist()
        for place, row in enumerate(rows):
            if (group.places == place).any():
                expected = of_one_row(rule, lengths[row], counts[row])
                assert torch.equal(visible[place, 0, : counts[row], : expected.shape[1]], expected)
                assert not visible[place, 0, : counts[row], expected.shape[1] :].any(), "columns of longer rows"


def test_masked_columns_are_hidden_from_every_token():
    kept = torch.tensor([[True, False, True, True], [True, True, True, False]])
    plan = RaggedPlan.of([4, 4], [2, 3], kept)
    mask = RaggedMask(plan, causal_mask_function)
    visible = mask.visible(0, torch.device("cpu"))
    for row, count in enumerate([2, 3]):
        seen = torch.nn.functional.pad(kept[row : row + 1], (0, count), value=True)
        assert torch.equal(visible[row, 0, :count, : 4 + count], of_one_row(causal_mask_function, 4, count, seen))


@pytest.mark.parametrize("extra", [{}, {"softcap": 2.0}, {"s_aux": torch.randn(4)}], ids=["plain", "soft cap", "sinks"])
@pytest.mark.parametrize(("lengths", "counts"), PASSES.values(), ids=PASSES)
def test_attention_is_that_of_each_row(lengths, counts, extra):
    heads, kv_heads, size, width = 4, 2, 6, 5
    plan = RaggedPlan.of(lengths, counts)
    columns = max(plan.span, max(lengths) + 1)
    query = torch.randn(1, heads, sum(counts), size)
    key, value = torch.randn(len(counts), kv_heads, columns, size), torch.randn(len(counts), kv_heads, columns, width)
    output, _ = ragged_attention(plan, None, query, key, value, RaggedMask(plan, causal_mask_function), **extra)
    assert output.shape == (1, sum(counts), heads, width)
    start = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        keys, values = (t[row, :, : length + count].repeat_interleave(2, dim=0) for t in (key, value))
        scores = query[0, :, start : start + count] @ keys.mT / size**0.5
        if "softcap" in extra:
            scores = torch.tanh(scores / 2.0) * 2.0
        scores = scores.masked_fill(~of_one_row(causal_mask_function, length, count), float("-inf"))
        if "s_aux" in extra:
            scores = torch.cat([scores, extra["s_aux"][:, None, None].expand(-1, count, 1)], dim=-1)
        expected = scores.softmax(-1)[..., : length + count] @ values
        torch.testing.assert_close(output[0, start : start + count], expected.transpose(0, 1), atol=1e-5, rtol=1e-5)
        start += count


@pytest.mark.parametrize(
    "use",
    [lambda m: m.shape, lambda m: m[:, 0], lambda m: torch.zeros(2) + m, lambda m: torch.where(m, 1, 0)],
    ids=["shape", "part", "sum", "where"],
)
def test_a_mask_is_no_tensor(use):
    mask = RaggedMask(RaggedPlan.of([0], [2]), causal_mask_function)
    with pytest.raises(NotPackable, match="attention mask"):
        use(mask)
    assert not hasattr(mask, "to")
