"""A cache of several rows as one cache per row, and back, whatever its layers hold."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Cache


def cache_of_row(cache: Cache, row: int) -> Cache:
    """A copy of one row of a cache. Nothing in it is shared with the other rows."""
    own = copy.copy(cache)
    own.layers = [_layer_of_row(layer, row) for layer in cache.layers]
    return own


def join_rows(cache: Cache, rows: list[Cache]) -> None:
    """
    Puts rows of the same length back into the cache that [`cache_of_row`] took them from.

    Args:
        cache: The cache of all rows. What it holds is replaced.
        rows: The cache of each row, in their order.
    """
    for layer, *of_rows in zip(cache.layers, *[own.layers for own in rows], strict=True):
        for name, before in list(vars(layer).items()):
            values = [vars(own)[name] for own in of_rows]
            if isinstance(before, dict):
                setattr(layer, name, {key: _joined([value[key] for value in values], before[key]) for key in before})
            else:
                setattr(layer, name, _joined(values, before))


def _layer_of_row(layer: Any, row: int) -> Any:
    own = copy.copy(layer)
    before = dict(vars(layer))
    for name, value in before.items():
        if isinstance(value, dict):
            setattr(own, name, dict(value))
    if getattr(own, "device", True) is None:  # A layer without convolutions does not know where its states are.
        own.device = next((t.device for t in before["recurrent_states"].values() if t is not None), None)
    own.reorder_cache(torch.tensor([row]))
    for name, value in vars(own).items():
        if isinstance(value, torch.Tensor) and value is before[name]:  # A length that is counted in place.
            setattr(own, name, value.clone())
    return own


def _joined(values: list[Any], before: Any) -> Any:
    """The rows' values of one attribute, from all rows and what the cache of all rows held before."""
    first = values[0]
    if not isinstance(first, torch.Tensor) or first.dim() < 2:
        return first  # The same for all rows.
    axis = 0
    if isinstance(before, torch.Tensor) and before.dim() == first.dim():
        axis = next((i for i, size in enumerate(before.shape) if size == len(values) and first.shape[i] == 1), 0)
    return torch.cat(values, dim=axis)
