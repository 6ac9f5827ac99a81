"""The buffers of rows of different lengths: taken over from a prompt, written, taken back, given to others, put back."""

import pytest
import torch
from transformers.cache_utils import DynamicCache

import tiny
from dspark_hf.ragged.cache import RaggedCache, fill
from dspark_hf.transformers_names import CACHE_KEY

LENGTHS = (9, 4, 1, 12)


def states(*shape):
    return torch.randn(shape), torch.randn(shape)


def prompt_cache(target, batch):
    output = target(**batch, use_cache=True, **{CACHE_KEY: DynamicCache(config=target.config)})
    return output[CACHE_KEY]


def positions_of(mask):
    return (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.fixture(name="batch")
def left_padded_batch():
    return tiny.left_padded(*(tiny.prompt(length, seed=length) for length in LENGTHS))


def test_padding_before_a_row_is_left_out(batch):
    target, mask = tiny.qwen3(num_hidden_layers=2), batch["attention_mask"]
    ordinary = prompt_cache(target, batch)
    cache = RaggedCache.of_prompts(ordinary, mask, positions_of(mask))
    assert cache.lengths == list(LENGTHS)
    assert cache.key_mask is None
    assert cache.position_offsets.tolist() == [0, 0, 0, 0]
    for layer, filled in zip(cache.layers, ordinary.layers, strict=True):
        for row, length in enumerate(LENGTHS):
            assert torch.equal(layer.keys[row, :, :length], filled.keys[row, :, 12 - length :])
            assert torch.equal(layer.values[row, :, :length], filled.values[row, :, 12 - length :])


def test_a_sliding_window_gives_its_last_columns(batch):
    target, mask = tiny.mistral(num_hidden_layers=1), batch["attention_mask"]
    ordinary = prompt_cache(target, batch)
    window = ordinary.layers[0].keys.shape[2]
    assert window < 12, "the case is about layers that keep fewer columns than there were"
    cache = RaggedCache.of_prompts(ordinary, mask, positions_of(mask))
    for row, length in enumerate(LENGTHS):
        kept = min(window, length)
        assert torch.equal(
            cache.layers[0].keys[row, :, length - kept : length], ordinary.layers[0].keys[row, :, window - kept :]
        )


def test_columns_that_are_masked_inside_a_row_stay_masked():
    ordinary, mask = DynamicCache(), torch.tensor([[0, 1, 1, 0, 1], [1, 1, 1, 1, 1]])
    ordinary.update(*states(2, 1, 5, 2), 0)
    cache = RaggedCache.of_prompts(ordinary, mask, positions_of(mask))
    assert cache.lengths == [4, 5]
    assert cache.key_mask.tolist() == [[True, True, False, True, True], [True] * 5]
    assert cache.position_offsets.tolist() == [-1, 0]
    cache.clear(0)
    assert cache.key_mask.all()
    assert cache.position_offsets.tolist() == [0, 0]


def test_rows_come_back_in_the_columns_they_had(batch):
    target, mask = tiny.qwen3(num_hidden_layers=2), batch["attention_mask"]
    ordinary = prompt_cache(target, batch)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in ordinary.layers]
    cache = RaggedCache.of_prompts(ordinary, mask, positions_of(mask))
    rows = {row: cache.extract(row) for row in (2, 0, 3, 1)}
    fill(ordinary, rows, 12)
    assert ordinary.get_seq_length() == 12
    for layer, parts in zip(ordinary.layers, before, strict=True):
        for now, then in zip((layer.keys, layer.values), parts, strict=True):
            assert torch.equal(now * mask[:, None, :, None], then * mask[:, None, :, None])


def test_new_tokens_overwrite_the_rejected_ones():
    cache = RaggedCache(1, 2)
    first = states(1, 2, 5, 3)
    cache.plan([3, 2])
    cache.update(*first, 0)
    cache.lengths = [2, 1]  # Of three and two tokens fed, one each was rejected.
    second = states(1, 2, 3, 3)
    plan = cache.plan([1, 2])
    keys, values = cache.update(*second, 0)
    assert plan.span == 3
    assert torch.equal(keys[0], torch.cat([first[0][0, :, :2], second[0][0, :, :1]], dim=1))
    assert torch.equal(values[1], torch.cat([first[1][0, :, 3:4], second[1][0, :, 1:]], dim=1))


def test_a_cleared_row_starts_from_nothing_and_selected_rows_keep_theirs():
    cache = RaggedCache(1, 3)
    new = states(1, 1, 6, 2)
    cache.plan([1, 2, 3])
    cache.update(*new, 0)
    cache.lengths = [1, 2, 3]
    cache.clear(1)
    assert cache.lengths == [1, 0, 3]
    cache.select([2, 1])
    assert cache.lengths == [3, 0]
    assert torch.equal(cache.extract(0)[0][0], new[0][0, :, 3:])
    more = states(1, 1, 2, 2)
    cache.plan([0, 2])
    cache.update(*more, 0)
    cache.lengths = [3, 2]
    assert torch.equal(cache.extract(1)[0][1], more[1][0])


def test_buffers_grow_with_the_longest_row_alone():
    cache = RaggedCache(1, 2)
    for _ in range(300):
        cache.plan([4, 1])
        cache.update(*states(1, 1, 5, 2), 0)
        cache.lengths = [length + 1 for length in cache.lengths]  # Three of four drafts are rejected.
    bytes_per_column = 2 * 2 * 2 * 4  # Rows x (keys and values) x head size x float32.
    assert cache.num_bytes <= bytes_per_column * (300 + 4 + 2 * 128)
    cache.reserve(2000)
    bytes_reserved = cache.num_bytes
    cache.plan([4, 1])
    cache.update(*states(1, 1, 5, 2), 0)
    assert cache.num_bytes == bytes_reserved >= bytes_per_column * 2000
