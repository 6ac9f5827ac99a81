"""Reads the fields of a drafter's configuration from any public format, whatever their place and spelling.

All formats have the same structure: a copy of a decoder's configuration, with the drafter's fields added at the top level or
in a separate section. A format module supplies what its files leave out; everything else is here.
"""

from __future__ import annotations

from typing import Any

import torch

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .files import TensorInfo

SECTIONS = ("dspark_config", "dflash_config")
PREFIXES = ("", "dspark_")

# Needed to build the decoder layers. With a guessed value, a drafter would load without an error and draft nonsense.
GEOMETRY = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)

# The same name and meaning in every format.
PLAIN = (
    "attention_bias",
    "attention_dropout",
    "mlp_bias",
    "max_position_embeddings",
    "initializer_range",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "dtype",
)

# The fields of the decoder layers that every format writes, under the same names.
DECODER = (
    *GEOMETRY,
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "attention_bias",
    "attention_dropout",
    "max_position_embeddings",
    "initializer_range",
    "layer_types",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


class Fields:
    """Looks a field up in the sections of a raw configuration first, then at its top level."""

    def __init__(self, config: dict[str, Any]):
        self.config = config
        sections = [config.get(section) for section in SECTIONS]
        self._places = [section for section in sections if isinstance(section, dict)] + [config]

    def get(self, *names: str, default: Any = None) -> Any:
        """The first of `names` that is set anywhere, or `default`."""
        spellings = [prefix + name for name in names for prefix in PREFIXES]
        found = (place.get(name) for place in self._places for name in spellings)
        return next((value for value in found if value is not None), default)

    def all(self, name: str) -> list[Any]:
        """The distinct values that a field has in different places."""
        values: list[Any] = []
        for place in self._places:
            if place.get(name) is not None and place[name] not in values:
                values.append(place[name])
        return values


def layer_fields(
    config: dict[str, Any], tensors: dict[str, TensorInfo], layer_options: dict[str, Any]
) -> dict[str, Any]:
    """
    The fields of [`~dspark_hf.configuration_drafter.DecoderDrafterConfig`] that a file has at its top level.

    Args:
        config: The raw `config.json`.
        layer_options: The layer options of the drafter's model family.

    Raises:
        ValueError: when a field that cannot be guessed is missing, or two spellings of one contradict each other.
    """
    if missing := [name for name in GEOMETRY if config.get(name) is None]:
        raise ValueError(f"The drafter's configuration lacks {', '.join(missing)}.")
    fields = Fields(config)
    own: dict[str, Any] = {name: config[name] for name in (*GEOMETRY, *PLAIN) if config.get(name) is not None}
    own |= layer_options
    own |= {
        "head_dim": config.get("head_dim"),
        "hidden_act": config.get("hidden_act") or config.get("hidden_activation") or "silu",
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_parameters": rotation(config),
        "rotary_interleaved": fields.get("rope_is_neox_style", "is_neox_style") is False,
        "attention_gate": attention_gate(config, tensors),
        "fc_norm": "fc_norm.0.weight" in tensors,
        "attention_sinks": any(name.endswith(".attention_sink_bias") for name in tensors),
        "value_scale": fields.get("attention_value_scale", default=1.0),
        "embedding_scale": fields.get("input_embedding_scale", default=1.0),
        "logit_scale": logit_scale(fields),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
        "target_layer_ids": target_layer_ids(fields),
        "tap_before_norm": bool(config.get("tap_before_norm")),
        "target_hidden_size": fields.get("target_hidden_size"),
        "num_target_layers": fields.get("target_num_hidden_layers", "num_target_layers"),
        "target_name_or_path": fields.get("target_name_or_path"),
    }
    return own | vocabulary(fields, tensors, own["vocab_size"])


def flat_config(
    config: dict[str, Any],
    tensors: dict[str, TensorInfo],
    kind: type[DSparkConfig] = DSparkConfig,
    *,
    sample_from_anchor: bool,
    family: str = "qwen3",
    block_size: int | None = None,
    **overrides: Any,
) -> DSparkConfig:
    """
    The configuration of a DSpark or DFlash drafter whose file has the layer fields at the top level.

    Args:
        config: The raw `config.json`.
        tensors: What the files hold, under the drafter's names.
        kind: The configuration to make.
        sample_from_anchor: The slot layout for files of this format that do not specify it.
        family: The family of the decoder layers, a key of `DSparkConfig.layer_families`.
        block_size: The block size for files of this format that do not specify it; `None` if they must.
        overrides: Fields of `DSparkConfig` that are the same for all files of the format.

    Raises:
        ValueError: when a field that cannot be guessed is missing, or two spellings of one contradict each other.
    """
    fields = Fields(config)
    own = layer_fields(config, tensors, kind.layer_families[family])
    own |= {
        "has_mask_embedding": "mask_embedding" in tensors,
        "block_size": fields.get("block_size", default=block_size),
        "mask_token_id": fields.get("mask_token_id", "noise_token_id", "pard_token", "ptd_token_id"),
        "sample_from_anchor": slot_layout(fields, sample_from_anchor),
        "is_causal": fields.get("is_causal", default=fields.get("causal")),
    }
    if own["block_size"] is None:
        raise ValueError("The drafter's configuration lacks block_size: pass the one it was trained with in config=.")
    own |= windows(fields, config.get("layer_types") or ["full_attention"] * own["num_hidden_layers"])
    own |= heads(fields, tensors, own["hidden_size"])
    return kind(**(own | overrides))


def decoder_dict(config: DSparkConfig) -> dict[str, Any]:
    """The decoder layers as fields of transformers' Qwen3 configuration, which all formats except ours use."""
    slides = "sliding_attention" in (config.layer_types or [])
    return {
        "model_type": "qwen3",
        **config.named(DECODER),
        "rope_parameters": dict(config.rope_parameters or {}),
        # transformers' Qwen3 ignores a window without use_sliding_window.
        "use_sliding_window": slides,
        "sliding_window": config.sliding_window if slides else None,
        "tie_word_embeddings": False,
    }


def head_dict(config: DSparkConfig) -> dict[str, Any]:
    """The fields of a drafter's heads, all written out because the defaults of readers differ."""
    written = {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.enable_confidence_head and config.confidence_head_with_markov,
    }
    if config.confidence_temperatures is not None:
        written["confidence_temperatures"] = list(config.confidence_temperatures)
    return written


def rotation(config: dict[str, Any], keep_partial: bool = False) -> dict[str, Any]:
    """
    RoPE parameters in transformers' current form, without those that were copied from the target and do not apply.

    Qwen3-style drafters rotate the whole head even if the copied configuration says partial, and their positions are plain
    even if the target's are multimodal (deepseek-ai/DeepSpec#71).
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters must hold settings by name, got {parameters!r}.")
    nested = parameters.get("full_attention")
    parameters = dict(nested if isinstance(nested, dict) else parameters)
    theta = parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0
    rope_type = parameters.pop("type", None)
    parameters["rope_theta"] = theta
    parameters["rope_type"] = parameters.get("rope_type") or rope_type or "default"
    partial = parameters.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor")
    for inherited in ("mrope_section", "mrope_interleaved", "sliding_attention"):
        parameters.pop(inherited, None)
    if keep_partial and partial is not None:
        parameters["partial_rotary_factor"] = partial
    return parameters


def target_layer_ids(fields: Fields) -> list[int]:
    """
    Tapped layers as `DSparkConfig` counts them: id `i` is the output of decoder layer `i`.

    `eagle_aux_hidden_state_layer_ids` count inputs instead, so they are one higher for the same tap.

    Raises:
        ValueError: when there are none (the defaults that other loaders use are wrong for most files), or the two disagree.
    """
    ids, inputs = fields.get("target_layer_ids", "layer_ids"), fields.get("eagle_aux_hidden_state_layer_ids")
    if ids is None and inputs is None:
        raise ValueError(
            "The drafter's configuration does not say which target layers feed it (target_layer_ids). They cannot be "
            "guessed: find out how it was trained and pass config=."
        )
    if not all(isinstance(found, list | None) for found in (ids, inputs)):
        raise ValueError(f"target_layer_ids must be a list of layer ids, got {ids if ids is not None else inputs!r}.")
    if ids is None:
        if not all(type(layer_id) is int for layer_id in inputs):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids must be layer ids, got {inputs!r}.")
        return [layer_id - 1 for layer_id in inputs]
    if inputs is not None and inputs != [layer_id + 1 for layer_id in ids]:
        raise ValueError(
            f"target_layer_ids {ids} and eagle_aux_hidden_state_layer_ids {inputs} do not name the same taps (the "
            "latter have to be one higher): find out which were trained and remove the other."
        )
    return ids


def attention_gate(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> str | None:
    """The gate on the attention's output, which files do not declare reliably: as their tensors have it."""
    query, gate, output = (tensors.get(f"layers.0.self_attn.{name}_proj.weight") for name in ("q", "g", "o"))
    if gate is not None and gate.shape:
        return "head" if gate.shape[0] == config["num_attention_heads"] else "element"
    # Shapes are not known yet where only an index was read. Gemma 4's heads are not as wide as `head_dim` says.
    if query is None or output is None or not query.shape or not output.shape:
        return None
    return "query" if query.shape[0] == 2 * output.shape[-1] else None


def slot_layout(fields: Fields, default: bool) -> bool:
    """
    Whether the anchor's slot predicts (`sample_from_anchor`).

    Raises:
        ValueError: when the file says both.
    """
    said = fields.all("sample_from_anchor") + [not bonus for bonus in fields.all("dspark_bonus_anchor")]
    said += fields.all("shift_label")
    if len({bool(answer) for answer in said}) > 1:
        raise ValueError(
            "The drafter's configuration says both that the anchor's slot predicts and that it does not "
            f"(sample_from_anchor={fields.all('sample_from_anchor')}, dspark_bonus_anchor="
            f"{fields.all('dspark_bonus_anchor')}, shift_label={fields.all('shift_label')}): keep the one it was trained with."
        )
    return bool(said[0]) if said else default


def windows(fields: Fields, layer_types: list[str]) -> dict[str, Any]:
    """`layer_types` and `sliding_window`. `use_swa` makes every layer a sliding one, whatever the copied layer types are."""
    window = fields.get("swa_window_size", "sliding_window")
    if fields.get("use_swa") and "sliding_attention" not in layer_types:
        layer_types = ["sliding_attention"] * len(layer_types)
    slides = "sliding_attention" in layer_types
    return {"layer_types": layer_types, "sliding_window": window if slides else None}


def heads(fields: Fields, tensors: dict[str, TensorInfo], hidden_size: int) -> dict[str, Any]:
    """The fields of the heads: as the file declares them, otherwise derived from its tensors."""
    embedding = tensors.get("markov_head.markov_w1.weight")
    confidence = tensors.get("confidence_head.proj.weight")
    by_tensor = {"markov_head.gate_proj.weight": "gated", "markov_head.joint_proj.weight": "rnn"}
    kind = next((kind for name, kind in by_tensor.items() if name in tensors), "vanilla")
    rank = fields.get("markov_rank", default=embedding.shape[-1] if embedding is not None else 0)
    enabled = fields.get("enable_confidence_head", "use_confidence_head", default=confidence is not None)
    reads_markov = confidence is not None and confidence.shape[-1] != hidden_size
    return {
        "markov_rank": rank,
        "markov_head_type": fields.get("markov_head_type", default=kind),
        "enable_confidence_head": bool(enabled),
        "confidence_head_with_markov": bool(
            enabled and fields.get("confidence_head_with_markov", default=reads_markov)
        ),
        "confidence_temperatures": fields.get("confidence_temperatures"),
    }


def vocabulary(fields: Fields, tensors: dict[str, TensorInfo], vocab_size: int) -> dict[str, Any]:
    """The draft vocabulary, and whether the file contains an embedding and an LM head."""
    table = tensors.get("draft_token_ids")
    size = fields.get("draft_vocab_size", default=table.shape[0] if table is not None else None)
    return {
        "draft_vocab_size": None if size == vocab_size else size,
        "has_embed_tokens": "embed_tokens.weight" in tensors,
        "has_lm_head": "lm_head.weight" in tensors,
    }


def logit_scale(fields: Fields) -> float:
    """Factor on the base logits. Targets with muP heads specify a divisor of the hidden state instead."""
    divisor = fields.get("logits_mup_width_multiplier", default=1.0)
    return fields.get("output_multiplier", default=1.0) / divisor


def draft_token_ids(table: torch.Tensor, marked: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """
    A draft vocabulary from a file's `d2t`, which holds offsets (`id - index`) in most files and the ids in others.

    Args:
        table: `d2t`, `[V_draft]`.
        marked: `t2d` if the file has it: True at the tokens of the draft vocabulary, `[V]`. Then it decides between the two
            readings. Without it, the reading is taken that gives distinct ids inside the vocabulary. If both do, the
            table holds ids: any real vocabulary contains two neighbouring ids, whose offsets would be equal.
        vocab_size: Size of the full vocabulary.

    Raises:
        ValueError: when neither reading gives a draft vocabulary, or not the one that `t2d` marks.
    """
    table = table.long()
    for ids in (table, table + torch.arange(len(table))):
        different = len(ids.unique()) == len(ids) and int(ids.min()) >= 0 and int(ids.max()) < vocab_size
        if different and (marked is None or torch.equal(ids.sort().values, marked.nonzero().flatten())):
            return ids
    raise ValueError(
        f"The draft vocabulary is damaged: read neither as token ids nor as offsets does d2t give {len(table)} different "
        f"tokens of a vocabulary of {vocab_size}" + ("." if marked is None else " that are those of t2d.")
    )
