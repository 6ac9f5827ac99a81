"""DeepSpec checkpoints: `deepseek-ai/dspark_*` and `deepseek-ai/dflash_*`, and vendors' copies of their layout.

The configuration is a copy of the target's with drafter fields added, so it carries keys that mean nothing for the
drafter (partial rotary factors, window counts, mixture settings). Tensor names are those of [`DSparkDrafter`].
DeepSpec's DFlash drafters are the same class with rank 0 and no confidence head: the anchor's slot predicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import attention_gate, decoder_dict, flat_config, head_dict, rotation
from .files import TensorInfo

NAME = "DeepSpec"

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen3DSparkModel": {},
    "Gemma4DSparkModel": {"family": "gemma4"},
    # Vendors' names for the same layers and layout. LFM2's special rotation is a separate field.
    "Qwen3OmniDSparkModel": {},
    "LingDSparkModel": {},
    "DSparkMiniMaxDraftModel": {},
    "Qwen35DSparkModel": {},
    "Lfm2DSparkDraftModel": {},
    "MuseSparkDSparkModel": {"is_causal": True},
}


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return any(name in ARCHITECTURES for name in config.get("architectures") or ())


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    options = dict(ARCHITECTURES[next(n for n in config["architectures"] if n in ARCHITECTURES)])
    if options.get("family") == "gemma4":
        options |= gemma4_options(config)
    if attention_gate(config, tensors) == "query":  # Qwen3.5's layers, which really rotate a part of the head.
        options["rope_parameters"] = rotation(config, keep_partial=True)
    return flat_config(config, tensors, sample_from_anchor=True, **options)


def gemma4_options(config: dict[str, Any]) -> dict[str, Any]:
    """Fields for Gemma 4, whose draft layers are global ones: these have a separate head size, rotation and number of heads."""
    shares = bool(config.get("attention_k_eq_v"))
    key_heads = config.get("num_global_key_value_heads") if shares else None
    return {
        "embedding_scale": config["hidden_size"] ** 0.5,
        "head_dim": config.get("global_head_dim") or config["head_dim"],
        "attention_k_eq_v": shares,
        "num_key_value_heads": key_heads or config["num_key_value_heads"],
        "rope_parameters": dict(config["rope_parameters"]["full_attention"]),
    }


def limits(config: DSparkConfig) -> Iterator[str]:
    """Features of this drafter that DeepSpec's classes do not support."""
    if config.layer_family not in ("qwen3", "gemma4"):
        yield f"it supports Qwen3 and Gemma 4 draft layers, not {config.layer_family or 'this combination of layer options'}"
    if not config.sample_from_anchor:
        yield "it only supports drafters whose anchor predicts"
    if "sliding_attention" in (config.layer_types or ()) or config.is_causal:
        yield "it only supports full bidirectional attention within a block"
    if config.draft_vocab_size:
        yield "it has no reduced draft vocabulary"
    if config.attention_sinks or config.rotary_interleaved:
        yield "it has no attention sinks and no interleaved rotation"


def write_config(config: DSparkConfig) -> dict[str, Any]:
    """The `config.json` for DeepSpec's classes."""
    layers = gemma4_dict(config) if config.sandwich_norms else decoder_dict(config)
    return {
        "architectures": ["Gemma4DSparkModel" if config.sandwich_norms else "Qwen3DSparkModel"],
        **layers,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
        "num_anchors": 512,  # Only used in training, but required.
        **head_dict(config),
    }


def gemma4_dict(config: DSparkConfig) -> dict[str, Any]:
    """The decoder layers as fields of transformers' Gemma 4 configuration, for a drafter with global layers only."""
    layers = decoder_dict(config)
    activation, rope = layers.pop("hidden_act"), layers.pop("rope_parameters")
    del layers["use_sliding_window"]
    return layers | {
        "model_type": "gemma4_text",
        "hidden_activation": activation,
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "global_head_dim": config.head_dim,
        "num_global_key_value_heads": config.num_key_value_heads,
        "attention_k_eq_v": config.attention_k_eq_v,
        "final_logit_softcapping": config.final_logit_softcapping,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": config.vocab_size,
        "num_kv_shared_layers": 0,
        "enable_moe_block": False,
        "sliding_window": 1024,  # No layer uses it, but the class requires one.
    }
