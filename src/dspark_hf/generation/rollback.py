"""Taking tokens back out of the target's cache, whatever its layers are.

Keys and values, and convolution states that record their past, are cropped: rejected tokens leave, accepted ones stay. A
recurrent state cannot be cropped, because each token overwrites it. So a copy from before the pass is kept, and where a draft is
rejected the whole cache returns to it. The accepted tokens of the pass are then fed again, in front of the next drafts, so that
no pass is needed for them alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    QuantizedLayer,
    StaticLayer,
    StaticSlidingWindowLayer,
)

from .requirements import refuse


class Rollback:
    """
    Lets a cache forget the last tokens of a pass.

    Args:
        cache: The target's cache. Tokens can be taken back between [`~Rollback.begin`] and [`~Rollback.end`].

    Raises:
        ValueError: when a layer cannot take tokens back.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        self._layers: list[LayerRollback] = []
        self._is_saved = False
        check_layers(cache)

    def begin(self, cache: Cache) -> None:
        """
        Called between the prompt and the first round, not earlier: recording every state of a long prompt would hold far more
        memory than the layers keep.

        Args:
            cache: The target's cache, which the prompt's pass may have replaced.
        """
        self.cache = cache
        check_layers(cache)
        # While a layer records, transformers does not mask what a static layer has not filled yet.
        may_record = not any(isinstance(layer, StaticLayer) for layer in cache.layers)
        self._layers = [rollback_of(layer, may_record) for layer in cache.layers]
        self._is_saved = False
        for layer in self._layers:
            layer.begin()

    @property
    def needs_copies(self) -> bool:
        """Whether a rejection takes back the whole pass instead of the rejected tokens alone."""
        return any(layer.needs_copy for layer in self._layers)

    def save(self) -> None:
        """Called before a pass of which tokens may be rejected. While drafting pauses, nothing is copied."""
        if self.needs_copies and not self._is_saved:
            for layer in self._layers:
                layer.save()
            self._is_saved = True

    def take_back(self, num_fed: int, num_rejected: int) -> int:
        """
        Ends a pass: the rejected ones of the tokens fed, which are the last, leave the cache.

        Args:
            num_fed: Tokens that the pass has fed.
            num_rejected: How many of them leave.

        Returns:
            How many tokens that were not rejected have left the cache as well, and are to be fed again.
        """
        if self.needs_copies and not self._is_saved:
            num_rejected = 0  # An interrupted step of plain decoding: as in plain `generate`, its token stays.
        leaving = num_fed if num_rejected and self.needs_copies else num_rejected
        for layer in self._layers:  # Also for none: what the layers recorded for this pass is then dropped.
            layer.take_back(leaving)
        self._is_saved = self._is_saved and num_rejected > 0
        return leaving - num_rejected

    def end(self) -> None:
        """Leaves the layers as they were: a later prompt is not to be recorded state by state."""
        for layer in self._layers:
            layer.end()
        self._layers = []


# ---------------------------------------------------------------------- the kinds of layers


class LayerRollback(ABC):
    """
    How one layer of a cache takes tokens back.

    Args:
        layer: A layer of a transformers cache.
    """

    needs_copy = False

    def __init__(self, layer: Any):
        self.layer = layer

    def begin(self) -> None:  # noqa: B027  Most layers have nothing to do here.
        """Called before the first pass of which tokens may be taken back."""

    def save(self) -> None:  # noqa: B027
        """Keeps a copy of what the coming pass overwrites."""

    @abstractmethod
    def take_back(self, num_tokens: int) -> None:
        """Removes the last tokens. Layers that need a copy return to it when there are any to remove."""

    def end(self) -> None:  # noqa: B027
        """Called after the last pass."""


class CroppedLayer(LayerRollback):
    """
    Keys and values, and convolution states: every token has its own part, which is cut off.

    Sliding-window and convolution layers would have dropped what they need for that, so they record their past.
    """

    _starts_recording = False

    def begin(self) -> None:
        self._starts_recording = not getattr(self.layer, "record_past", True)
        if self._starts_recording:
            self.layer.activate_past_recording()

    def take_back(self, num_tokens: int) -> None:
        self.layer.crop(-num_tokens)

    def end(self) -> None:
        if self._starts_recording:
            self.layer.record_past = False


class RecurrentLayer(LayerRollback):
    """
    Recurrent and convolution states that each pass overwrites, with or without keys and values in the same layer.

    The copies are made in buffers that stay, so that memory does not grow.
    """

    def __init__(self, layer: Any):
        super().__init__(layer)
        held = (*layer.conv_states.values(), *layer.recurrent_states.values())
        self.needs_copy = any(state is not None for state in held)
        # Each a dictionary of tensors; an entry is `None` until a pass has set it.
        self._states = [layer.conv_states, layer.recurrent_states]
        self._copies: list[dict[int, torch.Tensor]] = [{}, {}]
        # The part with keys and values. A sliding window records its past, and the convolutions then do as well.
        self._is_sliding = isinstance(layer, DynamicSlidingWindowLayer)
        self._attention: Any = next((cls for cls in type(layer).__mro__ if _is_attention(cls)), None)

    def begin(self) -> None:
        if self._is_sliding:
            self.layer.record_past = True

    def save(self) -> None:
        for states, copies in zip(self._states, self._copies, strict=True):
            for index, state in states.items():
                if state is not None:
                    copies.setdefault(index, torch.empty_like(state)).copy_(state)

    def take_back(self, num_tokens: int) -> None:
        if self._is_sliding:
            self.layer.crop(-num_tokens)
        elif self._attention is not None:
            self._attention.crop(self.layer, -num_tokens)
        if num_tokens:
            for states, copies in zip(self._states, self._copies, strict=True):
                for index, copy in copies.items():
                    states[index].copy_(copy)

    def end(self) -> None:
        if self._is_sliding:
            self.layer.record_past = False


class ReplacedLayer(LayerRollback):
    """
    A layer of a model's own, which keeps more than it crops and replaces its tensors instead of writing into them.

    A copy is therefore a list of the tensors it holds; whether it does replace them is part of the trial in `rollback_trial`.
    """

    needs_copy = True

    def __init__(self, layer: Any):
        super().__init__(layer)
        self._copy: dict[str, Any] = {}

    def save(self) -> None:
        self._copy = _attributes(vars(self.layer))

    def take_back(self, num_tokens: int) -> None:
        if num_tokens:
            vars(self.layer).update(_attributes(self._copy))

    def end(self) -> None:
        self._copy = {}


def rollback_of(layer: Any, may_record: bool) -> LayerRollback:
    """How a layer that holds a prompt takes tokens back; `may_record` says whether convolutions may record their past."""
    if is_own_layer(layer):
        return ReplacedLayer(layer)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        is_convolution = any(layer.is_conv_states_initialized.values()) and not _has_recurrent_state(layer)
        return CroppedLayer(layer) if is_convolution and may_record else RecurrentLayer(layer)
    return CroppedLayer(layer)


def has_states(layer: Any) -> bool:
    """Whether a layer may hold something else than keys and values of each token."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) or is_own_layer(layer)


def is_own_layer(layer: Any) -> bool:
    """
    Whether the layer's class is a model's own and inherits `crop`, which then knows nothing of what the class adds.

    Such a layer may still claim to be croppable, as those of DeepSeek-V4 do.
    """
    own = [cls for cls in type(layer).__mro__ if cls.__module__ not in (CacheLayerMixin.__module__, "abc", "builtins")]
    return bool(own) and not any("crop" in vars(cls) for cls in own)


def check_layers(cache: Cache) -> None:
    """Refuses caches that hold what cannot be taken back."""
    if cache.layers and not cache.is_croppable and all(layer.is_croppable for layer in cache.layers):
        refuse(f"its {type(cache).__name__} cannot be rolled back: it keeps more than its layers")
    for layer in cache.layers:
        # Quantized layers inherit a claim to be croppable in older versions of transformers.
        is_static_window = isinstance(layer, StaticSlidingWindowLayer) and has_states(layer)
        if isinstance(layer, QuantizedLayer) or is_static_window or not (layer.is_croppable or has_states(layer)):
            refuse(
                f"the layers of its {type(cache).__name__} cannot be rolled back ({type(layer).__name__}: quantized keys and "
                "values, or a static window)"
            )


def _has_recurrent_state(layer: Any) -> bool:
    return any(layer.is_recurrent_states_initialized.values())


def _is_attention(cls: type) -> bool:
    return issubclass(cls, CacheLayerMixin) and not issubclass(cls, LinearAttentionCacheLayerMixin)


def _attributes(values: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
