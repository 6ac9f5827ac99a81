"""
DeepSeek-V4's checkpoints, which hold their drafter beside the target: `mtp.<stage>.*`, and `dspark_*` in the configuration.

The drafter's weights are quantized: FP8 in blocks of 128 x 128, and packed FP4 with a scale for 32 inputs of a row; all scales
are powers of two (E8M0). Every such value is a bfloat16 number, so nothing is lost when the weights are unpacked. Each tensor is
unpacked when it is asked for, so that no more than one of them exists beside the drafter that is being loaded.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import safe_open

from ..kinds.deepseek_v4.configuration_deepseek_v4 import (
    LAYER_FIELDS,
    DeepseekV4DrafterConfig,
    rotated_channels,
)
from .files import FLOAT_TYPES, TensorInfo, printable
from .repacked import fp4_numbers
from .unsupported import Unsupported, is_embedded, with_tensor

NAME = "DeepSeek-V4"
PREFIX = "mtp."
STAGE = re.compile(r"mtp\.(\d+)\.(.+)")
EXPERT = re.compile(r"ffn\.experts\.(\d+)\.(w[123])\.weight")

FP8_BLOCK, FP4_BLOCK = 128, 32

# The checkpoint's names in a stage and the drafter's in a layer.
STAGE_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.attn_sink": "self_attn.sinks",
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    **{f"hc_{part}_{name}": f"{part}_hc.{name}" for part in ("attn", "ffn") for name in ("fn", "base", "scale")},
}
# Those of the experts, which the drafter keeps in one tensor: first and third map in one.
EXPERT_NAMES = {"mlp.experts.gate_up_proj": ("w1", "w3"), "mlp.experts.down_proj": ("w2",)}
# What only the first and only the last stage has.
FIRST_NAMES = {"main_proj.weight": "fc.weight", "main_norm.weight": "hidden_norm.weight"}
LAST_NAMES = {
    "norm.weight": "norm.weight",
    **{f"hc_head_{name}": f"hc_head.{name}" for name in ("fn", "base", "scale")},
    **{name: name for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")},
    "confidence_head.proj.weight": "confidence_head.proj.weight",
}

# Fields without which nothing fits; others have the same value in all releases.
NEEDED = ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads", "head_dim", "sliding_window")
# Fields that the layers are written for.
FIXED = {"scoring_func": "sqrtsoftplus", "norm_topk_prob": True, "n_shared_experts": 1, "hidden_act": "silu"}

MOST_PROBLEMS = 20

UNSUPPORTED = (
    Unsupported(
        "DeepSeek-V4.1 embedded DSpark",
        lambda config, tensors: isinstance(config.get("text_config"), dict) or _has(tensors, "markov_head.embed."),
        "Its streams are mixed in another way than DeepSeek-V4's and its taps enter a layer, and transformers has no class for "
        "its target. SGLang serves it from the target's repository.",
    ),
    Unsupported(
        "re-quantized (NVFP4) DeepSeek-V4 embedded DSpark",
        with_tensor(".weight_scale_2"),
        "Load the drafter from DeepSeek's repository, whose FP8 and FP4 weights are read: it fits the re-quantized target too.",
    ),
    Unsupported(
        "re-quantized (one scale per channel) DeepSeek-V4 embedded DSpark",
        lambda config, tensors: _has(tensors, ".weight_scale", ".weight_packed", ".weight_scale_inv", ".qweight"),
        "Load the drafter from DeepSeek's repository, whose FP8 and FP4 weights are read: it fits the re-quantized target too.",
    ),
)


def _has(tensors: dict[str, TensorInfo], *parts: str) -> bool:
    return any(info.name.startswith(PREFIX) and part in info.name for info in tensors.values() for part in parts)


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return is_embedded(config, tensors)


def is_own(name: str) -> bool:
    """Whether a tensor of the checkpoint is the drafter's; shards without any are left where they are."""
    return name.startswith(PREFIX)


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DeepseekV4DrafterConfig:
    """
    Raises:
        ValueError: when a field is missing, or says something that no release does.
    """
    dspark = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids")
    if missing := [name for name in (*NEEDED, *dspark) if config.get(name) is None]:
        raise ValueError(f"The target's configuration lacks {', '.join(missing)}.")
    if odd := [f"{name}={config[name]!r}" for name, value in FIXED.items() if config.get(name, value) != value]:
        usual = ", ".join(f"{name}={value!r}" for name, value in FIXED.items())
        raise ValueError(f"It says {', '.join(odd)}; the drafter's layers are implemented for {usual}.")
    embedding = tensors.get("markov_head.markov_w1.weight")
    rank = embedding.shape[-1] if embedding is not None else 0
    own = {name: config[name] for name in LAYER_FIELDS if config.get(name) is not None}
    shared = ("rms_norm_eps", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    own |= {name: config[name] for name in shared if config.get(name) is not None}
    return DeepseekV4DrafterConfig(
        **own,
        hidden_size=config["hidden_size"],
        vocab_size=config["vocab_size"],
        num_hidden_layers=len({name.split(".")[1] for name in tensors if name.startswith("layers.")}),
        qk_rope_head_dim=rotated_channels(config),
        block_size=config["dspark_block_size"],
        mask_token_id=config["dspark_noise_token_id"],
        target_layer_ids=config["dspark_target_layer_ids"],
        num_target_layers=config["num_hidden_layers"],
        markov_rank=config.get("dspark_markov_rank", rank),
        enable_confidence_head="confidence_head.proj.weight" in tensors,
        target_name_or_path=config.get("target_name_or_path"),
        confidence_temperatures=config.get("confidence_temperatures"),
        dtype=config.get("dtype") or config.get("torch_dtype") or "bfloat16",
    )


def open_tensors(path: Any, config: dict[str, Any], tensors: dict[str, TensorInfo]) -> EmbeddedDrafter:
    """
    The drafter's part of a checkpoint.

    Args:
        path: Where it is, for messages, and the target that the drafter is for.
        config: The target's configuration.
        tensors: The checkpoint's tensors that are the drafter's, by their name.

    Raises:
        ValueError: one message with everything that is missing, in the wrong stage or of the wrong type or shape.
    """
    opened = EmbeddedDrafter({"target_name_or_path": str(path)} | config, tensors)
    if problems := sorted(opened.problems()):
        if len(problems) > MOST_PROBLEMS:
            problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS} more"]
        raise ValueError(
            f"The drafter in {path} is damaged or incomplete, so it was not loaded:\n"
            + "\n".join(f"- {problem}" for problem in problems)
        )
    opened.fill()
    return opened


@dataclass
class EmbeddedDrafter:
    """
    The drafter's part of a checkpoint, as a source of tensors under the drafter's names.

    Args:
        config: The target's configuration.
        stored: The checkpoint's tensors that are the drafter's, by their name.

    Attributes:
        tensors: The drafter's tensors, as they are when unpacked.
    """

    config: dict[str, Any]
    stored: dict[str, TensorInfo]
    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._parts: dict[str, list[list[str]]] = {}
        self._files: dict[str, Any] = {}
        # transformers reads from several threads, whose tensors would all be in memory at once.
        self._lock = threading.Lock()
        # A scale belongs to the weight beside it; those of the streams' maps are called `hc_..._scale`.
        self.scales = {n.removesuffix("scale") + "weight": n for n in self.stored if n.endswith(".scale")}
        self.weights = [n for n in self.stored if n not in self.scales.values()]

    @property
    def stages(self) -> list[int]:
        """The stages that the checkpoint has tensors of."""
        return sorted({int(found[1]) for name in self.stored if (found := STAGE.fullmatch(name))})

    # ------------------------------------------------------------------ checks

    def problems(self) -> Iterator[str]:
        """All that can be said without the configuration's sizes."""
        stages = self.stages
        yield from (f"missing: all of stage mtp.{s}" for s in range(stages[-1]) if s not in stages)
        places = {0: FIRST_NAMES, stages[-1]: LAST_NAMES}
        for stage in stages:
            needed = STAGE_NAMES | (FIRST_NAMES if stage == 0 else {}) | (LAST_NAMES if stage == stages[-1] else {})
            yield from (f"missing: mtp.{stage}.{n}" for n in needed if f"mtp.{stage}.{n}" not in self.stored)
            yield from self._missing_experts(stage)
        for name in self.weights:
            yield from self._misplaced(name, places)
            yield from self._wrongly_stored(name)
        yield from (f"no weight belongs to {printable(s)}" for w, s in self.scales.items() if w not in self.stored)

    def _missing_experts(self, stage: int) -> Iterator[str]:
        count = self.config.get("n_routed_experts", DeepseekV4DrafterConfig.n_routed_experts)
        names = (f"mtp.{stage}.ffn.experts.{e}.{part}.weight" for e in range(count) for part in ("w1", "w2", "w3"))
        yield from (f"missing: {name}" for name in names if name not in self.stored)

    def _misplaced(self, name: str, places: dict[int, dict[str, str]]) -> Iterator[str]:
        found = STAGE.fullmatch(name)
        stage, rest = (int(found[1]), found[2]) if found else (-1, name)
        if rest in STAGE_NAMES or rest in places.get(stage, {}):
            return
        if (expert := EXPERT.fullmatch(rest)) and int(expert[1]) < self.config.get("n_routed_experts", 2**16):
            return
        belongs = next((f", which belongs to stage {s}" for s, names in places.items() if rest in names), "")
        yield f"unexpected: {printable(name)} {list(self.stored[name].shape)}{belongs}"

    def _wrongly_stored(self, name: str) -> Iterator[str]:
        """Whether a tensor is of a type that is read, and has the scales that this type needs."""
        shape, dtype, *_ = self.stored[name]
        shown, scale = printable(name), self.scales.get(name)
        if dtype in FLOAT_TYPES:
            if scale is not None:
                yield f"{scale} scales {shown}, which is {dtype} and needs no scale"
            return
        if dtype not in ("F8_E4M3", "I8") or len(shape) != 2:
            yield (
                f"wrong type: {shown} is {dtype} {list(shape)}; weights are F8_E4M3 in blocks, I8 (packed FP4), "
                f"{', '.join(sorted(FLOAT_TYPES))}"
            )
        elif scale is None:
            yield f"missing: the scales of {shown}, which is {dtype}"
        else:
            yield from self._wrong_scale(shown, shape, dtype, scale)

    def _wrong_scale(self, shown: str, shape: tuple[int, ...], dtype: str, scale: str) -> Iterator[str]:
        rows, columns = shape
        if dtype == "I8" and 2 * columns % FP4_BLOCK:
            yield f"wrong width: {shown} holds {2 * columns} FP4 numbers in a row, not a multiple of {FP4_BLOCK}"
            return
        needed = (
            (rows, 2 * columns // FP4_BLOCK) if dtype == "I8" else (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
        )
        found = self.stored[scale]
        if found.dtype != "F8_E8M0":
            yield f"wrong type: {scale} is {found.dtype}; scales are F8_E8M0"
        if found.shape != needed:
            yield f"wrong shape: {scale} is {list(found.shape)}, {shown} {list(shape)} ({dtype}) needs {list(needed)}"

    # ------------------------------------------------------------------ tensors

    def fill(self) -> None:
        """Sets `tensors`; the shapes of a tensor made of several are those of its first part."""
        experts = range(self.config.get("n_routed_experts", DeepseekV4DrafterConfig.n_routed_experts))
        for name, ours in single_names(self.stages).items():
            self._add(ours, [[name]])
        for stage in self.stages:
            for ours, maps in EXPERT_NAMES.items():
                parts = [[f"mtp.{stage}.ffn.experts.{e}.{part}.weight" for part in maps] for e in experts]
                self._add(f"layers.{stage}.{ours}", parts)

    def _add(self, name: str, parts: list[list[str]]) -> None:
        """One of the drafter's tensors, made of stored ones: of those of each expert, one below the other, or of one alone."""
        first = parts[0][0]
        (rows, *rest), dtype = self._unpacked(first)
        is_single = len(parts) == len(parts[0]) == 1
        shape = (rows, *rest) if is_single else (len(parts), len(parts[0]) * rows, *rest)
        self._parts[name] = parts
        self.tensors[name] = TensorInfo(shape, dtype, first, self.stored[first].file)

    def _unpacked(self, name: str) -> tuple[Any, str]:
        """Shape and type of a stored tensor when it is unpacked."""
        shape, dtype, *_ = self.stored[name]
        if dtype == "I8":
            shape = (shape[0], 2 * shape[1])
        return shape, dtype if dtype in FLOAT_TYPES else "BF16"

    def read(self, tensors: dict[str, TensorInfo]) -> dict[str, Any]:
        """The given tensors, each unpacked when transformers takes it."""
        return {name: UnpackedLater(self, name, info) for name, info in tensors.items()}

    def unpack(self, name: str) -> torch.Tensor:
        """
        One of the drafter's tensors.

        Raises:
            ValueError: when its parts are not of one shape.
        """
        with self._lock:
            return self._unpack(name)

    def _unpack(self, name: str) -> torch.Tensor:
        parts, (shape, *_) = self._parts[name], self.tensors[name]
        if len(parts) == 1 and len(parts[0]) == 1:
            return self.stored_tensor(parts[0][0])
        whole: torch.Tensor | None = None
        for index, names in enumerate(parts):
            own = [self.stored_tensor(part) for part in names]
            if whole is None:
                whole = own[0].new_empty(shape)
            rows = shape[1] // len(own)
            for place, (part, tensor) in enumerate(zip(names, own, strict=True)):
                if tensor.shape != (rows, shape[2]):
                    raise ValueError(f"{part} is {list(tensor.shape)}, other experts' are {[rows, shape[2]]}.")
                whole[index, place * rows : (place + 1) * rows] = tensor
        assert whole is not None
        return whole

    def stored_tensor(self, name: str) -> torch.Tensor:
        """A tensor of the checkpoint, in bfloat16 where it is quantized there."""
        weight = self._load(name)
        if self.stored[name].dtype in FLOAT_TYPES:
            return weight
        scale = self._load(self.scales[name])
        return unpack_fp4(weight, scale) if self.stored[name].dtype == "I8" else unpack_fp8(weight, scale)

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a stored tensor has the numbers of `tensor`, in its dtype."""
        return name in self.stored and torch.equal(self.stored_tensor(name).to(tensor.dtype), tensor)

    def as_stored(self, name: str) -> dict[str, torch.Tensor]:
        """A tensor of the checkpoint and the scales that belong to it, as they are in the files."""
        return {n: self._load(n) for n in (name, self.scales.get(name)) if n is not None}

    def _load(self, name: str) -> torch.Tensor:
        info = self.stored[name]
        if info.file not in self._files:
            self._files[info.file] = safe_open(info.file, framework="pt")
        tensor: torch.Tensor = self._files[info.file].get_tensor(info.name)
        return tensor


def single_names(stages: list[int]) -> dict[str, str]:
    """The checkpoint's and the drafter's name of every tensor that is one in both."""
    names = {f"mtp.0.{name}": ours for name, ours in FIRST_NAMES.items()}
    names |= {f"mtp.{stages[-1]}.{name}": ours for name, ours in LAST_NAMES.items()}
    for stage in stages:
        names |= {f"mtp.{stage}.{name}": f"layers.{stage}.{ours}" for name, ours in STAGE_NAMES.items()}
    return names


class UnpackedLater:
    """Stands for a tensor until transformers indexes it, as it does with the slices of a safetensors file."""

    def __init__(self, source: EmbeddedDrafter, name: str, info: TensorInfo):
        self.source, self.name, self.info = source, name, info

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.source.unpack(self.name)[index]

    def get_shape(self) -> list[int]:
        return list(self.info.shape)

    def get_dtype(self) -> str:
        return self.info.dtype


def unpack_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FP8 weights `[O, I]` with a scale for each block of 128 x 128, in bfloat16."""
    scale = scale.float().repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (weight.float() * scale[: weight.shape[0], : weight.shape[1]]).to(torch.bfloat16)


def unpack_fp4(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Packed FP4 weights `[O, I / 2]` with a scale for 32 inputs, in bfloat16 `[O, I]`."""
    numbers = fp4_numbers(weight).unflatten(-1, (-1, FP4_BLOCK))
    return (numbers * scale.to(torch.bfloat16)[..., None]).flatten(-2)
