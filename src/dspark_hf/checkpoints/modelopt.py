"""NVIDIA ModelOpt's DSpark export: z-lab's configuration, and the tensors of the heads without a prefix.

The anchor predicts. `dflash_config.causal` is always written. With a sliding window, the layer types still say "full".
"""

from __future__ import annotations

from typing import Any

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import Fields, decoder_dict, flat_config, head_dict
from .files import TensorInfo

NAME = "ModelOpt"


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    flat = any(info.name.startswith(("markov_w1.", "confidence_proj.")) for info in tensors.values())
    draft_model = "DFlashDraftModel" in (config.get("architectures") or ())
    return flat or (draft_model and Fields(config).get("projector_type") == "dspark")


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    # Its states are those that layers give, before the final norm.
    return flat_config(config | {"tap_before_norm": True}, tensors, sample_from_anchor=True)


def write_config(config: DSparkConfig) -> dict[str, Any]:
    layers = decoder_dict(config)
    rope = layers.pop("rope_parameters")
    scaled = {name: value for name, value in rope.items() if name != "rope_theta"}
    heads = head_dict(config)
    slides = bool(layers["sliding_window"])
    section = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": config.target_layer_ids,
        "causal": config.layer_is_causal(0),
        "projector_type": "dspark",
        "shift_label": config.sample_from_anchor,
        "markov_rank": heads["markov_rank"],
        "markov_head_type": heads["markov_head_type"],
        "use_confidence_head": heads["enable_confidence_head"],
    }
    if slides:
        section |= {"use_swa": True, "swa_window_size": config.sliding_window}
        layers["layer_types"] = ["full_attention"] * config.num_hidden_layers
    if config.attention_sinks:
        section["attention_sink_bias"] = layers["attention_sink_bias"] = True
    return {
        "architectures": ["DFlashDraftModel"],
        **layers,
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": None if rope.get("rope_type") == "default" else scaled,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "confidence_temperatures": heads.get("confidence_temperatures"),
        "dflash_config": section,
    }


def their_name(name: str) -> str:
    """ModelOpt's name for one of our parameters."""
    return name.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj.")
