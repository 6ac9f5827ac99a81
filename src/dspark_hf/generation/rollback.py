"""Taking tokens back out of the target's cache, whatever its layers are.

Keys and values, and convolution states that record their past, are cropped: rejected tokens leave, accepted ones stay. A
recurrent state cannot be cropped, because each token overwrites it; nor can a static window, where a new token takes the place of
an old one. So a copy from before the pass is kept, and where a draft is rejected the whole cache returns to it. The accepted
tokens of the pass are then fed again, in front of the next drafts, so that no pass is needed for them alone.
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

    def begin(self, cache: Cache, is_fed: bool = False) -> None:
        """
        Called between the prompt and the first round, not earlier: recording every state of a long prompt would hold far more
        memory than the layers keep.

        Args:
            cache: The target's cache, which the prompt's pass may have replaced.
            is_fed: Whether it holds the tokens of a round already, because that round's pass has made it.
        """
        self.cache = cache
        check_layers(cache)
        # While a layer records, transformers does not mask what a static layer has not filled yet.
        may_record = not any(isinstance(layer, StaticLayer) for layer in cache.layers)
        self._layers = [rollback_of(layer, may_record) for layer in cache.layers]
        self._is_saved = False
        for layer in self._layers:
            layer.begin(is_fed)

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

    def begin(self, is_fed: bool) -> None:  # noqa: B027  Most layers have nothing to do here.
        """Called before the first pass of which tokens may be taken back; where `is_fed`, after it."""

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

    Sliding-window and convolution layers would have dropped what they need for that, so they record their past. Layers that hold
    an image instead of the text do not grow, and are left alone (Mllama).
    """

    _starts_recording = False

    def begin(self, is_fed: bool) -> None:
        self._grows = True if is_fed else None  # Not known before the first pass.
        self._length = self._num_tokens()
        self._starts_recording = not getattr(self.layer, "record_past", True)
        if self._starts_recording:
            self.layer.activate_past_recording()

    def take_back(self, num_tokens: int) -> None:
        if self._grows is None:
            self._grows = self._length is None or self._num_tokens() != self._length
        if not self._grows:
            return
        positions = getattr(self.layer, "indexer_position_ids", None)
        self.layer.crop(-num_tokens)
        if num_tokens and positions is not None and self.layer.indexer_position_ids is positions:
            # Static layers leave these as they are, although they grow with each token (Qwen4-Exp).
            self.layer.indexer_position_ids = positions[..., :-num_tokens]

    def end(self) -> None:
        if self._starts_recording:
            self.layer.record_past = False

    def _num_tokens(self) -> int | None:
        """Tokens in the layer; `None` where it does not count them."""
        return int(self.layer.get_seq_length()) if isinstance(self.layer, CacheLayerMixin) else None


class StaticWindow(LayerRollback):
    """
    Keys and values of the last tokens only, in tensors that stay where they are.

    The copies are made in buffers that stay, so that memory does not grow.
    """

    needs_copy = True

    def __init__(self, layer: Any):
        super().__init__(layer)
        self._copies: dict[str, torch.Tensor] = {}
        self._length = 0

    def save(self) -> None:
        for name, held in self._held().items():
            self._copies.setdefault(name, torch.empty_like(held)).copy_(held)
        self._length = self.layer.cumulative_length_int

    def take_back(self, num_tokens: int) -> None:
        if num_tokens:
            for name, held in self._held().items():
                held.copy_(self._copies[name])
            self.layer.cumulative_length_int = self._length

    def _held(self) -> dict[str, torch.Tensor]:
        """The tensors that the layer writes to in a pass."""
        layer = self.layer
        return {"keys": layer.keys, "values": layer.values, "cumulative_length": layer.cumulative_length}


class RecurrentLayer(LayerRollback):
    """
    Recurrent and convolution states that each pass overwrites, with or without keys and values in the same layer.

    The copies are made in buffers that stay, so that memory does not grow.
    """

    def __init__(self, layer: Any):
        super().__init__(layer)
        held = (*layer.conv_states.values(), *layer.recurrent_states.values())
        self.needs_copy = any(state is not None for state in held) or is_static_window(layer)
        # Each a dictionary of tensors; an entry is `None` until a pass has set it.
        self._states = [layer.conv_states, layer.recurrent_states]
        self._copies: list[dict[int, torch.Tensor]] = [{}, {}]
        # The part with keys and values. A sliding window records its past, and the convolutions then do as well.
        self._is_sliding = isinstance(layer, DynamicSlidingWindowLayer)
        self._attention: Any = next((cls for cls in type(layer).__mro__ if _is_attention(cls)), None)
        self._window = StaticWindow(layer) if is_static_window(layer) else None

    def begin(self, is_fed: bool) -> None:
        if self._is_sliding:
            self.layer.record_past = True

    def save(self) -> None:
        if self._window is not None:
            self._window.save()
        for states, copies in zip(self._states, self._copies, strict=True):
            for index, state in states.items():
                if state is not None:
                    copies.setdefault(index, torch.empty_like(state)).copy_(state)

    def take_back(self, num_tokens: int) -> None:
        if self._window is not None:
            self._window.take_back(num_tokens)
        elif self._is_sliding:
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
    return StaticWindow(layer) if is_static_window(layer) else CroppedLayer(layer)


def is_own_window(layer: Any) -> bool:
    """Whether the layer is a model's own kind of sliding window."""
    return isinstance(layer, DynamicSlidingWindowLayer) and type(layer).__module__ != CacheLayerMixin.__module__


def is_static_window(layer: Any) -> bool:
    """Whether the layer is transformers' own static window, of which everything that a pass changes is known."""
    is_own = type(layer).__module__ == StaticSlidingWindowLayer.__module__
    return is_own and isinstance(layer, StaticSlidingWindowLayer)


def has_states(layer: Any) -> bool:
    """Whether a layer may hold something else than keys and values of each token."""
    return isinstance(layer, LinearAttentionCacheLayerMixin) or is_own_layer(layer)


def is_own_layer(layer: Any) -> bool:
    """
    Whether the layer's class is a model's own and inherits `crop`, which then knows nothing of what the class adds.

    Such a layer may still claim to be croppable, as those of DeepSeek-V4 do. Static layers are not meant: they write into their
    tensors, and say rightly whether they can be cropped.
    """
    if isinstance(layer, StaticLayer):
        return False
    own = [cls for cls in type(layer).__mro__ if cls.__module__ not in (CacheLayerMixin.__module__, "abc", "builtins")]
    return bool(own) and not any("crop" in vars(cls) for cls in own)


def check_layers(cache: Cache) -> None:
    """Refuses caches that hold what cannot be taken back."""
    keeps_more = any(isinstance(value, torch.Tensor) for value in vars(cache).values())  # Positions (Qwen4-Exp).
    if keeps_more or (cache.layers and not cache.is_croppable and all(layer.is_croppable for layer in cache.layers)):
        refuse(f"its {type(cache).__name__} cannot be rolled back: it keeps more than its layers")
    for layer in cache.layers:
        # Quantized layers inherit a claim to be croppable in older versions of transformers.
        has_way = layer.is_croppable or (has_states(layer) and not _is_uncroppable(layer)) or is_static_window(layer)
        if isinstance(layer, QuantizedLayer) or not has_way:
            refuse(
                f"the layers of its {type(cache).__name__} cannot be rolled back ({type(layer).__name__}: quantized keys and "
                "values, or a layer that this version of transformers cannot crop)"
            )


def _is_uncroppable(layer: Any) -> bool:
    """Whether a layer with states has a part with keys and values that this version of transformers cannot crop."""
    return isinstance(layer, StaticLayer) and not StaticLayer.is_croppable and not is_static_window(layer)


def _has_recurrent_state(layer: Any) -> bool:
    return any(layer.is_recurrent_states_initialized.values())


def _is_attention(cls: type) -> bool:
    return issubclass(cls, CacheLayerMixin) and not issubclass(cls, LinearAttentionCacheLayerMixin)


def _attributes(values: dict[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
