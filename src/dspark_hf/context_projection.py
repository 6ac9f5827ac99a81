"""Keys and values of context for all draft layers by one product, where that gives what the layers give one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .layers import DSparkAttention, DSparkRMSNorm, KeyValues, RotaryAngles, rotate
from .transformers_names import has_hooks


class ContextProjection:
    """
    The key and value projections of all layers as one linear map.

    It holds copies of their weights as they are now, so it is to be made for one call and not kept: 2 * L * H_kv * head_dim rows.

    Args:
        layers: The attention of each draft layer, for which [`~ContextProjection.of`] has seen that the copies stand for them.
    """

    def __init__(self, layers: Sequence[DSparkAttention]):
        first = layers[0]
        self.config, self.num_layers, self.head_dim = first.config, len(layers), first.head_dim
        self.num_heads = self.config.num_key_value_heads
        parts = [layer.k_proj for layer in layers]
        if not self.config.attention_k_eq_v:
            parts += [layer.v_proj for layer in layers]
        self.weight = torch.cat([part.weight.detach() for part in parts])  # [(2) * L * H_kv * head_dim, D]
        biases = [part.bias.detach() for part in parts if part.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        self.key_scale: torch.Tensor | None = None
        if self.config.qk_norm:
            scales = [layer.k_norm.weight.detach() for layer in layers]
            self.key_scale = torch.stack(scales)[:, None, None, None]  # [L, 1, 1, 1, head_dim]

    @classmethod
    def of(cls, layers: Sequence[DSparkAttention]) -> ContextProjection | None:
        """Of layers whose projections are plain linear maps: no adapters, no quantized weights, no hooks; else `None`."""
        parts = [part for layer in layers for part in _projections(layer)]
        weights = [part.weight for part in parts if type(part) is nn.Linear]
        is_plain = len(weights) == len(parts) and all(
            type(weight) is nn.Parameter
            and type(weight.data) is torch.Tensor
            and (weight.shape, weight.dtype, weight.device) == (weights[0].shape, weights[0].dtype, weights[0].device)
            and not weight.is_meta
            for weight in weights
        )
        norms = [layer.k_norm for layer in layers if layer.config.qk_norm]
        if not is_plain or any(type(norm) is not DSparkRMSNorm for norm in norms) or any(map(has_hooks, layers)):
            return None
        return cls(layers)

    def __call__(self, context: torch.Tensor, angles: RotaryAngles) -> KeyValues:
        """Rotated keys and values of all layers, `[L, B, H_kv, T, head_dim]`, of projected context `[B, T, D]`."""
        states = nn.functional.linear(context, self.weight, self.bias)
        # [B, T, 1 or 2, L, H_kv, head_dim] -> [1 or 2, L, B, T, H_kv, head_dim]
        states = states.view(*context.shape[:2], -1, self.num_layers, self.num_heads, self.head_dim)
        states = states.permute(2, 3, 0, 1, 4, 5)
        keys, values = states[0], states[-1]
        size, eps = (self.head_dim,), self.config.rms_norm_eps
        if self.key_scale is not None:
            keys = self.key_scale * nn.functional.rms_norm(keys, size, eps=eps)
        if self.config.v_norm:
            values = nn.functional.rms_norm(values, size, eps=eps)
        if self.config.value_scale != 1.0:
            values = values * self.config.value_scale
        keys = rotate(keys.transpose(2, 3), angles, self.config.rotary_interleaved)
        return keys, values.transpose(2, 3)


def _projections(layer: DSparkAttention) -> list[nn.Module]:
    return [layer.k_proj] if layer.config.attention_k_eq_v else [layer.k_proj, layer.v_proj]
