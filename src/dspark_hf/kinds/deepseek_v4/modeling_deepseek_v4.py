"""
DeepSeek-V4's embedded drafter: a DSpark drafter whose layers are DeepSeek-V4's own (window attention, experts, several streams).

It differs from [`~dspark_hf.DSparkDrafter`] in those layers; in its context, of which a block sees a window that does not slide
from slot to slot; and in the state that the confidence head reads, which is the one before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.integrations import use_experts_implementation
from transformers.modeling_layers import GradientCheckpointingLayer

from ...context_projection import ContextProjection
from ...draft_cache import DraftCache
from ...embeddings import SharedEmbeddings
from ...layers import DSparkRMSNorm, KeyValues, RotaryAngles
from ...masks import anchor_mask
from ...modeling_drafter import DrafterOutput
from ...transformers_names import with_experts
from ..dspark.modeling_dspark import DSparkDrafter
from .configuration_deepseek_v4 import DeepseekV4DrafterConfig
from .hyper_connections import HyperConnection, HyperHead, widened
from .window_cache import WindowCache


class DeepseekV4RotaryEmbedding(nn.Module):
    """Rotary angles for absolute positions; they are never scaled, whatever the target's layers do."""

    def __init__(self, config: DeepseekV4DrafterConfig):
        super().__init__()
        self.size, self.theta = config.qk_rope_head_dim, config.rope_theta

    def forward(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> RotaryAngles:
        """`position_ids` `[B, T]` -> cosines and sines `[B, T, qk_rope_head_dim / 2]`, in float32 at least."""
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        exponents = torch.arange(0, self.size, 2, dtype=dtype, device=hidden_states.device) / self.size
        angles = position_ids.to(exponents)[..., None] / self.theta**exponents
        return angles.cos(), angles.sin()


def rotate_last(states: torch.Tensor, angles: RotaryAngles, backwards: bool = False) -> torch.Tensor:
    """Rotates the last channels of `states` `[B, T, H, head_dim]`, each against its neighbour."""
    cos, sin = (angle[:, :, None].to(states.device) for angle in angles)
    sin = -sin if backwards else sin
    rest, rotary = states.split([states.shape[-1] - 2 * cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    even, odd = widened(rotary).unflatten(-1, (-1, 2)).unbind(-1)
    rotated = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)
    return torch.cat([rest, rotated.to(states.dtype)], dim=-1)


class GroupedProjection(nn.Module):
    """A linear map for each group of heads. Not an `nn.Linear`, whose adapters would take it for one map over all of them."""

    def __init__(self, num_groups: int, in_features: int, out_features: int):
        super().__init__()
        self.num_groups = num_groups
        self.weight = nn.Parameter(torch.empty(num_groups * out_features, in_features))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[B, Q, num_groups * in_features]` -> `[B, Q, num_groups * out_features]`."""
        groups = states.unflatten(-1, (self.num_groups, -1))
        return torch.einsum("bqgi,goi->bqgo", groups, self.weight.unflatten(0, (self.num_groups, -1))).flatten(2)


class DeepseekV4Attention(nn.Module):
    """Attention of the block over context and block. One row of each token is key and value for all heads."""

    def __init__(self, config: DeepseekV4DrafterConfig, layer_idx: int):
        super().__init__()
        heads, size, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        self.layer_idx, self.num_heads, self.head_dim = layer_idx, heads, size
        self.q_a_proj = nn.Linear(config.hidden_size, config.q_lora_rank, bias=False)
        self.q_a_norm = DSparkRMSNorm(config.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(config.q_lora_rank, heads * size, bias=False)
        self.q_b_norm = DSparkRMSNorm(size, eps, with_scale=False)
        self.kv_proj = nn.Linear(config.hidden_size, size, bias=False)
        self.kv_norm = DSparkRMSNorm(size, eps)
        self.o_a_proj = GroupedProjection(config.o_groups, heads * size // config.o_groups, config.o_lora_rank)
        self.o_b_proj = nn.Linear(config.o_groups * config.o_lora_rank, config.hidden_size, bias=False)
        self.sinks = nn.Parameter(torch.empty(heads))

    def key_values(self, hidden_states: torch.Tensor, angles: RotaryAngles) -> KeyValues:
        """The rows `[B, 1, T, head_dim]` of states `[B, T, D]`, as keys and as values."""
        rows = self.kv_norm(self.kv_proj(hidden_states))[:, :, None]  # [B, T, 1, head_dim]
        rows = rotate_last(rows, angles).transpose(1, 2)
        return rows, rows

    def forward(
        self,
        hidden_states: torch.Tensor,
        angles: RotaryAngles,
        context: KeyValues | DraftCache | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """
        Args:
            hidden_states: Of the slots, `[B, Q, D]`.
            angles: Of their positions.
            context: Rows of the context, given or in a cache.
            attention_mask: True = keep, `[B, 1, 1 or Q, T + Q]`; `None` where everything is seen.
        """
        batch, num_slots, _ = hidden_states.shape
        queries = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states)))
        queries = self.q_b_norm(queries.unflatten(-1, (self.num_heads, self.head_dim)))
        queries = rotate_last(queries, angles).transpose(1, 2)  # [B, H, Q, head_dim]
        rows, _ = self.key_values(hidden_states, angles)
        if isinstance(context, DraftCache):
            rows, _ = context.with_block(self.layer_idx, rows, rows)
        elif context is not None:
            rows = torch.cat([context[0], rows], dim=2)
        rows = rows[:, 0]  # [B, T + Q, head_dim]
        # All heads read the same rows, so that heads and slots are one dimension of two products.
        scores = widened((queries.flatten(1, 2) @ rows.mT).unflatten(1, (self.num_heads, num_slots)))
        scores = scores * self.head_dim**-0.5
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, -torch.inf)
        # A logit of each head takes weight to nothing, which also keeps the softmax finite.
        sinks = self.sinks.to(scores)[None, :, None, None].expand(batch, -1, num_slots, 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1].to(rows.dtype)
        output = (weights.flatten(1, 2) @ rows).unflatten(1, (self.num_heads, num_slots)).transpose(1, 2)
        # Values were rotated as keys: turning back by the query's position leaves their distance to it.
        output = rotate_last(output, angles, backwards=True)
        return self.o_b_proj(self.o_a_proj(output.flatten(2)))


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """The gated product of an expert, whose factors are clamped."""
    return nn.functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


class DeepseekV4MLP(nn.Module):
    """The expert that every token goes through."""

    def __init__(self, config: DeepseekV4DrafterConfig):
        super().__init__()
        self.limit = config.swiglu_limit
        self.gate_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.moe_intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.moe_intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.down_proj(swiglu(self.gate_proj(hidden_states), self.up_proj(hidden_states), self.limit))


@use_experts_implementation
class DeepseekV4Experts(nn.Module):
    """
    The experts that tokens are sent to. `forward` is the plain loop over them, `experts_implementation="eager"`; transformers
    puts its grouped and batched products in its place, which read the same parameters and call `_apply_gate`.
    """

    def __init__(self, config: DeepseekV4DrafterConfig):
        super().__init__()
        self.num_experts, self.limit = config.n_routed_experts, config.swiglu_limit
        size, width = config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(self.num_experts, 2 * width, size))
        self.down_proj = nn.Parameter(torch.empty(self.num_experts, size, width))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """States `[N, D]`, each sent to the experts `[N, k]` with the weights `[N, k]` -> `[N, D]`."""
        output = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            gate_up = nn.functional.linear(hidden_states[token], self.gate_up_proj[expert])
            states = nn.functional.linear(self._apply_gate(gate_up), self.down_proj[expert])
            output.index_add_(0, token, (states * top_k_weights[token, choice, None]).to(output.dtype))
        return output

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return swiglu(gate, up, self.limit)


class DeepseekV4Router(nn.Module):
    """Which experts a token is sent to: those of the largest corrected scores, weighted by the scores themselves."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: DeepseekV4DrafterConfig):
        super().__init__()
        self.num_chosen, self.factor = config.num_experts_per_tok, config.routed_scaling_factor
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """States `[N, D]` -> the experts of each `[N, k]` and their weights in float32 `[N, k]`."""
        logits = nn.functional.linear(widened(hidden_states), widened(self.weight))
        scores = nn.functional.softplus(logits).sqrt()
        chosen = (scores + self.e_score_correction_bias).topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(-1, chosen)
        return chosen, weights / weights.sum(dim=-1, keepdim=True) * self.factor


class DeepseekV4MoE(nn.Module):
    """A mixture of experts, one of which every token goes through."""

    def __init__(self, config: DeepseekV4DrafterConfig):
        super().__init__()
        self.gate = DeepseekV4Router(config)
        self.experts = DeepseekV4Experts(config)
        self.shared_experts = DeepseekV4MLP(config)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[B, Q, D]` -> `[B, Q, D]`."""
        states = hidden_states.flatten(0, 1)
        return self.experts(states, *self.gate(states)).view_as(hidden_states) + self.shared_experts(hidden_states)


class DeepseekV4DecoderLayer(GradientCheckpointingLayer):
    """A decoder layer over block states in several streams, with context injected into its attention."""

    def __init__(self, config: DeepseekV4DrafterConfig, layer_idx: int):
        super().__init__()
        self.self_attn = DeepseekV4Attention(config, layer_idx)
        self.mlp = DeepseekV4MoE(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attn_hc = HyperConnection(config)
        self.ffn_hc = HyperConnection(config)

    def key_values(self, context: torch.Tensor, angles: RotaryAngles) -> KeyValues:
        """Keys and values of projected context `[B, T, D]`, as of [`DeepseekV4Attention`]."""
        return self.self_attn.key_values(context, angles)

    def forward(
        self,
        streams: torch.Tensor,
        angles: RotaryAngles,
        context: KeyValues | DraftCache | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """`[B, Q, n, D]` -> `[B, Q, n, D]`; the other arguments are those of [`DeepseekV4Attention`]."""
        hidden_states, *weights = self.attn_hc(streams)
        attended = self.self_attn(self.input_layernorm(hidden_states), angles, context, attention_mask)
        streams = HyperConnection.write(streams, attended, *weights)
        hidden_states, *weights = self.ffn_hc(streams)
        return HyperConnection.write(streams, self.mlp(self.post_attention_layernorm(hidden_states)), *weights)


@with_experts
class DeepseekV4Drafter(DSparkDrafter):
    """
    The drafter in DeepSeek-V4's checkpoints, for DeepSeek-V4.

    ```python
    >>> name = "deepseek-ai/DeepSeek-V4-Flash-DSpark"
    >>> target = AutoModelForCausalLM.from_pretrained(name, device_map="auto")  # doctest: +SKIP
    >>> drafter = dspark_hf.Drafter.from_pretrained(name, device_map="auto")  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
    ```
    """

    # It has all the fields that the methods of DSparkDrafter read.
    config_class = DeepseekV4DrafterConfig  # type: ignore[assignment]
    config: DeepseekV4DrafterConfig  # type: ignore[assignment]
    _no_split_modules = ["DeepseekV4DecoderLayer"]
    layer_class = DeepseekV4DecoderLayer
    rotary_class = DeepseekV4RotaryEmbedding
    # Heads of 512 channels with a sink are beyond torch's fused attention: there is one way to compute it.
    _supports_sdpa = False
    _supports_flash_attn = False
    _supports_flex_attn = False
    # Stored in float32 in the checkpoints; the weights of streams and the choice of experts depend on small differences.
    _keep_in_fp32_modules_strict = ["attn_hc", "ffn_hc", "hc_head", "sinks", "e_score_correction_bias"]

    layers: Sequence[DeepseekV4DecoderLayer]  # type: ignore[assignment]

    training_attention = None

    def make_layers(self, config: Any) -> None:
        super().make_layers(config)
        self.hc_head = HyperHead(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, HyperConnection | HyperHead):
            init.normal_(module.fn, std=std)
            init.zeros_(module.base)
            init.ones_(module.scale)
        elif isinstance(module, DeepseekV4Attention):
            init.zeros_(module.sinks)
        elif isinstance(module, GroupedProjection):
            init.normal_(module.weight, std=std)
        elif isinstance(module, DeepseekV4Router):
            init.normal_(module.weight, std=std)
            init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, DeepseekV4Experts):
            init.normal_(module.gate_up_proj, std=std)
            init.normal_(module.down_proj, std=std)

    # ------------------------------------------------------------------ the state before the final norm

    def backbone(
        self,
        hidden_states: torch.Tensor,
        angles: RotaryAngles,
        contexts: Sequence[KeyValues | DraftCache | None],
        masks: Sequence[Any],
    ) -> torch.Tensor:
        """As in [`DSparkDrafter`], without the final norm: the confidence head reads the state before it."""
        streams = hidden_states[:, :, None].repeat(1, 1, self.config.hc_mult, 1)  # [B, Q, n, D]
        for layer, context, mask in zip(self.layers, contexts, masks, strict=True):
            streams = layer(streams, angles, context, mask)
        return self.hc_head(streams)

    def base_logits(self, hidden_states: torch.Tensor, embeddings: SharedEmbeddings) -> torch.Tensor:
        """As in [`DSparkDrafter`], from states before the final norm."""
        return super().base_logits(self.norm(hidden_states), embeddings)

    def sequential_parameters(self) -> tuple[nn.Parameter, ...]:
        """The final norm's too: it is part of the logits."""
        return (*super().sequential_parameters(), self.norm.weight)

    # ------------------------------------------------------------------ the window

    def forward(  # type: ignore[override]  # The other arguments go through by name.
        self,
        block_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context_features: torch.Tensor | None = None,
        context_position_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        **kwargs: Any,
    ) -> DrafterOutput:
        """As in [`DSparkDrafter`]. Without a mask, of the context given a block sees the last tokens, those in its window."""
        if context_features is not None and attention_mask is None:
            length, window = context_features.shape[1], self.config.sliding_window
            if context_position_ids is None:
                context_position_ids = torch.arange(length, device=context_features.device)[None]
            context_features, context_position_ids = context_features[:, -window:], context_position_ids[:, -window:]
        return super().forward(
            block_ids, position_ids, context_features, context_position_ids, attention_mask, **kwargs
        )

    def new_cache(self, num_rows: int = 1) -> DraftCache:
        return WindowCache(len(self.layers), num_rows, self.config.sliding_window)

    def extend_cache(
        self,
        cache: DraftCache,
        context_features: torch.Tensor,
        position_ids: torch.Tensor,
        counts: list[int] | None = None,
        projection: ContextProjection | None = None,
    ) -> None:
        """As in [`DSparkDrafter`]. What no row's window reaches, most of a long prompt, is counted and not projected."""
        num_new = position_ids.shape[1]
        counts = [num_new] * cache.num_rows if counts is None else counts
        first = max(min(counts) - self.config.sliding_window, 0)
        cache.lengths = [length + first for length in cache.lengths]
        counts = [count - first for count in counts]
        super().extend_cache(cache, context_features[:, first:], position_ids[:, first:], counts)

    def context_projection(self) -> ContextProjection | None:
        """None: the rows are normed and rotated as no other kind's, and there are few of them."""
        return None

    def attention_arguments(
        self, mask: Any, positions: torch.Tensor, cache: DraftCache | None, dtype: torch.dtype
    ) -> list[Any]:
        """The same mask for all layers, as booleans."""
        if mask is None and isinstance(cache, WindowCache) and cache.max_length:
            mask = cache.mask(positions)
        return [mask] * len(self.layers)

    def training_masks(
        self, attention_mask: torch.Tensor, anchor_positions: torch.Tensor, keep_anchors: torch.Tensor
    ) -> Any:
        """One mask for all layers, `[B, 1, A * G, T + A * G]`."""
        visible = anchor_mask(anchor_positions, keep_anchors, attention_mask.bool(), self.config.block_size)
        keys = torch.arange(attention_mask.shape[1], device=attention_mask.device)
        in_window = keys >= anchor_positions[..., None] - self.config.sliding_window  # [B, A, T]
        in_window = in_window.repeat_interleave(self.config.block_size, dim=1)
        visible[:, 0, :, : len(keys)] &= in_window
        return visible

    def beyond_dflash(self, heads_elsewhere: bool = False) -> list[str]:
        return ["DeepSeek-V4's layers"]
