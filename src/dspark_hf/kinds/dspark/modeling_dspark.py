"""The DSpark drafter: a parallel backbone over context features, a sequential head and a confidence head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer

from ...context_projection import ContextProjection
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
from ...masks import anchor_mask, anchor_mask_mod, as_attention_argument, drafting_mask
from ...modeling_drafter import DrafterOutput
from ...transformers_names import attention_name
from .configuration_dspark import DSparkConfig
from .heads import ConfidenceHead, SequentialHead


class DSparkDecoderLayer(GradientCheckpointingLayer):
    """A decoder layer over block states, with context keys and values injected into its attention."""

    layer_scalar: torch.Tensor

    def __init__(self, config: DSparkConfig, layer_idx: int):
        super().__init__()
        self.config = config
        self.self_attn = DSparkAttention(config, layer_idx)
        self.mlp = DSparkMLP(config)
        self.input_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.sandwich_norms:
            self.pre_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
            self.post_feedforward_layernorm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.layer_scalar:
            self.register_buffer("layer_scalar", torch.ones(1))

    def key_values(self, context: torch.Tensor, angles: RotaryAngles) -> KeyValues:
        """Keys and values `[B, H_kv, T, head_dim]` of projected context `[B, T, D]`."""
        return self.self_attn.key_values(self.input_layernorm(context) if self.config.norm_context else context, angles)

    def forward(
        self,
        hidden_states: torch.Tensor,
        angles: RotaryAngles,
        context: KeyValues | DraftCache | None,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Block states `[B, Q, D]` -> block states `[B, Q, D]`; arguments as in [`DSparkAttention`]."""
        attended = self.self_attn(self.input_layernorm(hidden_states), angles, context, attention_mask)
        if self.config.sandwich_norms:
            hidden_states = hidden_states + self.post_attention_layernorm(attended)
            transformed = self.mlp(self.pre_feedforward_layernorm(hidden_states))
            hidden_states = hidden_states + self.post_feedforward_layernorm(transformed)
        else:
            hidden_states = hidden_states + attended
            hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        if self.config.layer_scalar:
            hidden_states = hidden_states * self.layer_scalar
        return hidden_states


class DSparkDrafter(Drafter):
    """
    Drafts a block of tokens for a target model from the target's hidden states (paper section 3).

    ```python
    >>> import dspark_hf
    >>> from transformers import AutoModelForCausalLM
    >>> target = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-4B", dtype="auto")  # doctest: +SKIP
    >>> drafter = dspark_hf.DSparkDrafter.from_pretrained("deepseek-ai/dspark_qwen3_4b_block7")  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
    ```

    Its `generation_config` holds transformers' settings for assisted generation: `num_assistant_tokens` (drafts per
    round) and `assistant_confidence_threshold` (drafting stops at the first slot below this confidence).
    """

    config_class = DSparkConfig
    config: DSparkConfig
    _no_split_modules = ["DSparkDecoderLayer"]

    # What a derived kind may replace: made of the configuration, a layer of its index too.
    layer_class: ClassVar[type[nn.Module]] = DSparkDecoderLayer
    rotary_class: ClassVar[type[nn.Module]] = DSparkRotaryEmbedding

    layers: Sequence[DSparkDecoderLayer]

    markov_head: SequentialHead | None
    confidence_head: ConfidenceHead | None
    mask_embedding: nn.Parameter | None

    training_attention: ClassVar[str | None] = "flex_attention"

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        tap_norms = (config.num_taps, config.target_hidden_size, config.rms_norm_eps)
        self.fc_norm = TapNorms(*tap_norms) if config.fc_norm else None
        self.fc = nn.Linear(config.num_taps * config.target_hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.make_layers(config)
        self.norm = DSparkRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.markov_head = SequentialHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        self.mask_embedding = nn.Parameter(torch.zeros(config.hidden_size)) if config.has_mask_embedding else None
        self.post_init()

    def make_layers(self, config: DSparkConfig) -> None:
        """Sets the modules between the projection of the context and the final norm."""
        layers = (self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)  # type: ignore[assignment]
        self.rotary_emb = self.rotary_class(config)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkDecoderLayer) and module.config.layer_scalar:
            init.ones_(module.layer_scalar)
        if module is self and self.mask_embedding is not None:
            init.normal_(self.mask_embedding, std=self.config.initializer_range)

    # ------------------------------------------------------------------ heads

    @property
    def heads(self) -> dict[str, nn.Module]:
        present = {"markov_head": self.markov_head, "confidence_head": self.confidence_head}
        return {name: head for name, head in present.items() if head is not None}

    def sequential_features(self, previous_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """`f_k` of the sequential head, `[..., G, r]`; see [`SequentialHead`]."""
        return None if self.markov_head is None else self.markov_head.features(previous_ids, hidden_states)

    def sequential_parameters(self) -> tuple[nn.Parameter, ...]:
        return () if self.markov_head is None else tuple(self.markov_head.markov_w2.parameters())

    def draft_logits(
        self, hidden_states: torch.Tensor, features: torch.Tensor | None, embeddings: SharedEmbeddings
    ) -> torch.Tensor:
        """Base logits, soft-capped if configured, plus the transition bias, which is never soft-capped."""
        logits = self.base_logits(hidden_states, embeddings)
        if features is None:
            return logits
        assert self.markov_head is not None, "features come from it"
        return logits + self.markov_head.markov_w2(features)

    def confidence_logits(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        assert self.confidence_head is not None, "asked for where the configuration gives confidences"
        embedded = None
        if self.config.confidence_head_with_markov:
            assert self.markov_head is not None
            embedded = self.markov_head.markov_w1(previous_ids)
        return self.confidence_head(hidden_states, embedded)

    def start_neutral(self, new: set[str]) -> None:
        """The transition bias of a new sequential head is zero."""
        if self.markov_head is not None and "markov_head.markov_w2.weight" in new:
            nn.init.zeros_(self.markov_head.markov_w2.weight)

    def beyond_dflash(self, heads_elsewhere: bool = False) -> list[str]:
        config = self.config
        layers = {
            "sliding layers": "sliding_attention" in config.layer_types,
            "causal layers": any(map(config.layer_is_causal, range(config.num_hidden_layers))),
            "a learned vector at masked slots": config.has_mask_embedding,
            "gates or norms of its own": bool(config.attention_gate) or config.fc_norm or config.norm_context,
        }
        logits = {
            "a sequential head": self.markov_head is not None,
            "a draft vocabulary": bool(config.draft_vocab_size),
            "a separate LM head": config.has_lm_head,
            "scaled or capped logits": bool(config.final_logit_softcapping) or config.logit_scale != 1.0,
        }
        return [reason for reason, holds in (layers if heads_elsewhere else layers | logits).items() if holds]

    # ------------------------------------------------------------------ backbone

    def project_context(self, context_features: torch.Tensor) -> torch.Tensor:
        """`H_ctx` `[B, T, D]` from the concatenated tapped hidden states `[B, T, m * D_target]`."""
        features = context_features.to(self.fc.weight.dtype)
        return self.hidden_norm(self.fc(features if self.fc_norm is None else self.fc_norm(features)))

    def extend_cache(
        self,
        cache: DraftCache,
        context_features: torch.Tensor,
        position_ids: torch.Tensor,
        counts: list[int] | None = None,
        projection: ContextProjection | None = None,
    ) -> None:
        """
        Projects new context features once and keeps their keys and values.

        Args:
            cache: The cache to extend.
            context_features: Tapped hidden states of tokens the target has accepted, `[B, T, m * D_target]`.
            position_ids: Their absolute positions, `[B, T]`.
            counts: How many of the `T` belong to each row; all by default.
            projection: That of [`~DSparkDrafter.context_projection`], which takes fewer operations than the layers one by one.
        """
        context = self.project_context(context_features)
        angles = self.rotary_emb(context, position_ids)
        if projection is not None:
            cache.append_stacked(*projection(context, angles), position_ids, counts)
            return
        cache.append([layer.key_values(context, angles) for layer in self.layers], position_ids, counts)

    def context_projection(self) -> ContextProjection | None:
        """As in [`Drafter`]; `None` where the projections are not plain linear maps."""
        return None if self.config.norm_context else ContextProjection.of([layer.self_attn for layer in self.layers])

    def forward(
        self,
        block_ids: torch.Tensor,
        position_ids: torch.Tensor,
        context_features: torch.Tensor | None = None,
        context_position_ids: torch.Tensor | None = None,
        attention_mask: Any = None,
        draft_cache: DraftCache | None = None,
        embeddings: SharedEmbeddings | None = None,
        objective: Callable[[DSparkDrafter, torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]] | None = None,
    ) -> DrafterOutput:
        """
        One parallel pass over block slots.

        Args:
            block_ids: `[anchor, MASK, ..., MASK]` of every block, `[B, Q]` with `Q` a multiple of the block size.
            position_ids: Absolute positions of the slots, `[B, Q]`: slot `k` of a block is at the anchor's position `+ k`.
            context_features: Tapped hidden states, `[B, T, m * D_target]`, when no `draft_cache` holds them.
            context_position_ids: Their absolute positions, `[B, T]`; `0..T-1` by default.
            attention_mask: Boolean mask `[B, 1, Q, T + Q]` (True = keep), a `BlockMask`, or one of either per layer
                type in a dictionary. By default each slot sees all context and its block.
            draft_cache: Context projected in earlier rounds; see [`~DSparkDrafter.extend_cache`].
            embeddings: What to embed with; the last bound by default.
            objective: Called with the drafter and the hidden states, inside this forward so that sharded parameters
                are gathered; returns the loss and a dictionary of metrics.
        """
        embeddings = embeddings or self.bind()
        hidden_states = embeddings.embed(block_ids, like=self.norm.weight)  # [B, Q, D]
        if self.mask_embedding is not None:
            assert self.config.mask_token_id is not None
            masked = block_ids.to(hidden_states.device) == self.config.mask_token_id
            hidden_states = torch.where(masked[..., None], self.mask_embedding, hidden_states)
        angles = self.rotary_emb(hidden_states, position_ids)
        contexts: Sequence[KeyValues | DraftCache | None] = [draft_cache] * len(self.layers)
        if context_features is not None:
            contexts = self._context_key_values(context_features, context_position_ids)
        masks = self.attention_arguments(attention_mask, position_ids, draft_cache, hidden_states.dtype)
        hidden_states = self.backbone(hidden_states, angles, contexts, masks)
        if objective is None:
            return DrafterOutput(last_hidden_state=hidden_states)
        loss, metrics = objective(self, hidden_states)
        return DrafterOutput(loss=loss, last_hidden_state=hidden_states, metrics=metrics)

    def backbone(
        self,
        hidden_states: torch.Tensor,
        angles: RotaryAngles,
        contexts: Sequence[KeyValues | DraftCache | None],
        masks: Sequence[Any],
    ) -> torch.Tensor:
        """From embedded slots to what the heads read, both `[B, Q, D]`; context and attention argument of each layer."""
        for layer, context, mask in zip(self.layers, contexts, masks, strict=True):
            hidden_states = layer(hidden_states, angles, context, mask)
        return self.norm(hidden_states)

    def training_inputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        anchor_positions: torch.Tensor,
        keep_anchors: torch.Tensor,
    ) -> dict[str, Any]:
        """As in [`Drafter`]: the blocks of all anchors side by side, with a mask that hides them from each other."""
        return {
            **self.block_inputs(input_ids, anchor_positions),
            "attention_mask": self.training_masks(attention_mask, anchor_positions, keep_anchors),
        }

    def block_inputs(self, input_ids: torch.Tensor, anchor_positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """
        The blocks `[anchor, MASK, ..., MASK]` of all anchors and their positions.

        Args:
            input_ids: `[B, T]`.
            anchor_positions: Index of each anchor in its row, `[B, A]`.

        Returns:
            `block_ids` and `position_ids`, `[B, A * G]`.
        """
        slots = torch.arange(self.config.block_size, device=input_ids.device)
        anchor_ids = input_ids.gather(1, anchor_positions)[..., None]  # [B, A, 1]
        mask_id = self.config.mask_token_id if self.config.mask_token_id is not None else 0
        block_ids = torch.where(slots == 0, anchor_ids, mask_id)  # [B, A, G]
        position_ids = anchor_positions[..., None] + slots
        return {"block_ids": block_ids.flatten(1), "position_ids": position_ids.flatten(1)}

    def training_masks(
        self, attention_mask: torch.Tensor, anchor_positions: torch.Tensor, keep_anchors: torch.Tensor
    ) -> dict[str, Any]:
        """The attention mask of each layer type: dense, or a `BlockMask` if the drafter uses `flex_attention`."""
        masks: dict[str, Any] = {}
        attention_mask = attention_mask.bool()
        size = self.config.block_size
        for layer_idx, layer_type in enumerate(self.config.layer_types):
            if layer_type in masks:
                continue
            window, causal = self.config.layer_window(layer_idx), self.config.layer_is_causal(layer_idx)
            rule = (anchor_positions, keep_anchors, attention_mask, size, window, causal)
            if attention_name(self.config) == "flex_attention":
                from torch.nn.attention.flex_attention import create_block_mask

                (batch, length), queries = attention_mask.shape, anchor_positions.shape[1] * size
                masks[layer_type] = create_block_mask(
                    anchor_mask_mod(*rule), batch, None, queries, length + queries, device=attention_mask.device
                )
            else:
                masks[layer_type] = anchor_mask(*rule)
        return masks

    def _context_key_values(self, features: torch.Tensor, position_ids: torch.Tensor | None) -> list[KeyValues]:
        context = self.project_context(features)  # [B, T, D]
        if position_ids is None:
            position_ids = torch.arange(context.shape[1], device=context.device)[None]
        angles = self.rotary_emb(context, position_ids)
        return [layer.key_values(context, angles) for layer in self.layers]

    def attention_arguments(
        self, mask: Any, positions: torch.Tensor, cache: DraftCache | None, dtype: torch.dtype
    ) -> list[Any]:
        """
        The attention argument of each layer.

        Args:
            mask: As `forward` takes it.
            positions: Absolute positions of the slots, `[B, Q]`.
            cache: Where the context is, if it is in a cache.
            dtype: Of the states.
        """
        masks: dict[str, Any] = {}
        for layer_idx, layer_type in enumerate(self.config.layer_types):
            if layer_type in masks:
                continue
            layer_mask = mask[layer_type] if isinstance(mask, dict) else mask
            if layer_mask is None and cache is not None:
                key_positions = cache.positions[:, : cache.max_length].to(positions.device)
                window, causal = self.config.layer_window(layer_idx), self.config.layer_is_causal(layer_idx)
                layer_mask = drafting_mask(positions, key_positions, cache.lengths, window, causal)
            masks[layer_type] = as_attention_argument(layer_mask, attention_name(self.config), dtype)
        return [masks[layer_type] for layer_type in self.config.layer_types]
