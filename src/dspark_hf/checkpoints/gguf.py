"""llama.cpp's GGUF files of architecture `dflash`, for DFlash and DSpark alike. Needs the `gguf` package.

`dflash.target_layers` counts inputs of layers (one higher than ours), and `d2t` holds token ids. There is no field for the
size of the vocabulary: it is read from the shape of tensors, or from the tokenizer. Quantized tensors become float32.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import cached_file

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import Fields, heads, vocabulary
from .files import TensorInfo

NAME = "GGUF"

ARCHITECTURE = "dflash"

NAMES = {
    "token_embd": "embed_tokens",
    "output": "lm_head",
    "output_norm": "norm",
    "enc.output_norm": "hidden_norm",
    "fc": "fc",
    "markov_w1": "markov_head.markov_w1",
    "markov_w2": "markov_head.markov_w2",
    "conf_proj": "confidence_head.proj",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
WHOLE_NAMES = {"d2t": "draft_token_ids", "d2t.weight": "draft_token_ids"}

DTYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64", "I64": "I64", "I32": "I32"}


def name_from_gguf(name: str) -> str:
    """The drafter's parameter name for a GGUF tensor."""
    if name in WHOLE_NAMES:
        return WHOLE_NAMES[name]
    if layer := re.fullmatch(r"blk\.(\d+)\.attn_sinks(\.weight)?", name):
        return f"layers.{layer[1]}.self_attn.attention_sink_bias"
    if layer := re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name):
        return f"layers.{layer[1]}.{LAYER_NAMES.get(layer[2], layer[2])}.{layer[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{NAMES[stem]}.{kind}" if stem in NAMES else name


@dataclass
class GGUFSource:
    """One GGUF file: its metadata, and its tensors by the drafter's parameter names."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    reader: Any

    def read(self, tensors: dict[str, TensorInfo]) -> dict[str, torch.Tensor]:
        by_name = {tensor.name: tensor for tensor in self.reader.tensors}
        return {name: _to_torch(by_name[info.file], info) for name, info in tensors.items()}


def open_gguf(path: Any, gguf_file: str | None, hub: dict[str, Any]) -> GGUFSource:
    """
    Raises:
        ImportError: without the `gguf` package.
        OSError: when there is no such file or it is damaged.
        ValueError: when the file holds another kind of model.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ImportError("Reading GGUF files needs the gguf package: pip install 'dspark-hf[gguf]'.") from error
    file = str(path) if gguf_file is None else cached_file(path, gguf_file, **hub)
    try:
        reader = GGUFReader(file)
    except OSError:
        raise
    except Exception as error:  # The gguf package does not validate the file, so a damaged one can raise anything.
        raise OSError(
            f"{file} is not a readable GGUF file ({error}). It may be cut short: download it again."
        ) from error
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    architecture = metadata.get("general.architecture")
    if architecture != ARCHITECTURE:
        raise ValueError(
            f"{file} is a GGUF file of architecture {architecture!r}, not of a drafter ({ARCHITECTURE!r}). Files of the "
            "early architecture 'dspark' have to be converted again with a current llama.cpp."
        )
    tensors = {}
    for tensor in reader.tensors:
        name, shape = name_from_gguf(tensor.name), tuple(int(size) for size in reversed(tensor.shape))
        if name == "confidence_head.proj.weight" and len(shape) == 1:
            shape = (1, *shape)
        tensors[name] = TensorInfo(shape, DTYPES.get(tensor.tensor_type.name, "F32"), name, tensor.name)
    return GGUFSource(metadata, tensors, reader)


def read_config(metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    """
    Raises:
        ValueError: for a DFlash2 file, which only the metadata identifies, and when a field is missing.
    """
    if "dflash.conv_kernel_size" in metadata or any("log_snr" in name for name in tensors):
        raise ValueError(
            "This is a DFlash2 or Bonsai drafter, whose convolutions or conditioning are not implemented here."
        )

    def get(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{ARCHITECTURE}.{name}", default)
        if value is None:
            raise ValueError(f"The file lacks {ARCHITECTURE}.{name}.")
        return value

    declared = {"enable_confidence_head": metadata.get("dflash.has_confidence_head")}
    hidden_size, num_layers = get("embedding_length"), get("block_count")
    vocab_size = _vocab_size(metadata, tensors)
    window = get("attention.sliding_window", 0)
    slides = get("attention.sliding_window_pattern", [bool(window)] * num_layers)
    layer_types = ["sliding_attention" if slide else "full_attention" for slide in slides[:num_layers]]
    return DSparkConfig(
        **DSparkConfig.layer_families["qwen3"],
        **heads(Fields(declared), tensors, hidden_size),
        **vocabulary(Fields({}), tensors, vocab_size),
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=get("feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=get("attention.head_count"),
        num_key_value_heads=get("attention.head_count_kv"),
        head_dim=get("attention.key_length"),
        rms_norm_eps=round(get("attention.layer_norm_rms_epsilon"), 12),  # Stored in single precision.
        max_position_embeddings=get("context_length"),
        rope_parameters=_rope(get, metadata),
        layer_types=layer_types,
        sliding_window=window or None,
        is_causal=bool(get("attention.causal", False)),
        attention_sinks=any(name.endswith(".attention_sink_bias") for name in tensors),
        attention_bias="layers.0.self_attn.q_proj.bias" in tensors,
        target_layer_ids=[layer_id - 1 for layer_id in get("target_layers")],
        block_size=get("block_size", 16),
        mask_token_id=metadata.get("tokenizer.ggml.mask_token_id"),
        # A file without a sequential head is a plain DFlash drafter, whose anchor predicts nothing.
        sample_from_anchor=bool(get("sample_from_anchor", "markov_head.markov_w1.weight" in tensors)),
    )


def _rope(get: Any, metadata: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get("rope.freq_base", 10_000.0)}
    scaling = get("rope.scaling.type", "none")
    if scaling not in ("none", "linear", "yarn"):
        raise ValueError(f"dflash.rope.scaling.type={scaling!r} is not known here.")
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": get("rope.scaling.factor")}
    if scaling == "yarn":
        rope["original_max_position_embeddings"] = get("rope.scaling.original_context_length")
    return rope


def _vocab_size(metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> int:
    for name in ("embed_tokens.weight", "markov_head.markov_w1.weight"):
        if name in tensors:
            return tensors[name].shape[0]
    size = metadata.get("dflash.vocab_size") or len(metadata.get("tokenizer.ggml.tokens") or ())
    if not size:
        raise ValueError("The file does not say how large the target's vocabulary is: pass config=.")
    return size


def _to_torch(tensor: Any, info: TensorInfo) -> torch.Tensor:
    from gguf import dequantize

    kind = tensor.tensor_type.name
    if kind == "BF16":
        data = torch.from_numpy(tensor.data.copy()).view(torch.bfloat16)
    elif kind in DTYPES:
        data = torch.from_numpy(tensor.data.copy())
    else:
        data = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type))
    return data.reshape(info.shape)
