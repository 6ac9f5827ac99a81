"""
Tiny targets that keep more than keys and values: recurrent states, convolutions, compressed entries.

Weights are wide enough that outputs vary; see `tiny`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import tiny

_GATED_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
}
_KIMI = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_key_value_heads": 4,
    "head_dim": None,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "num_expert_group": 1,
    "topk_group": 1,
}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_GRANITE = {
    "layer_types": ["mamba", "attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 32,
}
_LFM2_MOE = {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1} | {
    name: _QWEN_EXPERTS[name] for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
}
_DEEPSEEK_V4 = {
    "num_hidden_layers": 6,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"] * 2,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    "sliding_window": tiny.SLIDING_WINDOW,
    "mlp_layer_types": ["hash_moe"] + ["moe"] * 5,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "q_lora_rank": 12,
    "o_groups": 2,
    "o_lora_rank": 10,
    "partial_rotary_factor": 0.25,
    # With few indexer heads, scores tie at exactly 0, and the shape of a pass decides which of them are taken.
    "index_n_heads": 24,
    "index_head_dim": 8,
    "index_topk": 3,
    "initializer_range": 0.3,
}

# By family, the class of the configuration and its fields; those with `None` are left out.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5": ("Qwen3_5Text", _GATED_DELTA),
    "qwen3_5_moe": ("Qwen3_5MoeText", _GATED_DELTA | _QWEN_EXPERTS),
    "qwen3_next": ("Qwen3Next", _GATED_DELTA | _QWEN_EXPERTS),
    "olmo_hybrid": ("OlmoHybrid", _GATED_DELTA),
    "kimi_linear": ("KimiLinear", _KIMI),
    "bailing_hybrid": ("BailingHybrid", _KIMI | {"first_k_dense_replace": 1}),
    "lara_mini": ("LaraMini", {}),
    "zaya": ("Zaya", {}),
    "bamba": ("Bamba", _MAMBA2 | {"attn_layer_indices": [1, 3]}),
    "falcon_h1": ("FalconH1", _MAMBA2 | {"mamba_d_ssm": 64, "num_hidden_layers": 3}),
    "granitemoehybrid": ("GraniteMoeHybrid", _MAMBA2 | _GRANITE),
    "nemotron_h": (
        "NemotronH",
        {
            "num_hidden_layers": None,
            "hybrid_override_pattern": "M*M-",
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    "deepseek_v4": ("DeepseekV4", _DEEPSEEK_V4),
    "lfm2": ("Lfm2", {"full_attn_idxs": [1, 3], "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", _LFM2_MOE),
    "lfm3": ("Lfm3", {}),
    "inkling": ("InklingText", {}),
}
# Targets whose passes over several tokens are not those over one, and what they lack.
WRONG_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 8}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8}),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
    ),
    "zamba": ("Zamba", {"mamba_d_state": 8, "use_mamba_kernels": False, "n_mamba_heads": 2}),
    "recurrent_gemma": ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 8}),
}
# Those whose layers all crop or record what they hold, so that no token is fed again.
CROPPED = ("lfm2", "lfm2_moe", "lfm3", "inkling")
_ALL = FAMILIES | WRONG_FAMILIES


def exists(family: str) -> bool:
    """Whether the installed transformers has the family."""
    return hasattr(transformers, f"{_ALL[family][0]}Config")


def build(family: str, seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A new target of a family."""
    name, own = _ALL[family]
    common = tiny.target_config("Llama").to_dict()
    kept = {key: common[key] for key in _COMMON} | own | fields
    kept = {key: value for key, value in kept.items() if key not in _absent(own)}
    config = getattr(transformers, f"{name}Config")(**kept)
    target = tiny.build_target(config, seed)
    if family == "deepseek_v4":
        _spread(target, seed)
    return target


@functools.cache
def target(family: str) -> PreTrainedModel:
    """A shared target of a family."""
    return build(family)


_COMMON = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "initializer_range",
    "tie_word_embeddings",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)


def _absent(fields: dict[str, Any]) -> set[str]:
    return {name for name, value in fields.items() if value is None and name != "q_lora_rank"}


def _spread(target: PreTrainedModel, seed: int) -> None:
    """Gives DeepSeek-V4's biases, scales and expert tables values that tell positions and experts apart."""
    generator = torch.Generator().manual_seed(seed + 1)
    for name, weight in target.named_parameters():
        if name.endswith(("base", "sinks", "position_bias")):
            weight.data = 0.5 * torch.randn(weight.shape, generator=generator)
        elif name.endswith("scale"):
            weight.data = 1 + 0.2 * torch.randn(weight.shape, generator=generator)
    for name, buffer in target.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        if name.endswith("tid2eid"):
            tables = [torch.randperm(6, generator=generator)[: buffer.shape[1]] for _ in range(buffer.shape[0])]
            buffer.copy_(torch.stack(tables))
