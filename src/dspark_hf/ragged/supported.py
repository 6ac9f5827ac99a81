"""Which targets can process rows of different lengths in one pass, and up to which length."""

from __future__ import annotations

import inspect

from transformers import PreTrainedModel

from ..rope_limit import rope_limit
from ..target_config import layer_types, optional_field, unscaled_length
from ..transformers_names import CACHE_KEY, is_stateful, supports_sdpa
from .cache import RaggedCache
from .exchange import can_exchange_attention
from .target import LAYER_TYPES, RaggedTarget


def length_limits(target: PreTrainedModel) -> dict[str, int]:
    """Lengths in tokens, by name, beyond which the rows of a pass would influence each other; usually there are none."""
    rope = rope_limit(target)
    unscaled = unscaled_length(target.config.get_text_config())
    limits = {"original RoPE length": rope.length if rope else None, "unscaled attention": unscaled}
    return {name: limit for name, limit in limits.items() if limit is not None}


def unsupported_reason(target: PreTrainedModel, max_length: int = 0) -> str | None:
    """
    Why `target` cannot process new rows of up to `max_length` tokens in one pass; `None` if it can.

    It can if every layer caches keys and values, positions are rotary or learned embeddings, and rows stay within
    [`length_limits`].
    """
    config = target.config.get_text_config()
    if target.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not (can_exchange_attention(target) or supports_sdpa(target)):
        return "its attention cannot be exchanged"
    if is_stateful(target):
        return "its cache holds a recurrent state"
    types = layer_types(config)
    if types - set(LAYER_TYPES):
        return f"its layers are of the types {', '.join(sorted(types))}"
    if optional_field(config, "alibi"):
        return "its positions are biases of the attention logits (ALiBi)"
    for name, limit in length_limits(target).items():
        if limit < max_length:
            return f"its {name} of {limit} tokens is shorter than the longest row, {max_length} tokens"
    missing = {"position_ids", CACHE_KEY} - set(inspect.signature(target.forward).parameters)
    if missing:
        return f"its forward takes no {', '.join(sorted(missing))}"
    try:
        RaggedTarget(target, RaggedCache(config.num_hidden_layers, 1))
    except ValueError:
        return "rows of different lengths that share a pass get other logits than each row alone"
    return None
