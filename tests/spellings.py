"""One drafter written by hand in every public spelling, as the software of each writes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dspark_hf import DSparkConfig, DSparkDrafter

Tensors = dict[str, torch.Tensor]


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder


def tensors_of(drafter: DSparkDrafter) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in drafter.state_dict().items()}


def layer_sizes(config: Any) -> dict[str, Any]:
    """The fields of every decoder configuration that say how large the draft layers are."""
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
    }


def decoder(config: DSparkConfig) -> dict[str, Any]:
    """The draft layers as a Qwen3 configuration."""
    return {
        "model_type": "qwen3",
        "dtype": "float32",
        **layer_sizes(config),
        "attention_bias": False,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope_parameters["rope_theta"],
        "rope_scaling": None,
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "tie_word_embeddings": False,
    }


def heads(config: DSparkConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "enable_confidence_head": config.enable_confidence_head,
        "confidence_head_with_markov": config.confidence_head_with_markov,
    }


def taps(config: DSparkConfig) -> dict[str, Any]:
    return {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}


def deepspec(drafter: DSparkDrafter, folder: Path) -> Path:
    """A copy of the target's configuration, with what that drags along, and the target's embedding and head."""
    config = drafter.config
    dragged = {"partial_rotary_factor": 0.5, "num_experts": 8, "mlp_only_layers": [], "tie_word_embeddings": True}
    fields = decoder(config) | dragged | taps(config) | heads(config)
    fields |= {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
    }
    embeddings = drafter.bind()
    copies = {"embed_tokens.weight": embeddings.embed_tokens.weight, "lm_head.weight": embeddings.lm_head.weight}
    return write(
        folder, fields, tensors_of(drafter) | {name: tensor.detach().clone() for name, tensor in copies.items()}
    )


def specforge(drafter: DSparkDrafter, folder: Path) -> Path:
    config = drafter.config
    section = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0}
    fields = decoder(config) | {
        "architectures": ["DSparkDraftModel"],
        "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": section | taps(config) | heads(config),
    }
    return write(folder, fields, tensors_of(drafter))


def early_specforge(drafter: DSparkDrafter, folder: Path) -> Path:
    """With the heads behind a prefix."""
    specforge(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    moved = {
        f"logit_head.{name}" if name.startswith(("markov_head.", "confidence_head.")) else name: tensor
        for name, tensor in tensors_of(drafter).items()
    }
    return write(folder, config, moved)


def normalised_specforge(drafter: DSparkDrafter, folder: Path) -> Path:
    """With the fields at the top level as well, and DeepSpec's class."""
    specforge(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= heads(drafter.config) | {"architectures": ["Qwen3DSparkModel"]}
    return write(folder, config, tensors_of(drafter))


def prefixed(drafter: DSparkDrafter, folder: Path) -> Path:
    """With the backbone inside a `model`, as SGLang allows."""
    specforge(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    moved = {
        name if name.startswith(("markov_head.", "confidence_head.")) else f"model.{name}": tensor
        for name, tensor in tensors_of(drafter).items()
    }
    return write(folder, config, moved)


def modelopt(drafter: DSparkDrafter, folder: Path) -> Path:
    config = drafter.config
    section = {
        "causal": config.layer_is_causal(0),
        "projector_type": "dspark",
        "shift_label": config.sample_from_anchor,
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov_head_type,
        "use_confidence_head": config.enable_confidence_head,
    }
    if config.sliding_window:
        section |= {"use_swa": True, "swa_window_size": config.sliding_window}
    fields = decoder(config) | {
        "architectures": ["DFlashDraftModel"],
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": section | taps(config),
    }
    flat = {
        name.removeprefix("markov_head.").replace("confidence_head.proj.", "confidence_proj."): tensor
        for name, tensor in tensors_of(drafter).items()
    }
    return write(folder, fields, flat)


def speculators(drafter: DSparkDrafter, folder: Path, **fields: Any) -> Path:
    """As version 0.9 writes it. `sample_from_anchor=None` leaves the key out, as versions before 0.7 did."""
    config = drafter.config
    layers = decoder(config)
    theta = layers.pop("rope_theta")
    layers["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    kind = "dspark" if config.markov_rank else "dflash"
    written = {
        "architectures": ["DSparkDraftModel" if config.markov_rank else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.num_draft_tokens}],
            "verifier": {"name_or_path": "some/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": layers,
        "draft_vocab_size": config.logits_size,
        "block_size": config.block_size,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": False,
        "sample_from_anchor": config.sample_from_anchor,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    written |= heads(config) if config.markov_rank else {}
    tensors = tensors_of(drafter)
    if (ids := tensors.pop("draft_token_ids", None)) is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
        tensors["lm_head.weight"] = drafter.bind().lm_head.weight.detach()[ids]
    written = {name: value for name, value in (written | fields).items() if value is not None or name not in fields}
    return write(folder, written, tensors)


def early_speculators(drafter: DSparkDrafter, folder: Path) -> Path:
    """With copies of the target's embedding and head."""
    speculators(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    embeddings = drafter.bind()
    copies = {
        "embed_tokens.weight": embeddings.embed_tokens.weight.detach().clone(),
        "lm_head.weight": embeddings.lm_head.weight.detach().clone(),
        "verifier_norm.weight": torch.ones(drafter.config.hidden_size),
    }
    return write(folder, config, tensors_of(drafter) | copies)


def zlab(drafter: DSparkDrafter, folder: Path) -> Path:
    config = drafter.config
    fields = decoder(config) | {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "dflash_config": taps(config),
    }
    return write(folder, fields, tensors_of(drafter))


def hybrid(drafter: DSparkDrafter, folder: Path) -> Path:
    """z-lab's class with a sequential head."""
    zlab(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    return write(folder, config | heads(drafter.config), tensors_of(drafter))


def lfm2(drafter: DSparkDrafter, folder: Path) -> Path:
    config = drafter.config
    fields = decoder(config) | heads(config)
    fields |= {
        "architectures": ["Lfm2DSparkDraftModel"],
        "block_size": config.block_size,
        "rope_is_neox_style": not config.rotary_interleaved,
        "dflash_config": taps(config) | {"num_target_layers": config.num_target_layers},
    }
    return write(folder, fields, tensors_of(drafter))


def transformers_dflash(drafter: DSparkDrafter, folder: Path) -> Path:
    config = drafter.config
    fields = decoder(config) | taps(config)
    fields |= {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "block_size": config.block_size,
    }
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return write(folder, fields, {names.get(name, name): tensor for name, tensor in tensors_of(drafter).items()})


GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.attention_sink_bias": "attn_sinks",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GGUF_NAMES = {
    "norm.weight": "output_norm.weight",
    "hidden_norm.weight": "enc.output_norm.weight",
    "fc.weight": "fc.weight",
    "markov_head.markov_w1.weight": "markov_w1.weight",
    "markov_head.markov_w2.weight": "markov_w2.weight",
    "confidence_head.proj.weight": "conf_proj.weight",
    "confidence_head.proj.bias": "conf_proj.bias",
    "draft_token_ids": "d2t",
}


def gguf_file(
    drafter: DSparkDrafter, folder: Path, metadata: dict[str, Any] | None = None, quantize: str | None = None
) -> Path:
    """One file as llama.cpp's converter writes it; `quantize` names a GGML type for the matrices of the layers."""
    import gguf

    config = drafter.config
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "draft.gguf"
    writer = gguf.GGUFWriter(file, "dflash")
    numbers = {
        "block_count": config.num_hidden_layers,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "context_length": config.max_position_embeddings,
        "block_size": config.block_size,
    }
    for name, value in numbers.items():
        writer.add_uint32(f"dflash.{name}", value)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("dflash.rope.freq_base", config.rope_parameters["rope_theta"])
    writer.add_array("dflash.target_layers", [layer_id + 1 for layer_id in config.target_layer_ids])
    writer.add_uint32("tokenizer.ggml.mask_token_id", config.mask_token_id)
    writer.add_array("tokenizer.ggml.tokens", [f"token{i}" for i in range(config.vocab_size)])
    for name, value in (metadata or {}).items():
        {bool: writer.add_bool, int: writer.add_uint32}[type(value)](name, value)
    for name, tensor in tensors_of(drafter).items():
        parts = name.split(".")
        if parts[0] == "layers":
            inner = ".".join(parts[2:])
            stem = inner.removesuffix(".weight")
            name = f"blk.{parts[1]}.{GGUF_LAYER_NAMES[stem]}.weight"
        else:
            name = GGUF_NAMES[name]
        if name == "conf_proj.weight":
            tensor = tensor.flatten()
        if quantize is not None and name.startswith("blk.") and tensor.ndim == 2:
            kind = gguf.GGMLQuantizationType[quantize]
            writer.add_tensor(name, gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, tensor.numpy())
    if drafter.draft_token_ids is not None:
        head = drafter.bind().lm_head.weight.detach()[drafter.draft_token_ids]
        writer.add_tensor("output.weight", head.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


# Spellings of a DSpark drafter whose anchor predicts, and of a plain DFlash drafter whose anchor does not.
DSPARK: dict[str, Callable[[DSparkDrafter, Path], Path]] = {
    "DeepSpec": deepspec,
    "SpecForge": specforge,
    "early SpecForge": early_specforge,
    "normalised SpecForge": normalised_specforge,
    "a model. prefix": prefixed,
    "ModelOpt": modelopt,
    "speculators": speculators,
    "early speculators": early_speculators,
    "DFlash class with a head": hybrid,
    "LFM2": lfm2,
    "GGUF": gguf_file,
}
DFLASH: dict[str, Callable[[DSparkDrafter, Path], Path]] = {
    "z-lab": zlab,
    "speculators": speculators,
    "GGUF": gguf_file,
}
