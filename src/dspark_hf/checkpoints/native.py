"""DeepSpec-native checkpoints: `deepseek-ai/dspark_*` and `deepseek-ai/dflash_*`.

The configuration is a copy of the target's with drafter fields added, so it carries keys that mean nothing for the
drafter (partial rotary factors, window counts, mixture settings). Tensor names are those of [`DSparkDrafter`].
DeepSpec's DFlash drafters are the same class with rank 0 and no confidence head: the anchor's slot predicts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..configuration_dspark import LAYER_FAMILIES, DSparkConfig

ARCHITECTURES = {"Qwen3DSparkModel": "qwen3", "Gemma4DSparkModel": "gemma4"}

_SAME_NAME = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "vocab_size",
    "max_position_embeddings",
    "initializer_range",
    "layer_types",
    "sliding_window",
    "final_logit_softcapping",
    "target_layer_ids",
    "num_target_layers",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)


def recognise(config: dict[str, Any], tensor_names: Collection[str]) -> bool:
    return bool(set(config.get("architectures") or ()) & ARCHITECTURES.keys()) and "target_layer_ids" in config


def read_config(config: dict[str, Any], tensor_names: Collection[str]) -> DSparkConfig:
    """
    Args:
        config: The raw `config.json`.
        tensor_names: Names in the file; they say whether it holds an embedding and an LM head.

    Raises:
        ValueError: when the declared heads and the tensors of heads in the file disagree.
    """
    family = ARCHITECTURES[next(name for name in config["architectures"] if name in ARCHITECTURES)]
    fields: dict[str, Any] = {name: config[name] for name in _SAME_NAME if name in config}
    fields |= LAYER_FAMILIES[family]
    fields["hidden_act"] = config.get("hidden_act") or config.get("hidden_activation") or "silu"
    fields["has_embed_tokens"] = "embed_tokens.weight" in tensor_names
    fields["has_lm_head"] = "lm_head.weight" in tensor_names
    fields["enable_confidence_head"] = bool(config.get("enable_confidence_head"))
    fields["confidence_head_with_markov"] = fields["enable_confidence_head"] and bool(
        config.get("confidence_head_with_markov")
    )
    fields["num_key_value_heads"] = config["num_key_value_heads"]
    fields["head_dim"] = config.get("head_dim")
    fields["rope_parameters"] = full_rotation(config)
    if family == "gemma4":
        fields["embedding_scale"] = config["hidden_size"] ** 0.5
        # Every draft layer is a global one, and those have their own head size and, sharing keys as values, head count.
        fields["head_dim"] = config.get("global_head_dim") or config["head_dim"]
        fields["attention_k_eq_v"] = bool(config.get("attention_k_eq_v"))
        if fields["attention_k_eq_v"] and config.get("num_global_key_value_heads"):
            fields["num_key_value_heads"] = config["num_global_key_value_heads"]
        fields["rope_parameters"] = dict(config["rope_parameters"]["full_attention"])
    return DSparkConfig(**fields)


def full_rotation(config: dict[str, Any]) -> dict[str, Any]:
    """
    RoPE parameters without what was inherited from the target and does not apply to the draft layers.

    Qwen3-style drafters rotate the whole head even where the copied configuration says partial, and their positions
    are plain even where the target's are multimodal (deepseek-ai/DeepSpec#71).
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters = dict(parameters.get("full_attention") or parameters)
    parameters.setdefault("rope_theta", config.get("rope_theta", 10_000.0))
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    for inherited in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
        parameters.pop(inherited, None)
    return parameters
