"""Where the tokens of a pass belong, and which rows are attended to together."""

import random

import pytest
import torch

from dspark_hf.ragged.plan import RaggedPlan

ROUNDS = {
    "one token each": ([5, 0, 9], [1, 1, 1]),
    "blocks of drafts": ([5, 3, 9, 4], [4, 1, 2, 4]),
    "a row that feeds nothing": ([5, 3, 30], [2, 3, 0]),
    "few rows of many": ([5, 3, 9, 4, 8, 2, 7], [0, 2, 0, 0, 0, 3, 0]),
    "prompts only": ([0, 0, 0], [4, 7, 5]),
    "a prompt while others decode": ([12, 0, 9, 10], [1, 40, 3, 1]),
    "prompts of all lengths": ([0] * 6, [3, 100, 20, 70, 45, 1]),
}


@pytest.mark.parametrize(("lengths", "counts"), ROUNDS.values(), ids=ROUNDS)
def test_each_token_is_behind_the_tokens_of_its_row(lengths, counts):
    plan = RaggedPlan.of(lengths, counts)
    expected = [(row, lengths[row] + slot) for row, count in enumerate(counts) for slot in range(count)]
    assert list(zip(plan.rows.tolist(), plan.columns.tolist(), strict=True)) == expected
    assert plan.span == max(length + count for length, count in zip(lengths, counts, strict=True) if count)


@pytest.mark.parametrize("in_one_group", [False, True], ids=["grouped", "in one group"])
@pytest.mark.parametrize(("lengths", "counts"), ROUNDS.values(), ids=ROUNDS)
def test_groups_hold_each_token_once_at_its_column(lengths, counts, in_one_group):
    plan = RaggedPlan.of(lengths, counts, in_one_group=in_one_group)
    seen = []
    for group in plan.groups:
        rows = torch.arange(len(counts))[group.rows]
        assert plan.rows[group.tokens].tolist() == rows[group.places].tolist()
        assert plan.columns[group.tokens].tolist() == group.query_columns[group.places, group.slots].tolist()
        assert group.span == plan.columns[group.tokens].max() + 1
        assert group.query_columns.max() < group.span
        seen += group.tokens.tolist()
    assert sorted(seen) == list(range(len(plan.rows)))
    assert not in_one_group or len(plan.groups) == 1


@pytest.mark.parametrize(("lengths", "counts"), ROUNDS.values(), ids=ROUNDS)
def test_padding_and_unpadding_are_inverse(lengths, counts):
    for group in RaggedPlan.of(lengths, counts).groups:
        states = torch.randn(len(group.tokens), 3, 2)
        padded = group.pad(states)
        assert padded.shape[:2] == group.query_columns.shape
        assert torch.equal(group.unpad(padded), states)
        assert padded.ne(0).any(-1).any(-1).sum() == len(states), "unused queries are zero"


def test_prompts_are_not_padded_together_with_blocks():
    rng = random.Random(0)
    for _ in range(50):
        counts = [rng.choice([0, 1, 5, 9, 60, 300]) for _ in range(12)] + [1]
        plan = RaggedPlan.of([0] * 13, counts)
        for group in plan.groups:
            fed = plan.rows[group.tokens].bincount()
            fed = fed[fed > 0]
            assert fed.max() <= max(16, 2 * fed.min())


def test_the_buffers_of_most_rows_are_not_copied():
    buffer = torch.randn(8, 2, 30, 4)
    most = RaggedPlan.of([9] * 8, [1, 1, 0, 1, 1, 0, 1, 1]).groups[0]
    assert most.columns_of(buffer).data_ptr() == buffer.data_ptr()
    few = RaggedPlan.of([9] * 8, [0, 1, 0, 0, 0, 1, 0, 0]).groups[0]
    assert torch.equal(few.columns_of(buffer), buffer[[1, 5], :, :10])
