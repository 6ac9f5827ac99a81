"""
Poolside's DFlash drafters for Laguna (`DFlashLagunaForCausalLM`), flat or in the speculators package's packaging.

Their layers are Laguna's: a gate for each head on what the attention gives, queries, keys and values in one tensor, and a
rotation that may turn a part of the head. Each tap is normed before the projection, and each layer norms the context as it
norms its slots. Blocks are causal.
"""

from __future__ import annotations

from typing import Any

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import Fields, flat_config, rotation
from .files import TensorInfo
from .speculators import flattened

NAME = "Laguna DFlash"

# What `gating` may say, and the gate that it means.
GATES = {True: "head", "per-head": "head", "per-element": "element", False: None, "disabled": None}


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return "DFlashLagunaForCausalLM" in (config.get("architectures") or ())


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    """
    Raises:
        ValueError: when the layers are not all of one type, as their rotation and the engines want it, or the gate that the file
            declares is not the one that its tensors are of.
    """
    if config.get("speculators_model_type") is not None:
        rope = (config.get("transformer_layer_config") or {}).get("rope_parameters")
        config = flattened(config) | {"rope_parameters": rope}
    layer_types = set(config.get("layer_types") or ["full_attention"])
    if len(layer_types) > 1:
        raise ValueError(f"Its layers are of several types, {sorted(layer_types)}; Laguna's drafters have one.")
    layer_type = layer_types.pop()
    rope = config.get("rope_parameters") or {}
    nested = rope.get(layer_type) or rope.get("full_attention")
    if layer_type == "sliding_attention" and config.get("swa_rope_parameters"):
        nested = config["swa_rope_parameters"]
    if isinstance(nested, dict):
        config = config | {"rope_parameters": nested}
    causal = Fields(config).get("is_causal", "causal", default=True)
    read = flat_config(
        config,
        tensors,
        sample_from_anchor=False,
        norm_context=True,
        tap_before_norm=True,
        is_causal=causal,
        rope_parameters=rotation(config, keep_partial=True),
    )
    gating = config.get("gating", True)
    if gating not in GATES or GATES[gating] != read.attention_gate:
        raise ValueError(
            f"It says gating={gating!r}, but its tensors have {read.attention_gate or 'no'} gates (g_proj)."
        )
    return read
