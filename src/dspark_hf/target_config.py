"""Reads the configuration of a target, whose fields differ between model families."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

DEFAULT_ROPE_THETA = 10_000.0
_OF_EVERY_DECODER = ("vocab_size", "hidden_size", "num_hidden_layers")


def optional_field(config: PreTrainedConfig | GenerationConfig, *names: str) -> Any:
    """
    The value of a field that not all configurations have; `None` without it.

    Args:
        config: The configuration of a model or of its generation.
        names: The names of the field in different model families. The first one with a value counts.
    """
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def decoder_config(target_config: PreTrainedConfig) -> PreTrainedConfig:
    """
    The text part of a target's configuration.

    Raises:
        ValueError: for an encoder-decoder, and for models that are not described like other decoders.
    """
    if target_config.is_encoder_decoder:
        raise ValueError(
            f"A drafter needs a decoder-only target; {type(target_config).__name__} is an encoder-decoder."
        )
    text = target_config.get_text_config(decoder=True)
    if missing := [name for name in _OF_EVERY_DECODER if optional_field(text, name) is None]:
        raise ValueError(
            f"A drafter takes its widths from the target, but {type(text).__name__} has no {', '.join(missing)}: there is no "
            "drafter for this family."
        )
    return text


def cross_attention_layers(target_config: PreTrainedConfig) -> list[int]:
    """The decoder layers that attend to images instead of text (Mllama), from 0."""
    return list(optional_field(target_config.get_text_config(decoder=True), "cross_attention_layers") or [])


def num_decoder_layers(text: PreTrainedConfig) -> int:
    """
    How many decoder layers a target has, each of which gives a hidden state.

    LongCat-Flash, whose layers attend twice, calls the number of attentions `num_hidden_layers`.
    """
    layers = optional_field(text, "num_layers")
    return int(min(text.num_hidden_layers, layers) if isinstance(layers, int) else text.num_hidden_layers)


def max_length(text: PreTrainedConfig) -> int | None:
    """The longest sequence that the target was made for, in tokens; `None` if its configuration does not say."""
    length: int | None = optional_field(text, "max_position_embeddings")
    return length


def logit_softcap(text: PreTrainedConfig) -> float | None:
    """The target's soft cap on its logits, if it has one."""
    softcap: float | None = optional_field(text, "final_logit_softcapping")
    return softcap


def rope_theta(text: PreTrainedConfig) -> float:
    """The base of the target's rotary frequencies; that of full-attention layers if layers differ."""
    parameters = optional_field(text, "rope_parameters") or {}
    for candidate in (parameters, parameters.get("full_attention") or {}):
        if candidate.get("rope_theta"):
            return float(candidate["rope_theta"])
    return float(optional_field(text, "rope_theta") or DEFAULT_ROPE_THETA)


def layer_types(text: PreTrainedConfig) -> set[str]:
    """The types of the target's layers, such as `"sliding_attention"`; empty if all layers are of one type."""
    return set(optional_field(text, "layer_types") or ())


def shares_keys(text: PreTrainedConfig) -> bool:
    """Whether some layers use the keys and values of other layers (Gemma 4)."""
    return bool(optional_field(text, "num_kv_shared_layers"))


def first_layer(text: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the first layer, for targets whose layers differ in width; otherwise that of all layers."""
    layers: Any = text.per_layer_config if optional_field(text, "is_heterogeneous") else [text]
    first: PreTrainedConfig = layers[0]
    return first


def mlp_width(layer: PreTrainedConfig) -> int:
    """The width of a layer's MLP; the largest one if there are several."""
    width: Any = optional_field(layer, "intermediate_size", "ffn_dim") or 4 * layer.hidden_size
    return int(width if isinstance(width, int) else max(width))


def unscaled_length(text: PreTrainedConfig) -> int | None:
    """Length up to which Llama 4 does not scale its queries by position; `None` for other targets."""
    floor = optional_field(text, "floor_scale") if optional_field(text, "attn_temperature_tuning") else None
    return None if floor is None else int(floor) - 1
