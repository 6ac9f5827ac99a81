"""The parts of a decoder layer with injected context keys and values (paper section 3.1), with options per model family.

Queries come from the block only. Keys and values come from the block and from the projected context features,
through the same `k_proj` and `v_proj`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .configuration_drafter import DecoderDrafterConfig
from .draft_cache import DraftCache
from .transformers_names import attention_name

RotaryAngles = tuple[torch.Tensor, torch.Tensor]
KeyValues = tuple[torch.Tensor, torch.Tensor]


class DSparkRMSNorm(nn.RMSNorm):
    """Root-mean-square norm, computed in float32, with or without a scale."""

    def __init__(self, size: int, eps: float, with_scale: bool = True):
        super().__init__(size, eps=eps, elementwise_affine=with_scale)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        if self.weight is None or dtype == self.weight.dtype == torch.float32:
            return super().forward(hidden_states).to(dtype)
        # Rounded before it is scaled, as by the models of transformers, with which checkpoints were trained.
        return self.weight * nn.functional.rms_norm(hidden_states, self.normalized_shape, eps=self.eps).to(dtype)


class TapNorms(nn.ModuleList):
    """A norm for each tapped layer, applied to the tapped hidden states `[..., m * D]` before they are projected together."""

    def __init__(self, num_taps: int, size: int, eps: float):
        super().__init__(DSparkRMSNorm(size, eps) for _ in range(num_taps))
        self.size = size

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        taps = features.split(self.size, dim=-1)
        return torch.cat([norm(tap) for norm, tap in zip(self, taps, strict=True)], dim=-1)


class DSparkRotaryEmbedding(nn.Module):
    """Rotary angles for absolute positions, from transformers' RoPE utilities (default, linear, yarn, llama3, ...)."""

    inv_freq: torch.Tensor

    def __init__(self, config: DecoderDrafterConfig):
        super().__init__()
        self.config = config
        self.rope_type = config.rope_parameters["rope_type"]
        self.max_seq_len_cached = self.original_max_seq_len = config.max_position_embeddings
        scaled = ROPE_INIT_FUNCTIONS.get(self.rope_type, self.compute_default_rope_parameters)
        inv_freq, self.attention_scaling = scaled(config, None)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    @staticmethod
    def compute_default_rope_parameters(
        config: DecoderDrafterConfig, device: Any = None, **kwargs: Any
    ) -> tuple[torch.Tensor, float]:
        """Unscaled inverse frequencies `[rotary_dim / 2]`; transformers calls this by name when it loads weights."""
        parameters = config.rope_parameters or {}
        # Only the drafter's `rope_parameters` may restrict the rotation to some channels. A factor inherited from the
        # target's configuration would silently halve acceptance, so the readers of checkpoints drop it.
        size = int((config.head_dim or 0) * parameters.get("partial_rotary_factor", 1.0))
        exponents = torch.arange(0, size, 2, dtype=torch.float, device=device) / size
        return 1.0 / parameters["rope_theta"] ** exponents, 1.0

    @torch.no_grad()
    @dynamic_rope_update  # type: ignore[untyped-decorator]
    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> RotaryAngles:
        """Cosines and sines `[B, 1, T, rotary_dim]` of `position_ids` `[B, T]`, in the dtype of `hidden_states`."""
        frequencies = position_ids[..., None].float() * self.inv_freq.float()  # [B, T, rotary_dim / 2]
        angles = torch.cat([frequencies, frequencies], dim=-1).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_scaling != 1.0:
            cos, sin = cos * self.attention_scaling, sin * self.attention_scaling
        return cos.to(hidden_states.dtype), sin.to(hidden_states.dtype)


def rotate(states: torch.Tensor, angles: RotaryAngles, interleaved: bool = False) -> torch.Tensor:
    """
    Rotates the leading `rotary_dim` channels of `states` `[B, H, T, head_dim]`: pairs of one channel from each half, or,
    if interleaved, pairs of neighbours.
    """
    cos, sin = angles
    size = cos.shape[-1]
    rotary, rest = states[..., :size], states[..., size:]
    if interleaved:
        rotary = rotary.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first, second = rotary.chunk(2, dim=-1)
    rotated = torch.addcmul(rotary * cos, torch.cat([-second, first], dim=-1), sin)
    if interleaved:
        rotated = rotated.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return rotated if rest.shape[-1] == 0 else torch.cat([rotated, rest], dim=-1)


class DSparkAttention(nn.Module):
    """
    Attention of the block over context and block, through transformers' attention interface.

    Args:
        config: The drafter's.
        layer_idx: Index of the draft layer.
        input_size: Width of its input; the hidden size by default.
    """

    is_causal = False  # Read by transformers' attention functions; every restriction is in our mask.

    def __init__(self, config: DecoderDrafterConfig, layer_idx: int, input_size: int | None = None):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        input_size = input_size or config.hidden_size
        self.head_dim = self.value_size = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.attention_scaling or config.head_dim**-0.5
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        gated = config.attention_gate == "query"  # Then the projection gives the gates as well, head by head.
        self.q_proj = nn.Linear(input_size, 2 * query_size if gated else query_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        if not config.attention_k_eq_v:
            self.v_proj = nn.Linear(input_size, key_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps)
        if config.v_norm:
            self.v_norm = DSparkRMSNorm(config.head_dim, config.rms_norm_eps, with_scale=False)
        if config.attention_gate in ("head", "element"):
            gate_size = config.num_attention_heads if config.attention_gate == "head" else query_size
            self.g_proj = nn.Linear(input_size, gate_size, bias=False)
        if config.attention_sinks:
            self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads))

    def key_values(self, hidden_states: torch.Tensor, angles: RotaryAngles) -> KeyValues:
        """Rotated keys and values `[B, H_kv, T, head_dim]` of block or context states `[B, T, D]`."""
        keys, values = self._unrotated(hidden_states)
        keys = rotate(keys.transpose(1, 2), angles, self.config.rotary_interleaved)
        return keys, values.transpose(1, 2)

    def _unrotated(self, hidden_states: torch.Tensor) -> KeyValues:
        """The same before the rotation, `[B, T, H_kv, head_dim]`."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        keys = self.k_proj(hidden_states).view(shape)
        values = keys if self.config.attention_k_eq_v else self.v_proj(hidden_states).view(shape)
        if self.config.qk_norm:
            keys = self.k_norm(keys)
        if self.config.v_norm:
            values = self.v_norm(values)
        return keys, values if self.config.value_scale == 1.0 else values * self.config.value_scale

    def forward(
        self,
        hidden_states: torch.Tensor,
        angles: RotaryAngles,
        context: KeyValues | DraftCache | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: Block states, `[B, Q, D]` (or as wide as `input_size`).
            angles: Rotary angles of the block's positions.
            context: Context keys and values of this layer `[B, H_kv, T, head_dim]`, or the cache that holds them.
            attention_mask: What each query may see of context and block, in the form the attention function wants.
        """
        queries, gates = self._queries_and_gates(hidden_states)
        if self.config.qk_norm:
            queries = self.q_norm(queries)
        keys, values = self._unrotated(hidden_states)
        both = torch.cat([queries, keys], dim=2).transpose(1, 2)  # [B, H + H_kv, Q, head_dim]
        both = rotate(both, angles, self.config.rotary_interleaved)
        queries, keys = both.split([queries.shape[2], keys.shape[2]], dim=1)
        values = values.transpose(1, 2)
        if isinstance(context, DraftCache):
            keys, values = context.with_block(self.layer_idx, keys, values)
        elif context is not None:
            keys = torch.cat([context[0], keys], dim=2)  # [B, H_kv, T + Q, head_dim]
            values = torch.cat([context[1], values], dim=2)
        implementation = attention_name(self.config)
        if self.config.attention_sinks:
            if implementation not in ("eager", "sdpa", None):
                raise ValueError(
                    f"This drafter has attention sinks, which attn_implementation={implementation!r} cannot do here: "
                    "load it with attn_implementation='sdpa'."
                )
            keys, values, attention_mask = with_sink(self.attention_sink_bias, queries, keys, values, attention_mask)
        attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        output, _ = attention(
            self,
            queries,
            keys,
            values,
            attention_mask,
            scaling=self.scaling,
            dropout=self.config.attention_dropout if self.training else 0.0,
            is_causal=False,
        )
        output = output[..., : self.value_size]
        if gates is not None:
            output = output * gates
        return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1))

    def _queries_and_gates(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Queries `[B, Q, H, head_dim]`, and the factors on the attention's output `[B, Q, H, 1 or head_dim]`, if any."""
        shape = (*hidden_states.shape[:-1], self.config.num_attention_heads, -1)
        queries = self.q_proj(hidden_states).view(shape)
        if self.config.attention_gate == "query":
            queries, gates = queries.chunk(2, dim=-1)
            return queries, torch.sigmoid(gates)
        if self.config.attention_gate is None:
            return queries, None
        gates = self.g_proj(hidden_states).view(shape)
        return queries, nn.functional.softplus(gates.float()).to(queries.dtype)


def with_sink(
    sinks: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """
    Adds attention sinks for attention functions that do not support them, as one more key and value, both zero. The mask
    adds each head's sink logit to the score of that key, so it takes weight from the others and contributes nothing.

    Args:
        sinks: Sink logit of each query head, `[H]`.
        queries, keys, values: `[B, H, Q, head_dim]` and twice `[B, H_kv, S, head_dim]`.
        mask: Boolean or additive, `[B, 1, Q, S]`; `None` where everything is seen.

    Returns:
        Keys and values of `S + 1` positions and the additive mask `[B, H, Q, S + 1]`.
    """
    (batch, heads, num_queries, _), dtype = queries.shape, queries.dtype
    if mask is None:
        mask = queries.new_zeros(1, 1, 1, keys.shape[2])
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)
    column = sinks.to(dtype)[None, :, None, None].expand(batch, heads, num_queries, 1)
    mask = torch.cat([mask.expand(batch, heads, num_queries, keys.shape[2]), column], dim=-1)
    pad = (0, 0, 0, 1)
    return nn.functional.pad(keys, pad), nn.functional.pad(values, pad), mask


def eager_attention_forward(
    module: DSparkAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain attention formula, in the call shape of transformers' attention interface."""
    groups = module.num_key_value_groups
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling  # [B, H, Q, T + Q]
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return (weights @ value).transpose(1, 2), weights


class DSparkMLP(nn.Module):
    """The gated MLP of the target's family."""

    def __init__(self, config: DecoderDrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
