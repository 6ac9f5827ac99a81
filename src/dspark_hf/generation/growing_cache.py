"""Room to grow for the target's keys and values during the rounds, in the caller's own cache.

The dynamic layers of transformers copy all their keys and values in every pass to add a few. During the rounds, layers with
spare room take their places: a pass writes its tokens behind the others, and taking rejected ones back is lowering a length.
"""

from __future__ import annotations

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer

_GROWTH = 256  # Buffers get this many more columns than they need, and at least half as many again.


class GrowingLayer(DynamicLayer):
    """
    Keys and values in buffers `[B, H_kv, capacity, d]`, of which the first columns are in use.

    Args:
        layer: The layer whose place it takes, which holds keys and values.
    """

    def __init__(self, layer: DynamicLayer):
        super().__init__()
        assert layer.keys is not None and layer.values is not None
        self.layer = layer
        self.length = int(layer.keys.shape[-2])
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True
        self._buffers = self._with_room((layer.keys, layer.values), self.length)
        layer.keys = layer.values = None  # Held once.

    # Models may look at the keys and values of a layer that this pass does not add to (Mllama).
    @property
    def keys(self) -> torch.Tensor:
        """Those of the tokens in use, as a view."""
        return self._buffers[0][:, :, : self.length]

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        """transformers sets it to `None` before there is a buffer."""

    @property
    def values(self) -> torch.Tensor:
        """Those of the tokens in use, as a view."""
        return self._buffers[1][:, :, : self.length]

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        """As for the keys."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes new keys and values `[B, H_kv, N, d]` behind the others and returns all of them, as views."""
        num_new = key_states.shape[-2]
        start, end = self.length, self.length + num_new
        if end > self._buffers[0].shape[-2]:
            self._buffers = self._with_room(self._buffers, end)
        keys, values = self._buffers
        keys.narrow(2, start, num_new).copy_(key_states)
        values.narrow(2, start, num_new).copy_(value_states)
        self.length = end
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens, whose number is given as a negative one."""
        self.length -= abs(tokens_to_remove)

    def get_seq_length(self) -> int:
        return self.length

    def original(self, is_kept: bool) -> DynamicLayer:
        """The layer whose place it took, holding all tokens; without the spare room if it is kept."""
        keys, values = (buffer[:, :, : self.length] for buffer in self._buffers)
        self.layer.keys, self.layer.values = (keys.clone(), values.clone()) if is_kept else (keys, values)
        return self.layer

    @staticmethod
    def _with_room(held: tuple[torch.Tensor, torch.Tensor], num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Buffers for `num_columns` columns and some more, with the columns of those held so far."""
        capacity = num_columns + max(_GROWTH, num_columns // 2)
        larger = tuple(states.new_empty(*states.shape[:2], capacity, states.shape[3]) for states in held)
        for buffer, states in zip(larger, held, strict=True):
            buffer[:, :, : states.shape[2]] = states
        return larger[0], larger[1]


def begin_growing(cache: Cache) -> None:
    """Puts growing layers in the places of those that hold keys and values of all tokens of one row, and nothing else."""
    if getattr(cache, "offloading", False):
        return  # Its layers are moved to the device in turn.
    for index, layer in enumerate(cache.layers):
        # Derived classes hold more, and layers that use the keys and values of others hold nothing.
        if isinstance(layer, DynamicLayer) and type(layer) is DynamicLayer and layer.get_seq_length() > 0:
            assert layer.keys is not None and layer.values is not None
            if layer.keys.dim() == layer.values.dim() == 4 and len(layer.keys) == 1:
                cache.layers[index] = GrowingLayer(layer)


def end_growing(cache: Cache, is_kept: bool) -> None:
    """
    Puts the original layers back, with what their substitutes hold.

    Args:
        cache: The target's cache.
        is_kept: Whether it is used after the call; then its layers give back the room that they do not need.
    """
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, GrowingLayer):
            cache.layers[index] = layer.original(is_kept)
