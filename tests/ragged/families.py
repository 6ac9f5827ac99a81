"""Tiny targets whose attention differs in what matters to rows that share a pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import tiny

FAMILIES: dict[str, dict[str, Any]] = {
    "Llama4Text": {  # Attention in chunks.
        "attention_chunk_size": 8,
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "no_rope_layers": [1, 0, 1, 0],
        "intermediate_size_mlp": 32,
        "num_local_experts": 2,
    },
    "Gemma2": {"sliding_window": 8, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},  # Soft caps.
    "Phimoe": {"sliding_window": 8, "num_local_experts": 4},  # A window in the mask that attention is not told of.
    "Qwen2Moe": {
        "sliding_window": 8,
        "use_sliding_window": True,
        "max_window_layers": 2,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "Doge": {"keep_window_size": 64},  # A mask of its own on top.
    "Cohere2": {"sliding_window": 8, "layer_types": tiny.ALTERNATING},
    "DeepseekV3": {  # Keys and values of different widths.
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
    },
    "Gemma4Text": {  # Layers that share the keys and values of others.
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "layer_types": tiny.ALTERNATING,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": tiny.VOCAB_SIZE,
        "global_head_dim": 8,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": False,
    },
    "GPT2": {},  # Learned positions.
    "StableLm": {},  # Not through transformers' attention interface.
}
PADDED = {"Doge", "StableLm"}


def target_of(family: str, **fields: Any) -> PreTrainedModel:
    """A target of one of `FAMILIES` or of `tiny.TARGETS`."""
    if family in tiny.TARGETS:
        return tiny.TARGETS[family](**fields)
    target = tiny.build_target(tiny.target_config(family, **(FAMILIES[family] | fields)))
    ids = tiny.prompt(9)["input_ids"]
    if not torch.allclose(target(ids).logits[:, :4], target(ids[:, :4]).logits, atol=1e-3):
        pytest.skip(f"{family} attends to later tokens in this version of transformers")
    return target
