"""A cache of several rows as one cache per row, and back, whatever its layers hold."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import Cache


def cache_of_row(cache: Cache, row: int, num_rows: int) -> Cache:
    """A copy of one of the rows of a cache. Nothing in it is shared with the others."""
    own = copy.copy(cache)
    own.layers = [_layer_of_row(layer, row, num_rows) for layer in cache.layers]
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


def _layer_of_row(layer: Any, row: int, num_rows: int) -> Any:
    own, before = copy.copy(layer), dict(vars(layer))
    for name, value in before.items():
        if isinstance(value, dict):
            setattr(own, name, dict(value))
    if getattr(own, "device", True) is None:  # A layer without convolutions does not know where its states are.
        own.device = next((t.device for t in before["recurrent_states"].values() if t is not None), None)
    own.reorder_cache(torch.tensor([row]))

    def selected(value: Any, original: Any) -> Any:
        """A tensor that `reorder_cache` has left as it was: of all rows, as in older versions, or a length counted in place."""
        if not isinstance(value, torch.Tensor) or value is not original:
            return value
        return (value[row : row + 1] if value.dim() > 1 and len(value) == num_rows else value).clone()

    for name, value in list(vars(own).items()):
        if isinstance(value, dict):
            setattr(own, name, {key: selected(part, before[name][key]) for key, part in value.items()})
        else:
            setattr(own, name, selected(value, before[name]))
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
