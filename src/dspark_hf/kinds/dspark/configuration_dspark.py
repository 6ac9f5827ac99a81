"""The configuration of DSpark drafters: a block of slots that are drafted in parallel, and the heads on top of it.

DFlash drafters are those without heads: `markov_rank` 0 and no confidence head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ...configuration_drafter import FILLED_IN, DecoderDrafterConfig, DrafterConfig
from ...target_config import decoder_config, optional_field

SEQUENTIAL_HEADS = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")


class BlockDrafterConfig(DrafterConfig):
    r"""
    What the drafters have that draft a block of slots in one pass, whatever their layers are: the block and the heads.

    Args:
        block_size (`int`): Tokens the backbone sees in one pass: the anchor and `block_size - 1` masks.
        mask_token_id (`int`): Token id at the masked slots.
        sample_from_anchor (`bool`):
            `True`: the anchor's slot 0 predicts too, so a block gives `block_size` drafts (DeepSpec layout).
            `False`: slot 0 predicts nothing and a block gives `block_size - 1` drafts (z-lab layout).
        has_mask_embedding (`bool`): Masked slots start from a learned vector instead of an embedding row (MiMo).
        markov_rank (`int`): Rank `r` of the sequential head; 0 for none (a DFlash drafter).
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`): Whether a confidence head predicts each slot's acceptance.
        confidence_head_with_markov (`bool`): Whether it also reads the previous token's Markov embedding.

    The remaining arguments are those of [`~dspark_hf.configuration_drafter.DrafterConfig`].

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    largest: ClassVar[dict[str, int]] = DrafterConfig.largest | {"markov_rank": 2**20}
    checked_later: ClassVar[tuple[str, ...]] = (*DrafterConfig.checked_later, "markov_rank")
    # Whether the linear map of the confidence head has a bias.
    confidence_bias: ClassVar[bool] = True

    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    has_mask_embedding: bool = False

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True

    # ------------------------------------------------------------------ derived

    @property
    def method(self) -> str:
        return "DSpark" if self.markov_rank else "DFlash"

    @property
    def gives_confidence(self) -> bool:
        return self.enable_confidence_head

    @property
    def num_draft_tokens(self) -> int:
        """Drafts per block: `block_size`, or one fewer when the anchor's slot predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @classmethod
    def needs_mask_token(cls, block_size: int) -> bool:
        """Whether a block of this size has masked slots, which need a token id."""
        return block_size > 1

    def describe(self) -> dict[str, str]:
        predicts = "predicts" if self.sample_from_anchor else "predicts nothing"
        slots = f"the anchor {predicts}: a block of {self.block_size} gives {self.num_draft_tokens} drafts"
        masks = f"; mask token {self.mask_token_id}" if self.needs_mask_token(self.block_size) else ""
        return super().describe() | {"drafts": slots + masks, "heads": self._heads_in_words()}

    def _heads_in_words(self) -> str:
        head = (
            f"{self.markov_head_type} Markov head of rank {self.markov_rank}" if self.markov_rank else "no Markov head"
        )
        if not self.enable_confidence_head:
            return f"{head}, no confidence head"
        reads = " that reads the Markov embedding" if self.confidence_head_with_markov else ""
        return f"{head}, confidence head{reads}"

    def changed(self, **changes: Any) -> Any:
        """
        As in [`~dspark_hf.configuration_drafter.DrafterConfig`]. Adding a sequential head to a drafter without one also adds a
        confidence head.
        """
        implied: dict[str, Any] = {}
        if changes.get("markov_rank") and not self.markov_rank:
            implied = {"enable_confidence_head": True, "confidence_head_with_markov": True}
        return super().changed(**(implied | changes))

    # ------------------------------------------------------------------ checks

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.block_size >= 1 and self.num_draft_tokens < 1:
            yield f"block_size={self.block_size} with sample_from_anchor={self.sample_from_anchor} drafts nothing."
        if self.mask_token_id is None and self.needs_mask_token(self.block_size):
            yield "mask_token_id is missing: the masked slots of a block need a token id that no text contains."
        elif self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            yield f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens."
        ends = self.eos_token_id if isinstance(self.eos_token_id, list) else [self.eos_token_id]
        if self.mask_token_id is not None and self.mask_token_id in ends:
            yield f"mask_token_id={self.mask_token_id} is also an end-of-sequence token."
        if self.markov_rank < 0:
            yield f"markov_rank must be 0 (no sequential head) or more, got {self.markov_rank}."
        if self.markov_head_type not in SEQUENTIAL_HEADS:
            yield f"markov_head_type must be one of {SEQUENTIAL_HEADS}, got {self.markov_head_type!r}."
        if self.enable_confidence_head and self.confidence_head_with_markov and self.markov_rank == 0:
            yield (
                "confidence_head_with_markov=True reads the Markov embedding, but markov_rank is 0: "
                "set confidence_head_with_markov=False or give a rank."
            )

    # ------------------------------------------------------------------ construction

    @classmethod
    def for_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        block_size: int = 7,
        num_hidden_layers: int = 5,
        markov_rank: int = 256,
        target_layer_ids: list[int] | None = None,
        mask_token_id: int | None = None,
        tokenizer: Any = None,
        **overrides: Any,
    ) -> Any:
        """
        A sensible drafter configuration for a decoder-only target.

        The draft layers take the target's widths, heads, activation and RoPE base; taps are spread evenly from the
        second layer to the fourth from last (paper section 6); every other field can be given in `overrides`.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration (the text part of a multimodal one is used).
            block_size, num_hidden_layers, markov_rank: As in the class.
            target_layer_ids (`list[int]`, *optional*): Tapped layers; five evenly spread ones by default.
            mask_token_id (`int`, *optional*):
                Token id at the masked slots, which no text may contain. By default an embedding row above the tokenizer's
                last id, the id known for the target's family, or a reserved or unused special token of the tokenizer.
            tokenizer (*optional*): The target's. Without it, few families have a mask token that is known.

        Raises:
            ValueError: when the target is an encoder-decoder, or no free token id is known for the mask. Embedding
                rows that the tokenizer does not use are free; so are its reserved or unused special tokens.
        """
        if mask_token_id is None and cls.needs_mask_token(block_size):
            mask_token_id = free_token_id(decoder_config(target_config), tokenizer)
        return super().for_target(
            target_config,
            block_size=block_size,
            target_layer_ids=target_layer_ids,
            num_hidden_layers=num_hidden_layers,
            markov_rank=markov_rank,
            mask_token_id=mask_token_id,
            **({"confidence_head_with_markov": markov_rank > 0} | overrides),
        )


class DSparkConfig(BlockDrafterConfig, DecoderDrafterConfig):
    r"""
    Configuration of a [`DSparkDrafter`]. Most users build it with [`DSparkConfig.for_target`].

    The defaults are those of the released Qwen3 drafters (paper section 6): block of 7, rank 256, 5 layers.

    Args:
        is_causal (`bool`, *optional*):
            Whether block slots see only earlier slots. `None`: sliding layers are causal, full layers are not.
        norm_context (`bool`): A layer's input norm applies to the projected context too, before its keys and values (Laguna).
        sandwich_norms (`bool`): Norms before and after both attention and MLP (Gemma), instead of before only.
        layer_scalar (`bool`): Each layer ends by multiplying with its stored scalar.
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer.
        sliding_window (`int`, *optional*): A sliding layer sees positions closer than this to the query.

    The remaining arguments are those of [`BlockDrafterConfig`], [`~dspark_hf.configuration_drafter.DecoderDrafterConfig`] and
    [`~dspark_hf.configuration_drafter.DrafterConfig`], or have their usual transformers meaning.

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    model_type = "dspark"

    largest: ClassVar[dict[str, int]] = BlockDrafterConfig.largest | DecoderDrafterConfig.largest
    layer_families: ClassVar[dict[str, dict[str, Any]]] = DecoderDrafterConfig.layer_families | {
        "gemma4": {
            "qk_norm": True,
            "v_norm": True,
            "sandwich_norms": True,
            "layer_scalar": True,
            "attention_scaling": 1.0,
        },
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "dspark": {},
        "dflash": {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
    }
    export_formats: ClassVar[tuple[str, ...]] = ("deepspec", "vllm-sglang", "speculators", "modelopt")

    num_hidden_layers: int = 5
    layer_types: list[str] = FILLED_IN
    sliding_window: int | None = None
    norm_context: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False

    is_causal: bool | None = None

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers

    # ------------------------------------------------------------------ derived

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether a block slot of this layer sees only itself and earlier slots."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"

    @property
    def uniformly_causal(self) -> bool | None:
        """Whether all layers are causal (True) or none is (False); `None` where they differ."""
        causal = {self.layer_is_causal(i) for i in range(self.num_hidden_layers)}
        return causal.pop() if len(causal) == 1 else None

    def layer_window(self, layer_idx: int) -> int | None:
        """The sliding window of this layer in positions, or `None` where it attends to everything."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None

    def describe(self) -> dict[str, str]:
        attention = Counter(
            f"{layer_type.removesuffix('_attention')}{' causal' if self.layer_is_causal(i) else ''}"
            for i, layer_type in enumerate(self.layer_types or ())
        )
        window = f", window {self.sliding_window}" if self.sliding_window else ""
        return super().describe() | {
            "attention": ", ".join(f"{count} {layers}" for layers, count in attention.items()) + window,
        }

    # ------------------------------------------------------------------ checks

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        layer_types = self.layer_types or []
        if len(layer_types) != self.num_hidden_layers:
            yield f"layer_types names {len(layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}."
        if unknown := sorted(set(layer_types) - set(LAYER_TYPES)):
            yield f"layer_types may hold {LAYER_TYPES}, got {unknown}."
        if "sliding_attention" in layer_types and not self.sliding_window:
            yield "layer_types has sliding layers, but sliding_window is not set."


def free_token_id(text: PreTrainedConfig, tokenizer: Any = None) -> int:
    """
    A token id that the target never generates.

    Args:
        text: The target's (text) configuration.
        tokenizer: The target's, if there is one.

    Raises:
        ValueError: when no such id is known.
    """
    known = {"deepseek_v4": 128799, "gemma3_text": 4, "gemma4_text": 4, "qwen3": 151669, "qwen3_moe": 151669}
    candidates = [
        None if tokenizer is None else max(tokenizer.get_vocab().values()) + 1,
        optional_field(text, "mask_token_id"),
        known.get(text.model_type),
        None if tokenizer is None else unused_token_id(text, tokenizer),
    ]
    for token_id in candidates:
        if token_id is not None and token_id < text.vocab_size:
            return token_id
    advice = "pass tokenizer=, which may have one, or" if tokenizer is None else "pass"
    raise ValueError(
        f"No free token id is known for {text.model_type!r}: {advice} mask_token_id=, an id below {text.vocab_size} that no text "
        "produces (an unused or reserved special token of the tokenizer, or an embedding row above its last id)."
    )


def unused_token_id(text: PreTrainedConfig, tokenizer: Any) -> int | None:
    """
    A special token that the target is not expected to generate: the mask token, a reserved one, the unknown token where all
    text can be written without it, or else one that has no role and does not occur in the chat template.
    """
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    ends = text.eos_token_id
    roles = {
        tokenizer.bos_token_id,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        *(ends if isinstance(ends, list) else [ends]),
    }
    spoken = str(tokenizer.chat_template or "")
    special = {
        token_id: token.content
        for token_id, token in sorted(tokenizer.added_tokens_decoder.items())
        if token.special and token_id not in roles and token.content not in spoken
    }
    for token_id, content in special.items():
        if any(word in content.lower() for word in ("mask", "reserved", "unused", "placeholder")):
            return token_id
    unknown = tokenizer.unk_token_id
    if unknown in special and "<0x00>" in tokenizer.get_vocab():  # Bytes stand for whatever has no token.
        return int(unknown)
    return next((token_id for token_id in special if token_id != unknown), None)
