"""Manifold-constrained hyper-connections: how a layer reads and writes several residual streams (DeepSeek-V4, section 2.2)."""

from __future__ import annotations

import torch
from torch import nn

from ...layers import DSparkRMSNorm
from .configuration_deepseek_v4 import DeepseekV4DrafterConfig


def widened(states: torch.Tensor) -> torch.Tensor:
    """In float32, or more where it is."""
    return states.to(torch.promote_types(states.dtype, torch.float32))


class HyperConnection(nn.Module):
    """
    What surrounds one sublayer in place of a residual connection. All weights are computed from the streams, in float32.

    The parameters hold three maps one after the other: `n` weights to read with, `n` to write with, `n * n` to mix with.
    """

    def __init__(self, config: DeepseekV4DrafterConfig):
        super().__init__()
        self.num_streams, self.num_rounds, self.eps = config.hc_mult, config.hc_sinkhorn_iters, config.hc_eps
        size = (2 + self.num_streams) * self.num_streams
        self.input_norm = DSparkRMSNorm(self.num_streams * config.hidden_size, config.rms_norm_eps, with_scale=False)
        self.fn = nn.Parameter(torch.empty(size, self.num_streams * config.hidden_size))
        self.base = nn.Parameter(torch.empty(size))
        self.scale = nn.Parameter(torch.empty(3))

    def forward(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """
        Args:
            streams: `[B, Q, n, D]`.

        Returns:
            What the sublayer reads `[B, Q, D]`, and for `write` the weights of each stream `[B, Q, n]` and of each pair of
            streams `[B, Q, n, n]`.
        """
        n = self.num_streams
        weights = nn.functional.linear(self.input_norm(widened(streams.flatten(2))), widened(self.fn))
        read, write, mix = weights.split([n, n, n * n], dim=-1)
        read_base, write_base, mix_base = widened(self.base).split([n, n, n * n])
        read_scale, write_scale, mix_scale = widened(self.scale).unbind()
        read = torch.sigmoid(read * read_scale + read_base) + self.eps
        write = 2 * torch.sigmoid(write * write_scale + write_base)
        mix = self.doubly_stochastic((mix * mix_scale + mix_base).unflatten(-1, (n, n)))
        return weighted_sum(streams, read), write, mix

    def doubly_stochastic(self, logits: torch.Tensor) -> torch.Tensor:
        """Positive matrices `[..., n, n]` whose rows and columns sum to about 1 (Sinkhorn and Knopp)."""
        mix = logits.softmax(dim=-1) + self.eps  # A softmax is the first division by the sums of the rows.
        mix = mix / (mix.sum(dim=-2, keepdim=True) + self.eps)
        for _ in range(self.num_rounds - 1):
            mix = mix / (mix.sum(dim=-1, keepdim=True) + self.eps)
            mix = mix / (mix.sum(dim=-2, keepdim=True) + self.eps)
        return mix

    @staticmethod
    def write(streams: torch.Tensor, output: torch.Tensor, write: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
        """The streams after a sublayer that gave `output` `[B, Q, D]`: new stream `j` takes `mix[i, j]` of old stream `i`."""
        dtype = streams.dtype
        return write.to(dtype)[..., None] * output[..., None, :] + mix.to(dtype).mT @ streams


class HyperHead(nn.Module):
    """Makes one state of the streams after the last layer."""

    def __init__(self, config: DeepseekV4DrafterConfig):
        super().__init__()
        width = config.hc_mult * config.hidden_size
        self.eps = config.hc_eps
        self.input_norm = DSparkRMSNorm(width, config.rms_norm_eps, with_scale=False)
        self.fn = nn.Parameter(torch.empty(config.hc_mult, width))
        self.base = nn.Parameter(torch.empty(config.hc_mult))
        self.scale = nn.Parameter(torch.empty(1))

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """`[B, Q, n, D]` -> `[B, Q, D]`."""
        weights = nn.functional.linear(self.input_norm(widened(streams.flatten(2))), widened(self.fn))
        return weighted_sum(streams, torch.sigmoid(weights * widened(self.scale) + widened(self.base)) + self.eps)


def weighted_sum(streams: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Streams `[B, Q, n, D]` with weights `[B, Q, n]` -> `[B, Q, D]`, summed in float32."""
    return (weights[..., None] * streams).sum(dim=2).to(streams.dtype)
