"""Buffers with spare room in the caller's cache during the rounds, and the caller's layers afterwards."""

import pytest
import torch
from generation import rig
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer

import tiny
from dspark_hf.generation import growing_cache
from dspark_hf.generation.growing_cache import GrowingLayer, begin_growing, end_growing
from dspark_hf.transformers_names import CACHE_KEY


def states(num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, num_tokens, 4, generator=generator) for _ in range(2))


@pytest.mark.parametrize("growth", [1, 7, 256])
def test_it_holds_what_a_dynamic_layer_holds(growth, monkeypatch):
    monkeypatch.setattr(growing_cache, "_GROWTH", growth)
    plain, grown = DynamicCache(), DynamicCache()
    for cache in (plain, grown):
        cache.update(*states(5, 0), 0)
    own = grown.layers[0]
    begin_growing(grown)
    assert type(grown.layers[0]) is GrowingLayer
    assert own.keys is None
    for seed, (num_new, num_rejected) in enumerate([(3, 1), (1, 0), (4, 4), (9, 2), (2, 0)], start=1):
        expected, found = (cache.update(*states(num_new, seed), 0) for cache in (plain, grown))
        assert torch.equal(expected[0], found[0]) and torch.equal(expected[1], found[1])
        for cache in (plain, grown):
            cache.crop(-num_rejected)
        assert plain.get_seq_length() == grown.get_seq_length()
        assert plain.layers[0].get_mask_sizes(2) == grown.layers[0].get_mask_sizes(2)
    end_growing(grown, is_kept=True)
    assert grown.layers[0] is own
    assert torch.equal(own.keys, plain.layers[0].keys) and torch.equal(own.values, plain.layers[0].values)
    assert own.keys.untyped_storage().nbytes() == own.keys.nbytes


def test_a_round_copies_no_earlier_keys():
    cache = DynamicCache()
    cache.update(*states(5, 0), 0)
    begin_growing(cache)
    addresses = {cache.update(*states(3, seed), 0)[0].data_ptr() for seed in range(20)}
    assert len(addresses) == 1


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_the_callers_layers_are_back_after_the_call(num_rows, family):
    target = rig.target(family)
    inputs = tiny.prompt(9, num_rows=num_rows)
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    layers = list(caches[1].layers)
    settings = {"max_new_tokens": 20, "do_sample": False}
    target.generate(**inputs, **{CACHE_KEY: caches[0]}, **settings)
    target.generate(**inputs, **{CACHE_KEY: caches[1]}, assistant_model=tiny.random_drafter(target), **settings)
    assert all(after is before for after, before in zip(caches[1].layers, layers, strict=True))
    for plain, drafted in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(drafted.keys, plain.keys)
        torch.testing.assert_close(drafted.values, plain.values)


class Failing(StoppingCriteria):
    """Raises after a few tokens, and until then sees which layers the cache has."""

    def __init__(self, cache):
        self.cache, self.kinds = cache, []

    def __call__(self, input_ids, scores, **kwargs):
        self.kinds.append(type(self.cache.layers[0]))
        if len(self.kinds) == 6:
            raise KeyError("criterion")
        return torch.zeros(len(input_ids), dtype=torch.bool)


def test_also_after_an_error():
    target = rig.target()
    cache = DynamicCache(config=target.config)
    criterion = Failing(cache)
    with pytest.raises(KeyError, match="criterion"):
        target.generate(
            **tiny.prompt(9),
            **{CACHE_KEY: cache},
            assistant_model=tiny.random_drafter(target),
            max_new_tokens=20,
            do_sample=False,
            stopping_criteria=StoppingCriteriaList([criterion]),
        )
    assert criterion.kinds[-1] is GrowingLayer
    assert {type(layer) for layer in cache.layers} == {DynamicLayer}
    assert cache.layers[0].keys.shape[2] == cache.get_seq_length() >= 9


def test_layers_that_hold_more_and_layers_that_hold_nothing_stay():
    class Own(DynamicLayer):
        pass

    cache = DynamicCache()
    cache.layers = [DynamicLayer(), Own(), DynamicLayer()]
    cache.update(*states(5, 0), 0)
    cache.update(*states(5, 0), 1)
    begin_growing(cache)
    assert [type(layer) for layer in cache.layers] == [GrowingLayer, Own, DynamicLayer]
