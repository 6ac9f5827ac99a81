"""
The EAGLE-3 drafter: one decoder layer that drafts token by token, each from its previous state and the token before.

The input at position `t` is a state and a token: the target's fused features of token `t`, and the embedding of token `t + 1`.
Its rotary position is `t`. So the first draft of a round is computed from the features of the token before the anchor and
from the anchor; each further draft from the drafter's state at the draft before it and from that draft. Only entries made
from fused features stay in the cache, never those made from the drafter's states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...draft_cache import DraftCache
from ...drafter import Drafter
from ...embeddings import SharedEmbeddings
from ...layers import (
    DSparkAttention,
    DSparkMLP,
    DSparkRMSNorm,
    DSparkRotaryEmbedding,
    KeyValues,
    RotaryAngles,
    TapNorms,
)
from ...masks import as_attention_argument, chain_drafting_mask, chain_training_mask
from ...modeling_drafter import DrafterOutput
from ...transformers_names import attention_name
from .configuration_eagle3 import Eagle3Config
from .latent_attention import LatentAttention


class Eagle3DecoderLayer(GradientCheckpointingLayer):
    """A decoder layer whose attention reads the embedding of a token concatenated with the state for that position."""

    def __init__(self, config: Eagle3Config):
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        attention = LatentAttention if config.kv_lora_rank else DSparkAttention
        self.self_attn = attention(config, 0, input_size=2 * config.hidden_size)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)

    def key_values(self, embedded: torch.Tensor, hidden_states: torch.Tensor, angles: RotaryAngles) -> KeyValues:
        """Keys and values `[B, H_kv, T, head_dim]` of context, from token embeddings and states, both `[B, T, D]`."""
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden_states)], dim=-1)
        return self.self_attn.key_values(inputs, angles)

    def forward(
        self,
        embedded: torch.Tensor,
        hidden_states: torch.Tensor,
        angles: RotaryAngles,
        context: KeyValues | DraftCache | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """The next states `[B, Q, D]` from token embeddings and states, both `[B, Q, D]`."""
        normed = self.hidden_norm(hidden_states)
        residual = normed if self.norm_before_residual else hidden_states
        inputs = torch.cat([self.input_layernorm(embedded), normed], dim=-1)  # [B, Q, 2 D]
        hidden_states = residual + self.self_attn(inputs, angles, context, attention_mask)
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3Drafter(Drafter):
    """
    Drafts token by token for a target model (EAGLE-3), in the same `generate` and the same trainer as a [`DSparkDrafter`].

    ```python
    >>> drafter = dspark_hf.Eagle3Drafter(dspark_hf.Eagle3Config.for_target(target.config))  # doctest: +SKIP
    >>> DSparkTrainer(model=drafter, target=target, train_dataset=rows).train()  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
    ```
    """

    config_class = Eagle3Config
    config: Eagle3Config
    _no_split_modules = ["Eagle3DecoderLayer"]

    layers: Sequence[Eagle3DecoderLayer]

    def __init__(self, config: Eagle3Config):
        super().__init__(config)
        width = config.num_taps * config.target_hidden_size
        self.input_norm = DSparkRMSNorm(width, config.rms_norm_eps) if config.norm_before_fc else None
        tap_norms = (config.num_taps, config.target_hidden_size, config.rms_norm_eps)
        self.fc_norm = TapNorms(*tap_norms) if config.fc_norm else None
        self.fc = nn.Linear(width, config.hidden_size, bias=False) if config.use_aux_hidden_state else None
        self.layers = nn.ModuleList([Eagle3DecoderLayer(config)])  # type: ignore[assignment]
        self.norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = DSparkRotaryEmbedding(config)
        self.post_init()

    @property
    def passes_per_round(self) -> int:
        """One pass per draft."""
        return self.config.num_draft_tokens

    # ------------------------------------------------------------------ drafting

    def project_context(self, context_features: torch.Tensor) -> torch.Tensor:
        """The fused state of each token `[B, T, D]` from its tapped hidden states `[B, T, m * D_target]`."""
        features = context_features.to(self.norm.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            features = self.fc_norm(features)
        return features if self.fc is None else self.fc(features)

    def handed_on(self, states: torch.Tensor) -> torch.Tensor:
        """What the next step of a chain reads of the states `[..., D]` after a step: themselves, or as the logits see them."""
        return self.norm(states) if self.config.norm_output else states

    def extend_cache(
        self,
        cache: DraftCache,
        next_ids: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        counts: list[int] | None = None,
        embeddings: SharedEmbeddings | None = None,
    ) -> None:
        """
        Keeps the keys and values of final tokens.

        Args:
            cache: The cache to extend.
            next_ids: The token after each of them, `[B, T]`.
            states: Their fused features, `[B, T, D]`.
            position_ids: Their absolute positions, `[B, T]`.
            counts: How many of the `T` belong to each row; all by default.
            embeddings: What to embed with; the last bound by default.
        """
        embedded = (embeddings or self.bind()).embed(next_ids, like=self.norm.weight)
        key_values = self.layers[0].key_values(embedded, states, self.rotary_emb(states, position_ids))
        cache.append([key_values], position_ids, counts)

    def step(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        position_ids: torch.Tensor,
        cache: DraftCache,
        embeddings: SharedEmbeddings | None = None,
    ) -> torch.Tensor:
        """
        One step of a draft.

        Args:
            token_ids: The anchor at the first step, the previous draft at later ones, `[B]`.
            states: The fused state before the anchor at the first step, what the previous step handed on later, `[B, D]`.
            position_ids: Absolute positions of the states, `[B]`.
            cache: The context and the earlier steps of this draft; set its `num_steps` to 0 before the first step.
            embeddings: What to embed with; the last bound by default.

        Returns:
            The state from which the next token is predicted, before the final norm, `[B, D]`.
        """
        embedded = (embeddings or self.bind()).embed(token_ids[:, None], like=self.norm.weight)  # [B, 1, D]
        angles = self.rotary_emb(embedded, position_ids[:, None])
        mask = chain_drafting_mask(cache.lengths, cache.num_steps + 1, states.device)
        mask = as_attention_argument(mask, attention_name(self.config), states.dtype)
        states = self.layers[0](embedded, states[:, None], angles, cache, mask)
        cache.num_steps += 1
        return states[:, 0]

    # ------------------------------------------------------------------ training

    def training_inputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        anchor_positions: torch.Tensor,
        keep_anchors: torch.Tensor,
    ) -> dict[str, Any]:
        """As in [`Drafter`]. Padding comes after every anchor, so that no chain sees it."""
        return {"input_ids": input_ids, "anchor_positions": anchor_positions}

    def forward(
        self,
        input_ids: torch.Tensor,
        anchor_positions: torch.Tensor,
        context_features: torch.Tensor,
        embeddings: SharedEmbeddings | None = None,
        objective: Callable[[Eagle3Drafter, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]] | None = None,
    ) -> DrafterOutput:
        """
        The training-time test of EAGLE-3: from each anchor `block_size` steps, each reading the previous step's state and the
        true token.

        A step sees the fused features of all tokens before its anchor and the earlier steps of the same chain, exactly as
        when drafting. Chains do not see each other, so training on a subset of the anchors gives each the same result as
        training on all positions.

        Args:
            input_ids: `[B, T]`.
            anchor_positions: Index of each anchor in its row, from 1 on, `[B, A]`.
            context_features: Tapped hidden states, `[B, T, m * D_target]`.
            embeddings: What to embed with; the last bound by default.
            objective: Called with the drafter and the hidden states, inside this forward so that sharded parameters are
                gathered; returns the loss and a dictionary of metrics.

        Returns:
            Normed hidden states `[B, A * block_size, D]`, `block_size` per anchor; the `j`-th predicts draft `j`.
        """
        embeddings = embeddings or self.bind()
        layer, length = self.layers[0], input_ids.shape[1]
        fused = self.project_context(context_features)  # [B, T, D]
        embedded = embeddings.embed(input_ids, like=self.norm.weight)
        positions = torch.arange(length, device=fused.device)[None]
        following = embedded.roll(-1, dims=1)  # The last token gets a wrong successor, but no anchor comes after it.
        context = layer.key_values(following, fused, self.rotary_emb(fused, positions))

        starts = (anchor_positions - 1).clamp_min(0)  # [B, A]
        states, steps = _at(fused, starts), []
        for step in range(self.config.block_size):
            tokens = _at(embedded, (anchor_positions + step).clamp_max(length - 1))
            angles = self.rotary_emb(states, starts + step)
            mask = chain_training_mask(starts, length, step + 1)
            mask = as_attention_argument(mask, attention_name(self.config), states.dtype)
            steps.append(layer(tokens, states, angles, context, mask))
            own = layer.key_values(tokens, states, angles)
            context = torch.cat([context[0], own[0]], dim=2), torch.cat([context[1], own[1]], dim=2)
            states = self.handed_on(steps[-1])
        hidden_states = self.norm(torch.stack(steps, dim=2).flatten(1, 2))  # [B, A * G, D]
        if objective is None:
            return DrafterOutput(last_hidden_state=hidden_states)
        loss, metrics = objective(self, hidden_states)
        return DrafterOutput(loss=loss, last_hidden_state=hidden_states, metrics=metrics)


def _at(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """`values` `[B, T, D]` at `indices` `[B, A]` -> `[B, A, D]`."""
    return values[torch.arange(len(values), device=values.device)[:, None], indices]
