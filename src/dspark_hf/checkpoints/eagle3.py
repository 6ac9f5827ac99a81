"""
EAGLE-3 drafters: DeepSpec's (`layers.0.`), SpecForge's, ModelOpt's and AngelSlim's (`midlayer.`), and those of the speculators
package.

The layer is the same in all of them, but they say in different ways which target layers are tapped. DeepSpec lists outputs of
layers (`target_layer_ids`), speculators lists inputs (`eagle_aux_hidden_state_layer_ids`); `eagle_config` of SpecForge and
ModelOpt holds either, see [`named_taps`]. Most files list none: then the taps follow from the number of target layers, which
the drafter's files do not contain, so the taps are only known once the drafter is used with its target.
"""

from __future__ import annotations

from typing import Any

from ..kinds.eagle3.configuration_eagle3 import LATENT_SIZES, Eagle3Config
from .fields import Fields, layer_fields
from .files import TensorInfo
from .speculators import decoder_fields, verifier

NAME = "EAGLE-3"
TENSOR = "layers.0.hidden_norm.weight"  # Only EAGLE-3's layer has it.

LATENT = "layers.0.self_attn.kv_a_proj_with_mqa.weight"  # Only latent attention has it.

# Drafts per round if the file does not say: the number of training steps in the paper.
BLOCK_SIZE = 7


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    named = any("Eagle3" in str(name) for name in config.get("architectures") or ())
    return named or config.get("speculators_model_type") == "eagle3" or TENSOR in tensors


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> Eagle3Config:
    """
    Raises:
        ValueError: when fields contradict each other or the tensors, or the layer is not EAGLE-3's.
    """
    if config.get("speculators_model_type") is not None:
        layers = decoder_fields(config.get("transformer_layer_config"))
        own = {
            name: value for name, value in config.items() if name != "transformer_layer_config" and value is not None
        }
        # vLLM's default for these files.
        config = {"norm_before_residual": True} | layers | own
        config |= {"target_name_or_path": verifier(config), "num_hidden_layers": 1}
    config = config | {"num_hidden_layers": config.get("draft_num_hidden_layers", config.get("num_hidden_layers"))}
    if (
        config.get("model_type") == "llama4_text"
    ):  # `intermediate_size` is that of experts, which a drafter does not have.
        config |= {"intermediate_size": config.get("intermediate_size_mlp") or config.get("intermediate_size")}
    section = config.get("eagle_config")
    section = section if isinstance(section, dict) else {}
    latent = latent_sizes(config) if LATENT in tensors else {}
    has_query_norms = "layers.0.self_attn.q_norm.weight" in tensors
    own = layer_fields(
        config | taps(config, section, tensors),
        tensors,
        Eagle3Config.layer_families["qwen3" if has_query_norms else "llama"],
    )
    fields = Fields(section | config)
    own |= {
        "block_size": fields.get("block_size", "ttt_length", default=BLOCK_SIZE),
        "norm_before_residual": bool(fields.get("norm_before_residual")),
        "norm_before_fc": "input_norm.weight" in tensors,
        "norm_output": bool(fields.get("norm_output")),
        "use_aux_hidden_state": bool(section.get("use_aux_hidden_state", True)),
        "target_name_or_path": fields.get("target_name_or_path", "target_model_name_or_path"),
    }
    # DeepSpec, which names outputs, takes states from transformers; the others' software gives the residual stream itself.
    own["tap_before_norm"] = config.get("target_layer_ids") is None and own["use_aux_hidden_state"]
    own |= latent
    own["taps_from_depth"] = own["use_aux_hidden_state"] and not own["target_layer_ids"]
    check_norms(fields, own)
    return Eagle3Config(**own)


def latent_sizes(config: dict[str, Any]) -> dict[str, Any]:
    """
    The fields of latent attention, whose `head_dim` is the rotated part of a head.

    Raises:
        ValueError: when one is missing.
    """
    names = (*LATENT_SIZES, "qk_rope_head_dim")
    if missing := [name for name in names if config.get(name) is None]:
        raise ValueError(f"Its attention is latent (MLA), but its configuration lacks {', '.join(missing)}.")
    sizes: dict[str, Any] = {name: config[name] for name in LATENT_SIZES}
    rotation = {"head_dim": config["qk_rope_head_dim"], "rotary_interleaved": bool(config.get("rope_interleave", True))}
    return sizes | rotation | {"num_key_value_heads": config["num_attention_heads"]}


def taps(config: dict[str, Any], section: dict[str, Any], tensors: dict[str, TensorInfo]) -> dict[str, Any]:
    """
    The field of `config` that names the taps, made of what the file says; an empty list where the target's depth decides.

    Raises:
        ValueError: when the file names no taps and its projection is not of three layers, for which alone engines derive them.
    """
    if Fields(config).get("target_layer_ids") is not None and config.get("eagle_aux_hidden_state_layer_ids") is None:
        return {}
    if (inputs := named_taps(config, section)) is not None:
        return {"eagle_aux_hidden_state_layer_ids": inputs}
    fused = tensors.get("fc.weight")
    width = config.get("target_hidden_size") or config.get("hidden_size")
    # Shapes are not known yet where only an index was read.
    if fused is not None and len(fused.shape) == 2 and width and fused.shape[1] != 3 * width:
        raise ValueError(
            f"It does not say which target layers feed it, and its fc reads {fused.shape[1]} values where three layers of width "
            f"{width} have {3 * width}: taps can be derived for three layers only. Add "
            '"eagle_aux_hidden_state_layer_ids" to its config.json, or target_hidden_size where the target is wider.'
        )
    return {"target_layer_ids": []}


def named_taps(config: dict[str, Any], section: dict[str, Any]) -> list[int] | None:
    """
    The taps that a file names, as inputs of layers.

    At the top level, `eagle_aux_hidden_state_layer_ids` counts inputs (vLLM, speculators). In `eagle_config`, SpecForge and
    earlier ModelOpt name the outputs 1, N / 2 - 1 and N - 4 that SGLang and TensorRT-LLM capture, and later ModelOpt names
    inputs; a list that begins with 1 is of the former sort. `dspark-hf inspect --target` measures which reading is right.
    """
    inputs = config.get("eagle_aux_hidden_state_layer_ids")
    if inputs:
        return inputs
    listed = section.get("eagle_aux_hidden_state_layer_ids") or None
    if isinstance(listed, list) and listed[0] == 1:
        return [layer_id + 1 if isinstance(layer_id, int) else layer_id for layer_id in listed]
    return listed


def check_norms(fields: Fields, own: dict[str, Any]) -> None:
    """Raises `ValueError` where a file declares a norm whose weight it lacks, or has the weight of one that it denies."""
    for name, weight in {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}.items():
        declared = fields.get(name)
        if declared is not None and bool(declared) != own[name]:
            there = "has" if own[name] else "lacks"
            raise ValueError(f"It says {name}={declared}, but {there} {weight}: download it again.")
