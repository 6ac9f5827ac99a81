"""Where blocks start, which of their drafts count, and that neither depends on who asks when."""

import pytest
import torch

import tiny
from dspark_hf.training.anchors import (
    Anchors,
    anchor_candidates,
    counted_drafts,
    draft_positions,
    gather_positions,
    position_weights,
    row_generator,
    sample_anchors,
)
from dspark_hf.training.collator import DSparkCollator


def row(length: int, prompt: int, seed: int = 0, holes: tuple[int, ...] = ()) -> dict:
    ids = torch.randint(1, 100, (length,), generator=torch.Generator().manual_seed(seed))
    mask = torch.arange(length) >= prompt
    mask[list(holes)] = False
    return {"input_ids": ids, "loss_mask": mask.long()}


def collator(**options) -> DSparkCollator:
    return DSparkCollator(tiny.drafter_config(tiny.qwen3()), **({"num_anchors": 5} | options))


def test_an_anchor_is_a_response_token_before_another():
    mask = torch.tensor([0, 0, 1, 1, 0, 1, 1, 1])
    assert anchor_candidates(mask).nonzero().squeeze(-1).tolist() == [2, 5, 6]


def test_drafts_count_up_to_the_first_label_outside_the_mask_or_the_row():
    mask = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 1]])
    anchors = Anchors(torch.tensor([[1, 5, 2, 0]]), torch.tensor([[True, True, True, False]]))
    counted = counted_drafts(mask, anchors, 4)[0]
    assert counted.tolist() == [
        [True, True, False, False],  # labels 2, 3, then the hole at 4; 5 is in the mask again but behind it
        [True, True, False, False],  # labels 6, 7, then the end of the row
        [True, False, False, False],
        [False, False, False, False],  # a filler
    ]


def test_weights_decay_from_the_first_draft():
    assert position_weights(3, 4.0).tolist() == pytest.approx([1.0, 0.7788, 0.6065], abs=1e-4)
    assert position_weights(3, None).tolist() == position_weights(3, 0).tolist() == [1, 1, 1]


def test_anchors_of_a_row_do_not_depend_on_its_batch_or_on_the_order_of_calls():
    rows = [row(20 + i, 4, seed=i) for i in range(4)]
    together, alone = collator()(rows), collator()
    for index in (2, 0, 3, 1):
        own = alone([rows[index]])
        assert own["anchor_positions"][0].tolist() == together["anchor_positions"][index].tolist()


def test_epoch_and_seed_change_the_anchors_and_nothing_else_does():
    def anchors(seed: int, epoch: int) -> list[int]:
        some = collator(seed=seed)
        some.set_epoch(epoch)
        return some([row(60, 4)])["anchor_positions"][0].tolist()

    assert anchors(0, 0) == anchors(0, 0)
    assert len({tuple(anchors(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_few_candidates_give_fillers_and_many_are_sampled_without_repeats():
    batch = collator()([row(40, 4), row(10, 7)])
    assert batch["keep_anchors"].tolist() == [[True] * 5, [True] * 2 + [False] * 3]
    positions = sample_anchors(torch.arange(50) > 3, 30, row_generator(0, 0, torch.arange(50)))
    assert positions.tolist() == sorted(set(positions.tolist()))


@pytest.mark.parametrize(
    "rows",
    [[row(0, 0)], [row(1, 0)], [row(6, 6)], [row(6, 5)], [row(3, 2), row(0, 0)]],
    ids=["empty", "one_token", "no_response", "one_response_token", "nothing_in_several"],
)
def test_rows_without_anchors_are_only_fillers(rows):
    batch = collator()(rows)
    assert not batch["keep_anchors"].any()
    assert batch["draft_weights"].sum() == 0


def test_a_response_of_three_tokens_gives_two_blocks():
    batch = collator()([row(9, 6)])
    assert batch["anchor_positions"][batch["keep_anchors"]].tolist() == [6, 7]
    assert (batch["draft_weights"] > 0).sum(dim=-1)[batch["keep_anchors"]].tolist() == [2, 1]


@pytest.mark.parametrize("from_anchor", [True, False], ids=["anchor_slot_predicts", "anchor_slot_unused"])
def test_a_block_is_its_anchor_and_masks_at_consecutive_positions(from_anchor):
    drafter = tiny.random_drafter(tiny.qwen3(), sample_from_anchor=from_anchor)
    config = drafter.config
    ids = torch.arange(100, 120)[None]
    anchors = Anchors(torch.tensor([[3, 17]]), torch.ones(1, 2, dtype=torch.bool))
    block = drafter.block_inputs(ids, anchors.positions)
    mask = tiny.MASK_ID
    assert block["block_ids"].tolist() == [[103, mask, mask, mask, 117, mask, mask, mask]]
    assert block["position_ids"].tolist() == [[3, 4, 5, 6, 17, 18, 19, 20]]
    positions = draft_positions(anchors, config.num_draft_tokens)
    assert gather_positions(ids, positions + 1)[0, 0].tolist() == list(range(104, 104 + config.num_draft_tokens))
    assert gather_positions(ids, positions)[0, 0].tolist() == list(range(103, 103 + config.num_draft_tokens))


def test_mask_and_tokens_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="5 input_ids but 4"):
        collator()([{"input_ids": [1, 2, 3, 4, 5], "loss_mask": [0, 1, 1, 1]}])
