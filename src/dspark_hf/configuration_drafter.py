"""What the configuration of every drafter holds, and the checks that apply to all kinds.

`DrafterConfig` describes how a drafter relates to its target: which target layers it reads, its vocabulary, how many tokens it
drafts per round. `DecoderDrafterConfig` adds the sizes and options of the decoder layers in `layers.py`, for kinds of drafter
that are built from them. The fields of a single kind are in its configuration in `kinds/`.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, get_origin, get_type_hints

from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .target_config import (
    decoder_config,
    first_layer,
    logit_softcap,
    max_length,
    mlp_width,
    num_decoder_layers,
    optional_field,
    rope_theta,
)

# The default of fields that `_fill_in` replaces by a value when they are left out, so readers never see `None`.
FILLED_IN: Any = None

ATTENTION_GATES = (None, "head", "element", "query")


class DrafterConfig(PreTrainedConfig):
    r"""
    The configuration fields that every drafter has.

    Args:
        target_layer_ids (`list[int]`):
            Tapped target layers, strictly increasing. Id `i` means the OUTPUT of decoder layer `i`, which is
            `hidden_states[i + 1]` in transformers; `-1` means the embedding output.
        tap_before_norm (`bool`):
            Where the target's last layer is tapped, its output is read before the final norm, as serving engines read it.
            Otherwise after it, as transformers gives it.
        target_hidden_size (`int`, *optional*): Width of the target's hidden states; `hidden_size` when `None`.
        num_target_layers (`int`, *optional*): Decoder layers of the target the drafter was made for.
        target_name_or_path (`str`, *optional*): The target the drafter was made for, for messages and model cards.
        block_size (`int`): Tokens drafted per round.
        draft_vocab_size (`int`, *optional*):
            Size of a reduced draft vocabulary; the ids are in the buffer `draft_token_ids`. `None`: the full one.
        has_embed_tokens, has_lm_head (`bool`):
            Whether the checkpoint contains an embedding and an LM head; otherwise the target's are used, by reference.
        embedding_scale (`float`): Factor on the embedding rows (Gemma: the square root of `hidden_size`).
        raw_embeddings (`bool`):
            Read the rows of the target's embedding as they are stored, without the norm that its module applies (Muse).
        logit_scale (`float`): Factor on the base logits, before the soft cap.
        final_logit_softcapping (`float`, *optional*): Soft cap on the base logits, before the transition bias.
        fc_norm (`bool`): A norm over each tap before they are projected together.
        confidence_temperatures (`list[float]`, *optional*):
            Calibration: the confidence logit of draft `k` is divided by entry `k`. `None`: not calibrated.

    The remaining arguments have their usual transformers meaning.

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    # The largest value that each size may have, far above any real drafter. A damaged file with a larger one would fill the
    # memory or run for hours before another check could find the problem.
    largest: ClassVar[dict[str, int]] = {
        "num_hidden_layers": 1024,
        "block_size": 4096,
        "hidden_size": 2**20,
        "target_hidden_size": 2**20,
        "vocab_size": 2**24,
        "draft_vocab_size": 2**24,
    }
    # These may be too small at first: `check` reports that, and nothing is computed from them before.
    checked_later: ClassVar[tuple[str, ...]] = ("block_size", "draft_vocab_size")
    # The names by which `dspark-hf train --kind` makes such a drafter, each with the fields that it sets.
    presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # The public formats that such a drafter can be exported to, keys of `checkpoints.EXPORT_FORMATS`.
    export_formats: ClassVar[tuple[str, ...]] = ()
    # Whether some weights are in float32 whatever the dtype of the others.
    has_float32_weights: ClassVar[bool] = False
    # Index of the first token of a training text that can be the anchor of a draft.
    first_anchor: ClassVar[int] = 0

    hidden_size: int = 2560
    num_hidden_layers: int = 1
    rms_norm_eps: float = 1e-6
    vocab_size: int = 151936
    max_position_embeddings: int = 40960
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    embedding_scale: float = 1.0
    raw_embeddings: bool = False
    logit_scale: float = 1.0
    final_logit_softcapping: float | None = None

    target_layer_ids: list[int] = FILLED_IN
    tap_before_norm: bool = False
    target_hidden_size: int = FILLED_IN
    num_target_layers: int | None = None
    target_name_or_path: str | None = None
    block_size: int = 7
    draft_vocab_size: int | None = None
    has_embed_tokens: bool = False
    has_lm_head: bool = False
    fc_norm: bool = False
    confidence_temperatures: list[float] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._check_sizes()
        self._fill_in()
        super().__post_init__(**kwargs)
        # transformers builds a configuration without arguments to find the defaults. It describes no drafter, so is not checked.
        if self.num_taps:
            self.check()

    def _fill_in(self) -> None:
        """Fills in fields that were left out, from the values of others."""
        if self.target_layer_ids is None:
            self.target_layer_ids = []
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size

    # ------------------------------------------------------------------ derived

    @property
    def method(self) -> str:
        """What this kind of drafter is called, in words."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its kind of drafter is called.")

    @property
    def gives_confidence(self) -> bool:
        """Whether the drafter predicts for each draft how likely it is to be accepted."""
        return False

    @property
    def num_draft_tokens(self) -> int:
        """The most tokens that are drafted in one round."""
        return self.block_size

    @property
    def logits_size(self) -> int:
        """Width of the draft logits: the draft vocabulary when there is one, the full vocabulary otherwise."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_taps(self) -> int:
        """How many target layers feed the drafter."""
        return len(self.target_layer_ids or [])

    def taps_for(self, num_target_layers: int) -> list[int]:
        """The tapped layers of a target with so many layers. For most kinds the configuration names them."""
        return self.target_layer_ids

    def settle_taps(self, num_target_layers: int) -> None:
        """Sets what of the taps is only known with the target's depth."""
        self.target_layer_ids = self.taps_for(num_target_layers)
        if self.num_target_layers is None or self.tap_before_norm:
            self.num_target_layers = num_target_layers

    @property
    def hidden_state_indices(self) -> list[int]:
        """
        The tapped layers as indices into transformers' `hidden_states` (entry 0 is the embedding output). The last layer's output
        before the final norm is entry `num_target_layers + 1`, see [`~dspark_hf.tapping.Tap`].

        Raises:
            ValueError: when they follow from a target that is not known yet.
        """
        if not self.target_layer_ids:
            raise ValueError(
                "Which target layers feed this drafter follows from its target's depth: call drafter.bind(target) first."
            )
        indices = [layer_id + 1 for layer_id in self.target_layer_ids]
        return [*indices[:-1], indices[-1] + 1] if self.taps_unnormed_state else indices

    @property
    def taps_unnormed_state(self) -> bool:
        """Whether the target's last layer is tapped, and before the final norm. Only known with the target's depth."""
        ids, depth = self.target_layer_ids or [], self.num_target_layers
        return self.tap_before_norm and depth is not None and depth - 1 in ids

    def describe(self) -> dict[str, str]:
        """A description of the drafter in words, by topic: for `dspark-hf inspect` and the model card."""
        vocabulary = f"{self.vocab_size:,} tokens"
        if self.draft_vocab_size:
            vocabulary += f", drafts from {self.draft_vocab_size:,} of them"
        return {
            "layers": f"{self.num_hidden_layers}, hidden size {self.hidden_size}",
            "drafts": f"up to {self.num_draft_tokens} per round",
            "taps": self._taps_in_words(),
            "heads": "none",
            "vocabulary": vocabulary,
        }

    def _taps_in_words(self) -> str:
        target_layers = f"of {self.num_target_layers}" if self.num_target_layers else "of an unknown number"
        entries = [layer_id + 1 for layer_id in self.target_layer_ids]
        last = ", the last before the final norm" if self.taps_unnormed_state else ""
        return f"outputs of layers {self.target_layer_ids} {target_layers} = hidden_states{entries}{last}"

    @classmethod
    def own_fields(cls) -> dict[str, Any]:
        """The fields that this package adds to those of `PreTrainedConfig`, each with its type."""
        found: dict[str, Any] = {}
        for part in reversed(cls.__mro__):
            if issubclass(part, DrafterConfig):
                bare = type("Bare", (), {"__annotations__": vars(part).get("__annotations__", {})})
                found |= get_type_hints(bare, vars(sys.modules[part.__module__]))
        fields = {name: kind for name, kind in found.items() if get_origin(kind) is not ClassVar}
        return {name: kind | None if getattr(cls, name) is None else kind for name, kind in fields.items()}

    def named(self, names: Iterable[str]) -> dict[str, Any]:
        """The values of some fields by their names."""
        return {name: getattr(self, name) for name in names}

    def changed(self, **changes: Any) -> Any:
        """A copy with some fields changed; fields derived from those are derived again, and the calibration is dropped."""
        return type(self)(**(self.to_dict() | {"confidence_temperatures": None} | changes))

    # ------------------------------------------------------------------ checks

    def _check_sizes(self) -> None:
        """Checks that each size is a whole number in a sane range, before any of them is used."""
        wrong = [
            f"{name}={size!r}"
            for name, size in self.named(self.largest).items()
            if size is not None
            and not (type(size) is int and size <= self.largest[name] and (size > 0 or name in self.checked_later))
        ]
        if not all(type(layer_id) is int for layer_id in self.target_layer_ids or []):
            wrong.append(f"target_layer_ids={self.target_layer_ids!r}")
        if wrong:
            raise ValueError(f"Not sizes a drafter can have: {', '.join(wrong)}.")

    def check(self) -> None:
        """Raises one `ValueError` that lists every contradiction between the fields."""
        if not self.num_taps:
            raise ValueError("target_layer_ids is empty: nothing says which target layers feed the drafter.")
        problems = list(self._problems())
        if problems:
            raise ValueError("This drafter configuration cannot work:\n" + "\n".join(f"- {p}" for p in problems))

    def _problems(self) -> Iterator[str]:
        ids = self.target_layer_ids or []
        if any(b <= a for a, b in zip(ids, ids[1:], strict=False)):
            yield f"target_layer_ids must be strictly increasing, got {ids}."
        if ids and min(ids) < -1:
            yield f"target_layer_ids starts at -1 (the embedding output), got {ids}."
        if ids and self.num_target_layers is not None and max(ids) >= self.num_target_layers:
            yield f"target_layer_ids {ids} taps layer {max(ids)}, but the target has {self.num_target_layers} layers."
        if self.block_size < 1:
            yield f"block_size={self.block_size} drafts nothing."
        if (temperatures := self.confidence_temperatures) is not None and (
            len(temperatures) != self.num_draft_tokens or min(temperatures, default=0.0) <= 0
        ):
            yield (
                f"confidence_temperatures must be one positive number for each of the {self.num_draft_tokens} drafts of a block, "
                f"got {temperatures}."
            )
        if not is_positive(self.rms_norm_eps):
            yield f"rms_norm_eps must be a positive number, got {self.rms_norm_eps!r}."
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            yield f"draft_vocab_size={self.draft_vocab_size} does not fit a vocabulary of {self.vocab_size}."

    # ------------------------------------------------------------------ construction

    @classmethod
    def for_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        block_size: int = 7,
        target_layer_ids: list[int] | None = None,
        tokenizer: Any = None,
        **overrides: Any,
    ) -> Any:
        """
        A sensible drafter configuration for a decoder-only target.

        Widths and vocabulary are the target's; taps are spread evenly from the second layer to the fourth from last (paper
        section 6); every other field can be given in `overrides`.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration (the text part of a multimodal one is used).
            block_size (`int`): Tokens drafted per round.
            target_layer_ids (`list[int]`, *optional*): Tapped layers; five evenly spread ones by default.
            tokenizer (*optional*): The target's, for kinds that need a token that no text produces.

        Raises:
            ValueError: when the target is an encoder-decoder, a field does not exist, or fields contradict each other.
        """
        text = decoder_config(target_config)
        if unknown := sorted(overrides.keys() - {field.name for field in dataclasses.fields(cls)}):
            raise ValueError(f"{cls.__name__} has no {', '.join(unknown)}.")
        if target_layer_ids is None:
            target_layer_ids = spread_layer_ids(num_decoder_layers(text))
        fields = cls._fields_of_target(text) | {
            "target_name_or_path": target_config.name_or_path or None,
            "block_size": block_size,
            "target_layer_ids": list(target_layer_ids),
        }
        return cls(**(fields | overrides))

    @classmethod
    def _fields_of_target(cls, text: PreTrainedConfig) -> dict[str, Any]:
        """The fields that follow from the target's (text) configuration."""
        return {
            "hidden_size": text.hidden_size,
            "rms_norm_eps": optional_field(text, "rms_norm_eps", "layer_norm_epsilon") or 1e-6,
            "vocab_size": text.vocab_size,
            "max_position_embeddings": max_length(text) or 4096,
            "eos_token_id": optional_field(text, "eos_token_id"),
            "bos_token_id": optional_field(text, "bos_token_id"),
            "pad_token_id": optional_field(text, "pad_token_id"),
            "embedding_scale": text.hidden_size**0.5 if "gemma" in text.model_type else 1.0,
            "final_logit_softcapping": logit_softcap(text),
            "target_hidden_size": text.hidden_size,
            "num_target_layers": num_decoder_layers(text),
        }


class DecoderDrafterConfig(DrafterConfig):
    r"""
    A drafter made of the decoder layers in `layers.py`, whose family (Qwen3, Llama, ...) is a set of options here and never
    a copy of a model file.

    Args:
        qk_norm, v_norm (`bool`): RMSNorm on queries and keys; scale-free RMSNorm on values.
        attention_k_eq_v (`bool`): Values are the un-rotated keys (there is no `v_proj`).
        attention_scaling (`float`, *optional*): Factor on the attention scores; `head_dim ** -0.5` when `None`.
        rotary_interleaved (`bool`): RoPE rotates pairs of neighbouring channels instead of pairing the two halves (LFM2).
        attention_sinks (`bool`): Each head has one more logit in its softmax, whose share of the weight goes to no token.
        value_scale (`float`): Factor on the attention values (MiMo).
        attention_gate (`str`, *optional*):
            The attention's output is multiplied by gates: softplus of a projection of the layer's input, one for each head
            (`"head"`, Laguna) or channel (`"element"`), or the sigmoid of a second half of the query projection (`"query"`,
            Qwen3.5).

    The remaining arguments are those of [`DrafterConfig`] or have their usual transformers meaning.
    """

    largest: ClassVar[dict[str, int]] = DrafterConfig.largest | {
        "num_attention_heads": 2**16,
        "num_key_value_heads": 2**16,
        "head_dim": 2**16,
        "intermediate_size": 2**22,
    }
    # The fields in which the families of decoder layers differ.
    layer_families: ClassVar[dict[str, dict[str, Any]]] = {"qwen3": {"qk_norm": True}, "llama": {"qk_norm": False}}

    intermediate_size: int = 9728
    num_attention_heads: int = 32
    num_key_value_heads: int = FILLED_IN
    head_dim: int = FILLED_IN
    hidden_act: str = "silu"
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    rope_parameters: dict[str, Any] = FILLED_IN

    qk_norm: bool = True
    v_norm: bool = False
    attention_k_eq_v: bool = False
    attention_scaling: float | None = None
    rotary_interleaved: bool = False
    attention_sinks: bool = False
    value_scale: float = 1.0
    attention_gate: str | None = None

    def _fill_in(self) -> None:
        super()._fill_in()
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads

    @property
    def layer_family(self) -> str | None:
        """The entry of `layer_families` with these options; `None` when no family matches."""
        options = {name for family in self.layer_families.values() for name in family}
        ours = self.named(options)
        defaults = {field.name: field.default for field in dataclasses.fields(self) if field.name in options}
        family = next((name for name, family in self.layer_families.items() if ours == defaults | family), None)
        odd = self.mlp_bias or self.attention_gate or (self.attention_k_eq_v and family != "gemma4")
        return None if odd else family

    def describe(self) -> dict[str, str]:
        family = self.layer_family or "of no known model family"
        layers = (
            f"{self.num_hidden_layers} ({family}), hidden size {self.hidden_size}, "
            f"{self.num_attention_heads}/{self.num_key_value_heads} heads of {self.head_dim}, MLP {self.intermediate_size}"
        )
        return super().describe() | {"layers": layers}

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        rope = self.rope_parameters or {}
        if (rope_type := rope.get("rope_type")) not in ("default", *ROPE_INIT_FUNCTIONS):
            yield f"rope_type must be one of {['default', *ROPE_INIT_FUNCTIONS]}, got {rope_type!r}."
        if not is_positive(theta := rope.get("rope_theta")):
            yield f"rope_theta must be a positive number, got {theta!r}."
        if not isinstance(self.hidden_act, str) or self.hidden_act not in ACT2FN:
            yield f"hidden_act={self.hidden_act!r} is not an activation of transformers."
        if self.attention_gate not in ATTENTION_GATES:
            yield f"attention_gate must be one of {ATTENTION_GATES}, got {self.attention_gate!r}."
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            yield (
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}."
            )

    @classmethod
    def _fields_of_target(cls, text: PreTrainedConfig) -> dict[str, Any]:
        # The target's layers may differ in width (Gemma 4); the draft layers take the widths of the first.
        layer = first_layer(text)
        # Targets without attention (Mamba) have no heads to take over.
        heads = optional_field(layer, "num_attention_heads") or max(1, text.hidden_size // 64)
        return super()._fields_of_target(text) | {
            "intermediate_size": mlp_width(layer),
            "num_attention_heads": heads,
            "num_key_value_heads": optional_field(layer, "num_key_value_heads") or heads,
            "head_dim": optional_field(layer, "head_dim") or text.hidden_size // heads,
            "hidden_act": optional_field(text, "hidden_act", "hidden_activation") or "silu",
            "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta(text)},
        }


def spread_layer_ids(num_target_layers: int, num_taps: int = 5) -> list[int]:
    """
    Evenly spread tapped layers, from layer 1 to the fourth from last; fewer for a target with few layers.

    This gives the ids of the released drafters: 1, 9, 17, 25, 33 for 36 layers and 1, 10, 19, 28, 37 for 40.
    """
    last = max(num_target_layers - 3, 0)
    first = min(1, last)
    num_taps = min(num_taps, last - first + 1)
    if num_taps == 1:
        return [last]
    ids = [first + (last - first) * i / (num_taps - 1) for i in range(num_taps)]
    return [int(layer_id + 0.5) for layer_id in ids]


def is_positive(value: Any) -> bool:
    """Whether a value is a finite number above 0."""
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
