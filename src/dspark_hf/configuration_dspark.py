"""Everything the weights of a DSpark drafter need to be used, and every check between those fields.

A drafter is described twice over: by its decoder layers, whose family (Qwen3, Llama, Gemma 4, ...) is a set of
options here and never a copy of a model file, and by what makes it a drafter: which target layers feed it, how
its block is laid out, and which heads sit on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SEQUENTIAL_HEADS = ("vanilla", "gated", "rnn")
LAYER_TYPES = ("full_attention", "sliding_attention")

# The largest value a field may have. No drafter comes near; what is above would take the machine's memory or hours
# before anything else could be found wrong with the file it came from.
LARGEST = {
    "num_hidden_layers": 1024,
    "block_size": 4096,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "head_dim": 2**16,
    "hidden_size": 2**20,
    "target_hidden_size": 2**20,
    "intermediate_size": 2**22,
    "markov_rank": 2**20,
    "vocab_size": 2**24,
    "draft_vocab_size": 2**24,
}

# What sets one decoder layer family apart from another, in the options of `DSparkConfig`.
LAYER_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True},
    "llama": {"qk_norm": False},
    "gemma4": {
        "qk_norm": True,
        "v_norm": True,
        "sandwich_norms": True,
        "layer_scalar": True,
        "attention_scaling": 1.0,
    },
}

# Nothing is computed from these before `check` says what is wrong with a value that is too small.
JUDGED_LATER = ("block_size", "markov_rank", "draft_vocab_size")


class DSparkConfig(PreTrainedConfig):
    r"""
    Configuration of a [`DSparkDrafter`]. Most users build it with [`DSparkConfig.for_target`].

    The defaults are those of the released Qwen3 drafters (paper section 6): block of 7, rank 256, 5 layers.

    Args:
        target_layer_ids (`list[int]`):
            Tapped target layers, strictly increasing. Id `i` means the OUTPUT of decoder layer `i`, which is
            `hidden_states[i + 1]` in transformers; `-1` means the embedding output.
        target_hidden_size (`int`, *optional*): Width of the target's hidden states; `hidden_size` when `None`.
        num_target_layers (`int`, *optional*): Decoder layers of the target the drafter was made for.
        target_name_or_path (`str`, *optional*): The target the drafter was made for, for messages and model cards.
        block_size (`int`): Tokens the backbone sees in one pass: the anchor and `block_size - 1` masks.
        mask_token_id (`int`): Token id at the masked slots.
        sample_from_anchor (`bool`):
            `True`: slot 0, the anchor's own, predicts too, so a block gives `block_size` drafts (DeepSpec layout).
            `False`: slot 0 predicts nothing and a block gives `block_size - 1` drafts (z-lab layout).
        is_causal (`bool`, *optional*):
            Whether block slots see only earlier slots. `None`: sliding layers are causal, full layers are not.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced draft vocabulary; the ids are in the buffer `draft_token_ids`. `None`: the full one.
        markov_rank (`int`): Rank `r` of the sequential head; 0 for none (a DFlash drafter).
        markov_head_type (`str`): `"vanilla"`, `"gated"` or `"rnn"`.
        enable_confidence_head (`bool`): Whether a confidence head predicts each slot's acceptance.
        confidence_head_with_markov (`bool`): Whether it also reads the previous token's Markov embedding.
        confidence_temperatures (`list[float]`, *optional*):
            Calibration of the confidence head: what each draft slot's logit is divided by. `None`: not calibrated.
        has_embed_tokens, has_lm_head (`bool`):
            Whether the checkpoint holds its own embedding and LM head; otherwise they are the target's, by reference.
        qk_norm, v_norm (`bool`): RMSNorm on queries and keys; scale-free RMSNorm on values.
        attention_k_eq_v (`bool`): Values are the un-rotated keys (there is no `v_proj`).
        sandwich_norms (`bool`): Norms before and after both attention and MLP (Gemma), instead of before only.
        layer_scalar (`bool`): Each layer ends by multiplying with its stored scalar.
        attention_scaling (`float`, *optional*): Factor on the attention scores; `head_dim ** -0.5` when `None`.
        embedding_scale (`float`): Factor on the embedding rows (Gemma: the square root of `hidden_size`).
        raw_embeddings (`bool`):
            Read the rows of the target's embedding as they are stored, past a norm that its module applies (Muse).
        has_mask_embedding (`bool`): Masked slots start from a vector of the drafter's own (MiMo).
        logit_scale (`float`): Factor on the base logits, before the soft cap.
        final_logit_softcapping (`float`, *optional*): Soft cap on the base logits, before the transition bias.
        rotary_interleaved (`bool`): RoPE turns neighbouring channels instead of one half against the other (LFM2).
        attention_sinks (`bool`): Each head has a logit of its own in the softmax that takes weight to nothing.
        value_scale (`float`): Factor on the attention values (MiMo).
        layer_types (`list[str]`, *optional*): `"full_attention"` or `"sliding_attention"` for each layer.
        sliding_window (`int`, *optional*): A sliding layer sees positions closer than this to the query.

    The remaining arguments have their usual transformers meaning.

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    model_type = "dspark"

    hidden_size: int = 2560
    intermediate_size: int = 9728
    num_hidden_layers: int = 5
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    vocab_size: int = 151936
    max_position_embeddings: int = 40960
    rope_parameters: dict | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    qk_norm: bool = True
    v_norm: bool = False
    attention_k_eq_v: bool = False
    sandwich_norms: bool = False
    layer_scalar: bool = False
    attention_scaling: float | None = None
    embedding_scale: float = 1.0
    raw_embeddings: bool = False
    has_mask_embedding: bool = False
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None
    rotary_interleaved: bool = False
    attention_sinks: bool = False
    value_scale: float = 1.0

    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    target_name_or_path: str | None = None
    block_size: int = 7
    mask_token_id: int | None = None
    sample_from_anchor: bool = True
    is_causal: bool | None = None
    draft_vocab_size: int | None = None
    has_embed_tokens: bool = False
    has_lm_head: bool = False

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: list[float] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_sizes()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = []
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        super().__post_init__(**kwargs)
        # An empty configuration is what transformers builds to find the defaults; it describes no drafter yet.
        if self.target_layer_ids:
            self.check()

    # ------------------------------------------------------------------ derived

    @property
    def num_draft_tokens(self) -> int:
        """Drafts one block gives: `block_size`, or one fewer when the anchor's own slot predicts nothing."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def is_autoregressive(self) -> bool:
        """Whether each draft is computed from the drafter's own state at the one before it, instead of all in parallel."""
        return False

    @property
    def logits_size(self) -> int:
        """Width of the draft logits: the draft vocabulary when there is one, the full vocabulary otherwise."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def hidden_state_indices(self) -> list[int]:
        """The tapped layers as indices into transformers' `hidden_states` (entry 0 is the embedding output)."""
        return [layer_id + 1 for layer_id in self.target_layer_ids or []]

    def layer_is_causal(self, layer_idx: int) -> bool:
        """Whether block slots of this layer see only earlier slots."""
        if self.is_causal is not None:
            return self.is_causal
        return self.layer_types[layer_idx] == "sliding_attention"  # type: ignore[index]

    def layer_window(self, layer_idx: int) -> int | None:
        """The sliding window of this layer in positions, or `None` where it attends to everything."""
        return self.sliding_window if self.layer_types[layer_idx] == "sliding_attention" else None  # type: ignore[index]

    @classmethod
    def needs_mask_token(cls, block_size: int) -> bool:
        """Whether a block of this size has slots other than the anchor's, which need a token of their own."""
        return block_size > 1

    # ------------------------------------------------------------------ checks

    def _check_sizes(self) -> None:
        """Before any size is used, even to repeat a list: each must be a whole number that a drafter can have."""
        wrong = [
            f"{name}={size!r}"
            for name, largest in LARGEST.items()
            if (size := getattr(self, name)) is not None
            and not (type(size) is int and size <= largest and (size > 0 or name in JUDGED_LATER))
        ]
        if not all(type(layer_id) is int for layer_id in self.target_layer_ids or []):
            wrong.append(f"target_layer_ids={self.target_layer_ids!r}")
        if wrong:
            raise ValueError(f"Not sizes a drafter can have: {', '.join(wrong)}.")

    def check(self) -> None:
        """Raises one `ValueError` that lists every contradiction between the fields."""
        problems = list(self._problems())
        if problems:
            raise ValueError("This drafter configuration cannot work:\n" + "\n".join(f"- {p}" for p in problems))

    def _problems(self) -> Iterator[str]:
        ids, layer_types = self.target_layer_ids or [], self.layer_types or []
        if not ids:
            yield "target_layer_ids is empty: nothing says which target layers feed the drafter."
            return
        if any(b <= a for a, b in zip(ids, ids[1:], strict=False)):
            yield f"target_layer_ids must be strictly increasing, got {ids}."
        if min(ids) < -1:
            yield f"target_layer_ids starts at -1 (the embedding output), got {ids}."
        if self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            yield f"target_layer_ids {ids} taps layer {max(ids)}, but the target has {self.num_target_layers} layers."
        if self.block_size < 1 or self.num_draft_tokens < 1:
            yield f"block_size={self.block_size} with sample_from_anchor={self.sample_from_anchor} drafts nothing."
        if self.mask_token_id is None and self.needs_mask_token(self.block_size):
            yield "mask_token_id is missing: the masked slots of a block need a token of their own."
        elif self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            yield f"mask_token_id={self.mask_token_id} is outside the vocabulary of {self.vocab_size} tokens."
        if self.mask_token_id is not None and self.mask_token_id in _as_list(self.eos_token_id):
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
        if (temperatures := self.confidence_temperatures) is not None and (
            len(temperatures) != self.num_draft_tokens or min(temperatures, default=0.0) <= 0
        ):
            yield (
                f"confidence_temperatures must be one positive number for each of the {self.num_draft_tokens} drafts of a block, "
                f"got {temperatures}."
            )
        if len(layer_types) != self.num_hidden_layers:
            yield f"layer_types names {len(layer_types)} layers, num_hidden_layers is {self.num_hidden_layers}."
        if unknown := sorted(set(layer_types) - set(LAYER_TYPES)):
            yield f"layer_types may hold {LAYER_TYPES}, got {unknown}."
        if "sliding_attention" in layer_types and not self.sliding_window:
            yield "layer_types has sliding layers, but sliding_window is not set."
        rope = self.rope_parameters or {}
        if (rope_type := rope.get("rope_type")) not in ("default", *ROPE_INIT_FUNCTIONS):
            yield f"rope_type must be one of {['default', *ROPE_INIT_FUNCTIONS]}, got {rope_type!r}."
        if not _is_positive(theta := rope.get("rope_theta")):
            yield f"rope_theta must be a positive number, got {theta!r}."
        if not _is_positive(self.rms_norm_eps):
            yield f"rms_norm_eps must be a positive number, got {self.rms_norm_eps!r}."
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            yield f"hidden_act={self.hidden_act!r} is not an activation of transformers."
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            yield (
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            yield f"draft_vocab_size={self.draft_vocab_size} does not fit a vocabulary of {self.vocab_size}."

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
        **overrides: Any,
    ) -> DSparkConfig:
        """
        A sensible drafter configuration for a decoder-only target.

        The draft layers take the target's widths, heads, activation and RoPE base; taps are spread evenly from the
        second layer to the fourth from last (paper section 6); every other field can be given in `overrides`.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration (the text part of a multimodal one is used).
            block_size, num_hidden_layers, markov_rank: As in the class.
            target_layer_ids (`list[int]`, *optional*): Tapped layers; five evenly spread ones by default.
            mask_token_id (`int`, *optional*):
                Token at the masked slots. By default the last id of the vocabulary that the tokenizer cannot
                produce, which is known only when the configuration or you say so; see `Raises`.

        Raises:
            ValueError: when the target is an encoder-decoder, or no free token id is known for the mask. Embedding
                rows that the tokenizer does not use are free; so are its reserved or unused special tokens.
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"A DSpark drafter needs a decoder-only target; {type(target_config).__name__} is an encoder-decoder."
            )
        text = target_config.get_text_config(decoder=True)
        if mask_token_id is None and cls.needs_mask_token(block_size):
            mask_token_id = _free_token_id(text)
        if mask_token_id is None and cls.needs_mask_token(block_size):
            raise ValueError(
                f"No free token id is known for {text.model_type!r}: pass mask_token_id=, an id below "
                f"{text.vocab_size} that no text produces (an unused or reserved special token of the tokenizer, "
                "or an embedding row above its last id)."
            )
        if target_layer_ids is None:
            target_layer_ids = spread_layer_ids(text.num_hidden_layers)
        # Layers may differ in their widths (Gemma 4); the draft layers take those of the first.
        layer = text.per_layer_config[0] if getattr(text, "is_heterogeneous", False) else text
        heads = layer.num_attention_heads
        fields: dict[str, Any] = {
            "hidden_size": text.hidden_size,
            "intermediate_size": _first_attr(layer, "intermediate_size", "ffn_dim") or 4 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(layer, "num_key_value_heads", None) or heads,
            "head_dim": getattr(layer, "head_dim", None) or text.hidden_size // heads,
            "hidden_act": _first_attr(text, "hidden_act", "hidden_activation") or "silu",
            "rms_norm_eps": _first_attr(text, "rms_norm_eps", "layer_norm_epsilon") or 1e-6,
            "vocab_size": text.vocab_size,
            "max_position_embeddings": getattr(text, "max_position_embeddings", None) or 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": _rope_theta(text)},
            "eos_token_id": text.eos_token_id,
            "bos_token_id": text.bos_token_id,
            "pad_token_id": text.pad_token_id,
            "embedding_scale": text.hidden_size**0.5 if "gemma" in text.model_type else 1.0,
            "final_logit_softcapping": getattr(text, "final_logit_softcapping", None),
            "target_hidden_size": text.hidden_size,
            "num_target_layers": text.num_hidden_layers,
            "target_name_or_path": target_config.name_or_path or None,
            "num_hidden_layers": num_hidden_layers,
            "block_size": block_size,
            "markov_rank": markov_rank,
            "confidence_head_with_markov": markov_rank > 0,
            "target_layer_ids": list(target_layer_ids),
            "mask_token_id": mask_token_id,
        }
        if not isinstance(fields["intermediate_size"], int):  # Some families give one width per layer.
            fields["intermediate_size"] = max(fields["intermediate_size"])
        return cls(**(fields | overrides))


def spread_layer_ids(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """
    Evenly spread tapped layers, from layer 1 to the fourth from last; fewer where the target is shallow.

    For the released targets this gives the released ids: 36 layers give 1, 9, 17, 25, 33 and 40 give 1, 10, 19, 28, 37.
    """
    last = max(num_target_layers - 3, 0)
    first = min(1, last)
    num_taps = min(num_taps, last - first + 1)
    if num_taps == 1:
        return [last]
    ids = [first + (last - first) * i / (num_taps - 1) for i in range(num_taps)]
    return [int(layer_id + 0.5) for layer_id in ids]


def _free_token_id(text: PreTrainedConfig) -> int | None:
    """A token id no text produces, where one is known for the target's family."""
    known = {"gemma3_text": 4, "gemma4_text": 4, "qwen3": 151669, "qwen3_moe": 151669}
    token_id = getattr(text, "mask_token_id", None) or known.get(text.model_type)
    return token_id if token_id is not None and token_id < text.vocab_size else None


def _rope_theta(text: PreTrainedConfig) -> float:
    """The target's RoPE base, from flat or per-layer-type `rope_parameters`."""
    parameters = getattr(text, "rope_parameters", None) or {}
    for candidate in (parameters, parameters.get("full_attention") or {}):
        if candidate.get("rope_theta"):
            return float(candidate["rope_theta"])
    return float(getattr(text, "rope_theta", None) or 10_000.0)


def _first_attr(config: PreTrainedConfig, *names: str) -> Any:
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]
