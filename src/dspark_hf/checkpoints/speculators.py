"""vLLM's "speculators" checkpoints (`RedHatAI/*-speculator.dspark`), DSpark and DFlash.

The decoder's configuration is in `transformer_layer_config`; the layers are Qwen3's, whatever its model type. Layer ids count
inputs: `aux_hidden_state_layer_ids` j is `hidden_states[j]`. Until July 2026 the anchor of all these drafters predicted
nothing, so this is assumed for files without `sample_from_anchor`. Embedding and LM head are the target's; older files
contain copies. `d2t` holds offsets.

Readers disagree about which slots a block's slots see. The speculators package: full layers see the whole block, and sliding
ones too if `sliding_window_non_causal` is set. vLLM applies that field to every layer of a DFlash drafter and ignores it for a
DSpark drafter, unless `transformer_layer_config` has `is_causal`, which it applies to all layers. So both fields are written.

The window of a sliding layer counts back from each slot, as in vLLM; the speculators package trains with a window that counts
from the anchor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import CONFIG_MAPPING

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .engines import unknown_to_engines
from .fields import decoder_dict, flat_config, head_dict
from .files import TensorInfo

NAME = "speculators"


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return config.get("speculators_model_type") in ("dspark", "dflash")


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    """
    Raises:
        ValueError: when the taps are missing, or the head is a recurrent one whose anchor does not predict: its recurrence
            starts at the anchor there, and at the first predicted slot here.
    """
    options: dict[str, Any] = {}
    if config.get("sliding_window_non_causal"):
        options["is_causal"] = False
    read = flat_config(flattened(config), tensors, sample_from_anchor=False, **options)
    if read.markov_rank and read.markov_head_type == "rnn" and not read.sample_from_anchor:
        raise ValueError(
            "This drafter's recurrent head starts at the anchor's slot although that slot predicts nothing, which is not "
            "supported. Drafters with a vanilla or gated head, or with sample_from_anchor, are."
        )
    return read


def flattened(config: dict[str, Any]) -> dict[str, Any]:
    """
    The fields of a speculators file at one level, with taps counted as `target_layer_ids` counts them.

    Raises:
        ValueError: when the taps are missing.
    """
    layers = decoder_fields(config.get("transformer_layer_config"))
    inputs = config.get("aux_hidden_state_layer_ids")
    if not isinstance(inputs, list):
        raise ValueError(
            "The drafter's configuration has no aux_hidden_state_layer_ids, so nothing says which target layers feed it."
        )
    rope = layers.get("rope_parameters") or {}
    own = {name: value for name, value in config.items() if name != "transformer_layer_config"}
    return (
        layers
        | own
        | {
            "target_layer_ids": [layer_id - 1 for layer_id in inputs],
            "rope_parameters": rope.get("sliding_attention") or rope,
            "target_name_or_path": verifier(config),
            "tap_before_norm": True,  # vLLM's states, on which these drafters are trained.
        }
    )


def decoder_fields(layers: Any) -> dict[str, Any]:
    """The decoder's fields, with the defaults of its class for those that the file leaves out."""
    if not isinstance(layers, dict):
        raise ValueError("The drafter's configuration has no transformer_layer_config, so its layers are unknown.")
    options = {name: value for name, value in layers.items() if name != "model_type"}
    model_type = layers.get("model_type", "qwen3")
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformer_layer_config is of model_type {model_type!r}, which transformers does not know.")
    complete = CONFIG_MAPPING[model_type](**options).to_dict()
    # The class drops the window if `use_sliding_window` is off, so the fields about windows are taken from the file.
    return complete | {name: layers[name] for name in ("sliding_window", "layer_types") if name in layers}


def verifier(config: dict[str, Any]) -> str | None:
    return ((config.get("speculators_config") or {}).get("verifier") or {}).get("name_or_path")


def causality_in_vllm(config: dict[str, Any], layer_types: list[str]) -> list[bool]:
    """Which layers of a file vLLM takes to be causal; the file may have been written by other software."""
    said = config["transformer_layer_config"].get("is_causal")
    if said is None and config["speculators_model_type"] == "dflash":
        said = not config.get("sliding_window_non_causal", True)
    return [layer_type == "sliding_attention" if said is None else bool(said) for layer_type in layer_types]


def limits(config: DSparkConfig) -> Iterator[str]:
    """Features of this drafter that the speculators package does not support."""
    yield from unknown_to_engines(config, mixed_causality=True)
    if config.layer_family == "gemma4":
        yield "it only supports Qwen3 draft layers"
    if config.attention_sinks or config.rotary_interleaved:
        yield "it has no attention sinks and no interleaved rotation"
    if any(config.layer_is_causal(i) and config.layer_window(i) is None for i in range(config.num_hidden_layers)):
        yield "its layers without a window see the whole block"


def write_config(config: DSparkConfig, target_architectures: list[str]) -> dict[str, Any]:
    """
    Raises:
        ValueError: when the drafter's configuration has no `target_name_or_path`, which readers of this format require.
    """
    if not config.target_name_or_path:
        raise ValueError(
            "A speculators checkpoint names its target: set drafter.config.target_name_or_path to the repository it is for."
        )
    kind = "dspark" if config.markov_rank or config.enable_confidence_head else "dflash"
    heads = head_dict(config) if kind == "dspark" else {}
    layers = decoder_dict(config)
    if config.uniformly_causal is not None:
        layers["is_causal"] = config.uniformly_causal
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": config.num_draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": config.target_name_or_path, "architectures": target_architectures},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.logits_size,
        "block_size": config.block_size,
        "target_hidden_size": config.target_hidden_size if config.target_hidden_size != config.hidden_size else None,
        "aux_hidden_state_layer_ids": config.hidden_state_indices,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": config.uniformly_causal is False,
        "sample_from_anchor": config.sample_from_anchor,
        **heads,
        "tie_word_embeddings": False,
    }
