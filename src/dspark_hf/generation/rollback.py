"""Taking tokens back out of the target's cache, whatever its layers are."""

from __future__ import annotations

from typing import Any

from transformers import Cache, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, QuantizedLayer

from ..transformers_names import is_stateful
from .requirements import refuse


class Rollback:
    """
    Lets the target's cache forget the last tokens of a pass.

    Attention layers crop keys and values. Sliding-window and convolution layers would have dropped what they need for that, so
    they record their past from [`~Rollback.begin`] to [`~Rollback.end`]. All other layers are refused.

    Args:
        model: The target.
        cache: Its cache.

    Raises:
        ValueError: when a layer cannot take tokens back.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache):
        self.cache = cache
        self._recording: list[Any] = []
        if is_stateful(model):
            refuse(f"{type(model).__name__} keeps recurrent state, which cannot be rolled back after a rejected draft")
        self._check_layers()

    def begin(self, cache: Cache) -> None:
        """
        Called between the prompt and the first round, not earlier: recording every state of a long prompt would hold far more
        memory than the layers keep.

        Args:
            cache: The target's cache, which the prompt's pass may have replaced.
        """
        self.cache = cache
        self._check_layers()
        self._recording = [layer for layer in self.cache.layers if not getattr(layer, "record_past", True)]
        self.cache.activate_past_recording()

    def take_back(self, num_tokens: int) -> None:
        """Ends a pass: the last `num_tokens` of the tokens fed leave the cache."""
        self.cache.crop(-num_tokens)  # Also for none: what the layers recorded for this pass is then dropped.

    def end(self) -> None:
        """Leaves the cache as it was: a later prompt is not to be recorded state by state."""
        for layer in self._recording:
            layer.record_past = False
        self._recording = []

    def _check_layers(self) -> None:
        is_empty = self.cache.get_seq_length() == 0
        for layer in self.cache.layers:
            # Layers with convolutions know it only once they are filled. Quantized layers inherit a claim to be croppable in
            # older versions of transformers.
            is_undecided = is_empty and isinstance(layer, LinearAttentionCacheLayerMixin)
            if isinstance(layer, QuantizedLayer) or not (layer.is_croppable or is_undecided):
                refuse(
                    f"the layers of its {type(self.cache).__name__} cannot be rolled back ({type(layer).__name__}: recurrent "
                    "state, quantized keys and values, or a static window)"
                )
