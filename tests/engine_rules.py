"""
What vLLM (0.32) and SGLang (0.5.23) derive from the fields of a drafter's `config.json`, as small functions.

These are facts about other software: each says which of its functions it describes. Tests compare them with the drafter that was
written. `make engine` runs vLLM itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

SLIDING = "sliding_attention"


class Reading(NamedTuple):
    """What an engine takes a file to mean."""

    method: str
    causal: list[bool]  # for each layer
    windows: list[int | None]  # for each layer
    aux_layers: list[int]  # counted as inputs: j is what enters layer j, 0 the embedding
    sample_from_anchor: bool
    mask_token_id: int
    markov_rank: int
    confidence_with_markov: bool | None  # None: no confidence head is built
    rotated_part: float
    rope_theta: float
    rotary_interleaved: bool
    draft_vocab_size: int
    target_hidden_size: int


def vllm(config: dict[str, Any]) -> Reading:
    """How vLLM reads a file of either format."""
    if "speculators_model_type" in config:
        config = _from_speculators(config)
    method = "dspark" if "Qwen3DSparkModel" in config["architectures"] else "dflash"
    section = config.get("dflash_config") or {}
    layer_types = config["layer_types"]
    window = section.get("swa_window_size", config.get("sliding_window"))
    confidence = config.get("enable_confidence_head", False) and method == "dspark"
    rope = config["rope_parameters"]
    return Reading(
        method=method,
        causal=[_vllm_causal(config, section, kind) for kind in layer_types],
        windows=[window if kind == SLIDING else None for kind in layer_types],
        aux_layers=_vllm_aux_layers(config, section),
        sample_from_anchor=config.get("sample_from_anchor", True) if method == "dspark" else False,
        mask_token_id=section.get("mask_token_id", config.get("mask_token_id")),
        markov_rank=config["markov_rank"] if method == "dspark" else 0,
        confidence_with_markov=config.get("confidence_head_with_markov", False) if confidence else None,
        rotated_part=rope.get("partial_rotary_factor", 1.0),
        rope_theta=rope["rope_theta"],
        rotary_interleaved=not config.get("is_neox_style", True),
        draft_vocab_size=config.get("draft_vocab_size") or config["vocab_size"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
    )


def _from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """`update_dspark` and `update_dflash`: what is kept of a speculators file, the rest of it is not looked at."""
    inputs = config["aux_hidden_state_layer_ids"]
    own = {"eagle_aux_hidden_state_layer_ids": inputs, "draft_vocab_size": config.get("draft_vocab_size")}
    if config.get("target_hidden_size") is not None:
        own["target_hidden_size"] = config["target_hidden_size"]
    if config["speculators_model_type"] == "dflash":
        # Refused later on (`DFlashSpeculator`).
        assert not config.get("sample_from_anchor", False)
        own |= {
            "architectures": ["DFlashDraftModel"],
            "dflash_config": {
                "mask_token_id": config["mask_token_id"],
                "target_layer_ids": [layer_id - 1 for layer_id in inputs],
                "causal": not config.get("sliding_window_non_causal", True),
            },
        }
    else:
        names = ("mask_token_id", "markov_rank", "markov_head_type", "block_size", "enable_confidence_head")
        own |= {name: config[name] for name in (*names, "confidence_head_with_markov") if config.get(name) is not None}
        own |= {"architectures": ["Qwen3DSparkModel"], "sample_from_anchor": config.get("sample_from_anchor", False)}
    return config["transformer_layer_config"] | own


def _vllm_causal(config: dict[str, Any], section: dict[str, Any], layer_type: str) -> bool:
    """`_dflash_layer_causal`."""
    for said in (config.get("is_causal"), section.get("causal")):
        if said is not None:
            return said
    return layer_type == SLIDING


def _vllm_aux_layers(config: dict[str, Any], section: dict[str, Any]) -> list[int]:
    """`get_eagle3_aux_layers_from_config`."""
    if config.get("eagle_aux_hidden_state_layer_ids"):
        return config["eagle_aux_hidden_state_layer_ids"]
    return [layer_id + 1 for layer_id in section.get("target_layer_ids") or config["target_layer_ids"]]


def sglang(config: dict[str, Any]) -> Reading:
    """How SGLang reads a file of DeepSpec's layout; it reads no speculators files."""
    method = "dspark" if "Qwen3DSparkModel" in config["architectures"] else "dflash"
    section = config.get("dflash_config") or {}
    layer_types, said = config["layer_types"], config.get("is_causal")
    rope = config["rope_parameters"]
    return Reading(
        method=method,
        # `_get_dflash_layer_attention_params`: `dflash_config.causal` is not read.
        causal=[kind == SLIDING if said is None else said for kind in layer_types],
        windows=[config["sliding_window"] if kind == SLIDING else None for kind in layer_types],
        # `set_dflash_layers_to_capture` adds one.
        aux_layers=[layer_id + 1 for layer_id in section.get("target_layer_ids") or config["target_layer_ids"]],
        sample_from_anchor=config.get("sample_from_anchor", True) if method == "dspark" else False,
        mask_token_id=section.get("mask_token_id", config.get("mask_token_id")),
        markov_rank=config["markov_rank"] if method == "dspark" else 0,
        # `enable_confidence_head` is not looked at where there is a head; with_markov is on by default with a rank.
        confidence_with_markov=(
            config.get("confidence_head_with_markov", config["markov_rank"] > 0)
            if config["enable_confidence_head"]
            else None
        ),
        rotated_part=rope.get("rope_dim", config["head_dim"]) / config["head_dim"],
        rope_theta=rope["rope_theta"],
        rotary_interleaved=not config.get("rope_is_neox_style", config.get("is_neox_style", True)),
        draft_vocab_size=config["vocab_size"],
        target_hidden_size=config.get("target_hidden_size") or config["hidden_size"],
    )


READERS = {"vLLM": vllm, "SGLang": sglang}
