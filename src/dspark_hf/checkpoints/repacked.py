"""
Safetensors files whose weights are packed: quantized, or several projections in one tensor. Read as what they stand for.

Quantized weights are unpacked when they are loaded, into the type that the configuration names (bfloat16 by default):

| Packing | Tensors of a weight `[O, I]` |
| --- | --- |
| FP8 (compressed-tensors, ModelOpt) | `weight` F8_E4M3; `weight_scale` or `weight_scale_inv`: one number, `[O, 1]` or by blocks |
| NVFP4 of ModelOpt | `weight` U8 `[O, I / 2]`; `weight_scale` F8_E4M3 `[O, I / 16]`; `weight_scale_2` one number, a factor |
| NVFP4 of compressed-tensors | `weight_packed`, `weight_scale` as above; `weight_global_scale` one number, a divisor |
| INT4 of compressed-tensors | `weight_packed` I32 `[O, I / 8]`; `weight_scale` `[O, I / group]`; `weight_shape` |

Scales of activations (`input_scale`, `input_global_scale`, `k_scale`, `v_scale`) say how engines would run them and are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from ..number_types import floating_dtype
from .files import FLOAT_TYPES, SafetensorsSource, Shape, TensorInfo, printable

# What an FP4 code stands for (e2m1).
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The two numbers of each byte, the one in the low bits first: two bfloat16 as one int32, which is many times faster to look up.
_FP4_PAIRS = torch.tensor([[FP4_VALUES[b & 15], FP4_VALUES[b >> 4]] for b in range(256)], dtype=torch.bfloat16)
_FP4_PAIRS = _FP4_PAIRS.view(torch.int32).flatten()
NVFP4_GROUP = 16

# How the names of what belongs to a packed weight end.
SCALES = (".weight_scale", ".weight_scale_inv")
PACKED_NAMES = (*SCALES, ".weight_scale_2", ".weight_global_scale", ".weight_packed", ".weight_shape")
IGNORED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale", ".output_scale")
# Packings that are not read: of GPTQ and AWQ, and those with zero points or reordered groups.
UNREAD = (".qweight", ".qzeros", ".scales", ".g_idx", ".weight_g_idx", ".weight_zero_point", ".absmax", ".quant_map")

# Projections that some files keep in one tensor, one below the other.
FUSED = {
    ".qkv_proj.": (".q_proj.", ".k_proj.", ".v_proj."),
    ".gate_up_proj.": (".gate_proj.", ".up_proj."),
}

Unpack = Callable[[dict[str, torch.Tensor]], torch.Tensor]


@dataclass
class Part:
    """
    A tensor of the drafter that is made of others in the files.

    Args:
        stored: The tensors it is made of, by the last part of their names.
        unpack: Makes it of them.
        rows: The rows of the result that are meant; all by default.
    """

    stored: dict[str, TensorInfo]
    unpack: Unpack
    rows: slice = field(default_factory=lambda: slice(None))


@dataclass
class RepackedSource:
    """
    Files with packed weights, as a source of what these stand for.

    Args:
        config: The raw configuration.
        tensors: What is in the files and what is made of it, each by its name.
        parts: How those are made that are not in the files, by the name that `tensors` has for them.
        files: The files.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    parts: dict[str, Part]
    files: SafetensorsSource

    def read(self, tensors: dict[str, TensorInfo]) -> dict[str, torch.Tensor]:
        """As in [`Source`]."""
        read = self.files.read({name: info for name, info in tensors.items() if info.name not in self.parts})
        for name, info in tensors.items():
            if (part := self.parts.get(info.name)) is not None:
                read[name] = part.unpack(self.files.read(part.stored))[part.rows].contiguous()
        return read


def is_packed(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    """Whether there is a packed weight among these tensors."""
    return any(name.endswith(PACKED_NAMES) or part in name for name in tensors for part in FUSED)


def is_unread(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    """Whether weights are quantized in a way that is not read here."""
    return any(info.name.endswith(UNREAD) for info in tensors.values())


def repacked(path: Any, source: SafetensorsSource) -> SafetensorsSource | RepackedSource:
    """
    The files as a source of unpacked tensors; as they are when nothing in them is packed.

    Raises:
        ValueError: one message with every packed weight whose scales are missing or do not fit.
    """
    if not is_packed(source.config, source.tensors):
        return source
    result = RepackedSource(source.config, {}, {}, source)
    if problems := sorted(_fill(result)):
        raise ValueError(
            f"The packed weights of {path} are damaged or incomplete, so it was not loaded:\n"
            + "\n".join(f"- {problem}" for problem in problems[:20])
        )
    return result


def _fill(result: RepackedSource) -> Iterator[str]:
    stored = result.files.tensors
    dtype = str(result.config.get("dtype") or result.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = dtype if dtype in ("float32", "float16", "bfloat16") else "bfloat16"
    weights = {n.removesuffix(".weight_packed") + ".weight": n for n in stored if n.endswith(".weight_packed")}
    packed = {s.rpartition(".")[0] + ".weight" for s in stored if s.endswith(PACKED_NAMES)}
    for name in sorted(packed | {n for n in stored if not n.endswith((*PACKED_NAMES, *IGNORED))}):
        beside = {n.rpartition(".")[2]: stored[n] for n in _belonging(name, weights) if n in stored}
        if name not in packed and stored[name].dtype not in ("F8_E4M3", "U8"):
            result.tensors[name] = stored[name]
            continue
        try:
            shape, unpack = _unpacking(beside, floating_dtype(dtype, "torch_dtype"))
        except ValueError as error:
            yield f"{printable(name)}: {error}"
            continue
        result.tensors[name] = TensorInfo(shape, _TYPE_NAMES[dtype], name, next(iter(beside.values())).file)
        result.parts[name] = Part(beside, unpack)
    for name in list(result.tensors):
        for fused, parts in FUSED.items():
            if fused in name:
                yield from _split(result, name, [name.replace(fused, part) for part in parts])


_TYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


def _belonging(name: str, weights: dict[str, str]) -> list[str]:
    stem = name.removesuffix("weight").removesuffix(".")
    return [weights.get(name, name), *(stem + ending for ending in PACKED_NAMES)]


def _split(result: RepackedSource, name: str, parts: list[str]) -> Iterator[str]:
    """Replaces a fused tensor by its parts."""
    info = result.tensors.pop(name)
    sizes = [info.shape[0] // len(parts)] * len(parts)
    if len(parts) == 3:
        heads, keys = (result.config.get(n) for n in ("num_attention_heads", "num_key_value_heads"))
        layers = result.config.get("transformer_layer_config")
        if isinstance(layers, dict):
            heads, keys = layers.get("num_attention_heads"), layers.get("num_key_value_heads")
        if not (type(heads) is int and type(keys) is int and heads > 0 and keys > 0):
            yield f"{printable(name)} cannot be split: num_attention_heads and num_key_value_heads are {heads} and {keys}"
            return
        unit = info.shape[0] // (heads + 2 * keys)
        sizes = [heads * unit, keys * unit, keys * unit]
    if sum(sizes) != info.shape[0]:
        yield f"{printable(name)} has {info.shape[0]} rows, which cannot be split into {', '.join(parts)}"
        return
    whole = result.parts.pop(name, None) or Part({"weight": info}, lambda tensors: tensors["weight"])
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        result.tensors[part] = TensorInfo((size, *info.shape[1:]), info.dtype, part, info.file)
        result.parts[part] = Part(whole.stored, whole.unpack, slice(start, start + size))
        start += size


def _unpacking(stored: dict[str, TensorInfo], dtype: torch.dtype) -> tuple[Shape, Unpack]:
    """
    The shape of a packed weight and what unpacks it.

    Args:
        stored: What the files hold of it, by the last part of the names.
        dtype: The type to unpack to.

    Raises:
        ValueError: when something is missing or does not fit.
    """
    weight = stored.get("weight") or stored.get("weight_packed")
    if weight is None:
        raise ValueError(f"it has {', '.join(sorted(stored))}, but no weight")
    if weight.dtype == "F8_E4M3":
        return weight.shape, _fp8(stored, weight.shape, dtype)
    if weight.dtype == "U8":
        return _nvfp4(stored, weight.shape, dtype)
    if weight.dtype == "I32" and "weight_packed" in stored:
        return _int4(stored, weight.shape, dtype)
    if weight.dtype in FLOAT_TYPES:
        raise ValueError(f"it has scales although its weight is {weight.dtype}")
    raise ValueError(f"its weight is {weight.dtype}, which is not a packing that is read here")


def _scale(stored: dict[str, TensorInfo]) -> tuple[str, TensorInfo]:
    for name in ("weight_scale", "weight_scale_inv"):
        if name in stored:
            return name, stored[name]
    raise ValueError("its weight_scale is missing")


def _fp8(stored: dict[str, TensorInfo], shape: Shape, dtype: torch.dtype) -> Unpack:
    name, scale = _scale(stored)
    if prod(scale.shape) == 1:
        return lambda t: (t["weight"].float() * t[name].float().flatten()).to(dtype)
    if len(shape) != 2 or len(scale.shape) != 2 or any(s < 1 for s in scale.shape):
        raise ValueError(f"its {name} is {list(scale.shape)}, which does not fit a weight {list(shape)}")
    blocks = tuple(-(-size // count) for size, count in zip(shape, scale.shape, strict=True))
    if any(-(-size // block) != count for size, block, count in zip(shape, blocks, scale.shape, strict=True)):
        raise ValueError(f"its {name} is {list(scale.shape)}, which does not divide a weight {list(shape)} into blocks")

    def unpack(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        scales = tensors[name].float().repeat_interleave(blocks[0], 0).repeat_interleave(blocks[1], 1)
        return (tensors["weight"].float() * scales[: shape[0], : shape[1]]).to(dtype)

    return unpack


def _nvfp4(stored: dict[str, TensorInfo], packed: Shape, dtype: torch.dtype) -> tuple[Shape, Unpack]:
    name, scale = _scale(stored)
    whole = next((n for n in ("weight_scale_2", "weight_global_scale") if n in stored), None)
    if whole is None:
        raise ValueError("it is packed FP4, but weight_scale_2 (or weight_global_scale) is missing")
    if len(packed) != 2 or 2 * packed[1] % NVFP4_GROUP:
        raise ValueError(f"its rows hold {2 * packed[-1]} FP4 numbers, not a multiple of {NVFP4_GROUP}")
    shape = (packed[0], 2 * packed[1])
    needed = (shape[0], shape[1] // NVFP4_GROUP)
    if scale.shape != needed:
        raise ValueError(f"its {name} is {list(scale.shape)}; packed FP4 {list(packed)} needs {list(needed)}")
    if prod(stored[whole].shape) != 1:
        raise ValueError(f"its {whole} is {list(stored[whole].shape)}, not one number")
    weight = "weight" if "weight" in stored else "weight_packed"

    def unpack(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        values = fp4_numbers(tensors[weight]).float()
        factor = tensors[whole].float().flatten()
        scales = tensors[name].float() * factor if whole == "weight_scale_2" else tensors[name].float() / factor
        return (values * scales.repeat_interleave(NVFP4_GROUP, -1)).to(dtype)

    return shape, unpack


def fp4_numbers(packed: torch.Tensor) -> torch.Tensor:
    """What packed FP4 codes `[O, I / 2]` stand for, the first of two in the low bits: `[O, I]` in bfloat16."""
    pairs = _FP4_PAIRS.index_select(0, packed.view(torch.uint8).flatten().int())
    return pairs.view(torch.bfloat16).view(*packed.shape[:-1], -1)


def _int4(stored: dict[str, TensorInfo], packed: Shape, dtype: torch.dtype) -> tuple[Shape, Unpack]:
    name, scale = _scale(stored)
    shape = (packed[0], 8 * packed[1])
    if len(scale.shape) != 2 or scale.shape[0] != shape[0] or not scale.shape[1] or shape[1] % scale.shape[1]:
        raise ValueError(f"its {name} is {list(scale.shape)}, which does not divide a weight {list(shape)} into groups")
    group = shape[1] // scale.shape[1]

    def unpack(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        shifts = torch.arange(0, 32, 4)
        codes = (tensors["weight_packed"][..., None] >> shifts & 15).flatten(-2) - 8
        return (codes.float() * tensors[name].float().repeat_interleave(group, -1)).to(dtype)

    return shape, unpack


# ---------------------------------------------------------------------- norms that are stored as their distance from 1


def has_offset_norms(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    """
    Whether norms scale by 1 + weight, as Qwen3.5's and Gemma's do: declared, or told by Qwen3.5's gated query projection.

    Args:
        config: The raw configuration.
        tensors: What the files hold, under the drafter's names.
    """
    if config.get("use_gemma_norm"):
        return True
    native = "Qwen35DSparkModel" in (config.get("architectures") or ())
    query, output = (tensors.get(f"layers.0.self_attn.{name}_proj.weight") for name in ("q", "o"))
    return native and query is not None and output is not None and query.shape[:1] == (2 * output.shape[-1],)


def with_whole_norms(source: SafetensorsSource | RepackedSource) -> RepackedSource:
    """The same tensors with 1 added to the weights of norms."""
    files = source.files if isinstance(source, RepackedSource) else source
    parts = source.parts if isinstance(source, RepackedSource) else {}
    norms = {name: info for name, info in source.tensors.items() if name.endswith("norm.weight")}
    added = {name: Part({"weight": info}, lambda tensors: tensors["weight"] + 1) for name, info in norms.items()}
    return RepackedSource(source.config, source.tensors, parts | added, files)
