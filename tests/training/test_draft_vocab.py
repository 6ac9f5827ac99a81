"""A reduced draft vocabulary holds what responses use most, and what ends them."""

import pytest
import torch

import tiny
from dspark_hf.training.draft_vocab import select_draft_vocabulary, set_draft_vocabulary

ROWS = [
    {"input_ids": [9, 9, 9, 5, 5, 6], "loss_mask": [0, 0, 0, 1, 1, 1]},
    {"input_ids": [6, 5, 7], "loss_mask": [1, 1, 1]},
]


def test_the_most_frequent_response_tokens_are_selected_with_the_required():
    assert select_draft_vocabulary(ROWS, 20, 3, required_ids=[19]).tolist() == [5, 6, 19]


def test_a_larger_vocabulary_than_used_is_filled_with_the_lowest_ids():
    assert select_draft_vocabulary(ROWS, 20, 6).tolist() == [0, 1, 2, 5, 6, 7]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        select_draft_vocabulary(ROWS, 20, 21)
    with pytest.raises(ValueError, match="2 tokens are required"):
        select_draft_vocabulary(ROWS, 20, 1, required_ids=[1, 2])


def test_a_new_vocabulary_is_used_even_by_a_bound_drafter():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, draft_vocab_size=4)
    drafter.bind(target)
    set_draft_vocabulary(drafter, torch.tensor([30, 2, 9, 4]))
    states = torch.randn(3, tiny.HIDDEN_SIZE)
    logits = target.get_output_embeddings()(states)[:, [2, 4, 9, 30]]
    torch.testing.assert_close(drafter.base_logits(states, drafter.bind(target)), logits)


@pytest.mark.parametrize("ids", [[1, 2, 3], [1, 1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3, 999]], ids=str)
def test_ids_that_are_no_such_vocabulary_are_refused(ids):
    drafter = tiny.random_drafter(tiny.qwen3(), draft_vocab_size=4)
    with pytest.raises(ValueError, match="draft_vocab_size=4"):
        set_draft_vocabulary(drafter, torch.tensor(ids))
