"""The DFlash2 drafter: short convolutions along a block around attention and MLP, and a selector of candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import initialization as init

from ...draft_cache import DraftCache
from ...embeddings import SharedEmbeddings
from ...layers import KeyValues, RotaryAngles
from ..dspark.modeling_dspark import DSparkDecoderLayer, DSparkDrafter
from .configuration_dflash2 import DFlash2Config


class BlockConvolution(nn.Module):
    """
    Two causal convolutions along the slots of a block, one before and one after a sublayer, channel by channel.

    The kernel of a channel is a learned one plus a part that a linear map of the slot gives, the same for a group of channels.
    Parameter names are those of the released checkpoints.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.block_size, self.group_size = config.block_size, config.conv_group_size
        self.kernel_size, self.num_groups = config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, config.conv_kernel_size, config.hidden_size))
        self.kernel_projection = nn.Linear(
            config.hidden_size, 2 * config.conv_kernel_size * self.num_groups, bias=False
        )

    def before(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        What the sublayer reads, `[B, Q, D]`, from the slots `[B, Q, D]` of whole blocks; and what `after` needs of them,
        `[B, Q, K, groups]`.
        """
        kernels = self.kernel_projection(hidden_states).unflatten(-1, (2, self.kernel_size, self.num_groups))
        return self._convolve(hidden_states, self.base_kernel[0], kernels[:, :, 0]), kernels[:, :, 1]

    def after(self, hidden_states: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """What the sublayer gave, convolved, `[B, Q, D]`."""
        return self._convolve(hidden_states, self.base_kernel[1], kernels)

    def _convolve(self, hidden_states: torch.Tensor, base: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        shape = (-1, self.block_size, self.num_groups, self.group_size)
        blocks = hidden_states.reshape(shape)  # [N, G, groups, group_size]
        kernels = kernels.reshape(-1, self.block_size, self.kernel_size, self.num_groups, 1)
        kernels = (
            base.view(self.kernel_size, self.num_groups, self.group_size) + kernels
        )  # [N, G, K, groups, group_size]
        output = kernels[:, :, 0] * blocks
        for tap in range(1, min(self.kernel_size, self.block_size)):
            output[:, tap:] += kernels[:, tap:, tap] * blocks[:, :-tap]
        return output.reshape(hidden_states.shape)


class DFlash2DecoderLayer(DSparkDecoderLayer):
    """A decoder layer whose attention and MLP each lie between two convolutions."""

    def __init__(self, config: DFlash2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.attention_conv = BlockConvolution(config)
        self.mlp_conv = BlockConvolution(config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        angles: RotaryAngles,
        context: KeyValues | DraftCache | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """As in [`DSparkDecoderLayer`]."""
        states, kernels = self.attention_conv.before(self.input_layernorm(hidden_states))
        attended = self.self_attn(states, angles, context, attention_mask)
        hidden_states = hidden_states + self.attention_conv.after(attended, kernels)
        states, kernels = self.mlp_conv.before(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.mlp_conv.after(self.mlp(states), kernels)


class CandidateSelector(nn.Module):
    """
    Scores a token after another with two codebooks and the slot's hidden state `h`: `<P[previous] * (W h), S[token]>`.

    Parameter names are those of the released checkpoints.
    """

    def __init__(self, config: DFlash2Config):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def features(self, previous_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """`P[previous] * (W h)` `[..., r]` from the tokens before the slots `[...]` and their hidden states `[..., D]`."""
        return self.predecessor_codebook[previous_ids] * self.hidden_projection(hidden_states)

    def select(self, base_logits: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        """Logits `[B, V]` of a slot from its base logits `[B, V]` and features `[B, r]`; minus infinity where no candidate is."""
        logits, ids = base_logits.topk(self.top_k, dim=-1)  # [B, k]
        scores = (features[:, None] * self.successor_codebook[ids]).sum(-1)
        return torch.full_like(base_logits, -torch.inf).scatter(-1, ids, logits + scores.to(logits.dtype))


class DFlash2Drafter(DSparkDrafter):
    """
    Drafts a block in one pass; then a selector chooses each token among the likely ones of its slot, given the token before.

    ```python
    >>> drafter = dspark_hf.Drafter.from_pretrained("z-lab/Muse-Glimmer-30B-DFlash2")  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
    ```

    In training, and when given answers are scored, the selector's score is added to every token: only the likely ones would give
    no gradient for a token that is not among them.
    """

    config_class = DFlash2Config
    config: DFlash2Config
    _no_split_modules = ["DFlash2DecoderLayer"]
    layer_class = DFlash2DecoderLayer

    candidate_selector: CandidateSelector

    def make_layers(self, config: Any) -> None:
        super().make_layers(config)
        self.candidate_selector = CandidateSelector(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, BlockConvolution):  # Each slot passes as it is.
            init.zeros_(module.base_kernel)
            init.ones_(module.base_kernel[:, 0])
        if isinstance(module, CandidateSelector):
            for codebook in (module.predecessor_codebook, module.successor_codebook):
                init.normal_(codebook, std=self.config.initializer_range)

    @property
    def heads(self) -> dict[str, nn.Module]:
        return {"candidate_selector": self.candidate_selector}

    def sequential_features(self, previous_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Those of the selector, `[..., G, r]`; see [`CandidateSelector`]."""
        return self.candidate_selector.features(previous_ids, hidden_states)

    def sequential_parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.candidate_selector.successor_codebook,)

    def draft_logits(
        self, hidden_states: torch.Tensor, features: torch.Tensor | None, embeddings: SharedEmbeddings
    ) -> torch.Tensor:
        """Base logits plus the selector's score of every token."""
        assert features is not None, "every slot has some"
        scores = nn.functional.linear(features, self.candidate_selector.successor_codebook)
        return self.base_logits(hidden_states, embeddings) + scores

    def start_neutral(self, new: set[str]) -> None:
        """The scores of a new selector are zero."""
        if "candidate_selector.successor_codebook" in new:
            nn.init.zeros_(self.candidate_selector.successor_codebook)

    def beyond_dflash(self, heads_elsewhere: bool = False) -> list[str]:
        return [*super().beyond_dflash(heads_elsewhere), "convolutions in its layers and a selector"]
