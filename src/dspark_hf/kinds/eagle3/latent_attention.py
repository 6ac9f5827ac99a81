"""
Multi-head latent attention (DeepSeek-V2), as in the drafters for Kimi: keys and values of all heads come from one latent vector.

The rotated part of a key is shared by all heads. Within a head it comes first here, so that rotation and the cache are those of
other layers; the order of channels is of no matter to a product of queries and keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ...layers import DSparkAttention, DSparkRMSNorm, KeyValues
from .configuration_eagle3 import Eagle3Config


class LatentAttention(DSparkAttention):
    """
    Attention whose queries, and whose keys and values, go through a narrow latent vector each.

    Arguments as in [`DSparkAttention`]. Parameter names are those of the released checkpoints.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, layer_idx: int, input_size: int):
        nn.Module.__init__(self)
        self.config, self.layer_idx = config, layer_idx
        assert config.q_lora_rank and config.kv_lora_rank and config.qk_nope_head_dim and config.v_head_dim
        heads, self.rope_size, self.nope_size = config.num_attention_heads, config.head_dim, config.qk_nope_head_dim
        self.head_dim, self.value_size = self.rope_size + self.nope_size, config.v_head_dim
        self.num_key_value_groups = 1
        self.scaling = self.head_dim**-0.5 * yarn_factor(config.rope_parameters)
        self.q_a_proj = nn.Linear(input_size, config.q_lora_rank, bias=config.attention_bias)
        self.q_a_layernorm = DSparkRMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * self.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            input_size, config.kv_lora_rank + self.rope_size, bias=config.attention_bias
        )
        self.kv_a_layernorm = DSparkRMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(config.kv_lora_rank, heads * (self.nope_size + self.value_size), bias=False)
        self.o_proj = nn.Linear(heads * self.value_size, config.hidden_size, bias=config.attention_bias)

    def _queries_and_gates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))
        queries = queries.view(*hidden_states.shape[:-1], -1, self.head_dim)
        plain, rotated = queries.split([self.nope_size, self.rope_size], dim=-1)
        return torch.cat([rotated, plain], dim=-1), None

    def _unrotated(self, hidden_states: torch.Tensor) -> KeyValues:
        """Values are padded to the width of keys, which the cache wants; what attention makes of the padding is cut off."""
        latent, rotated = self.kv_a_proj_with_mqa(hidden_states).split(
            [self.config.kv_lora_rank, self.rope_size], dim=-1
        )
        both = self.kv_b_proj(self.kv_a_layernorm(latent))
        both = both.view(*hidden_states.shape[:-1], -1, self.nope_size + self.value_size)  # [B, T, H, ...]
        plain, values = both.split([self.nope_size, self.value_size], dim=-1)
        keys = torch.cat([rotated[..., None, :].expand(*plain.shape[:-1], -1), plain], dim=-1)
        return keys, nn.functional.pad(values, (0, self.head_dim - self.value_size))


def yarn_factor(rope_parameters: dict[str, Any]) -> float:
    """What YaRN's `mscale_all_dim` multiplies the scale of attention scores by; 1 without it."""
    factor, mscale = rope_parameters.get("factor") or 1.0, rope_parameters.get("mscale_all_dim") or 0.0
    return (0.1 * mscale * math.log(factor) + 1.0) ** 2 if mscale and factor > 1 else 1.0
