"""Exports a drafter for other software: writes to a temporary folder, reads back and compares, then moves into place."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..embeddings import target_embeddings
from ..kinds.dspark.configuration_dspark import DSparkConfig
from ..modeling_drafter import DrafterModel
from ..storage.atomic import whole_files
from . import deepseek_v4, deepseek_v4_writing, deepspec, engine_file, engines, modelopt, speculators
from .reading import open_source, read_checkpoint

EXPORT_FORMATS = ("deepspec", "vllm-sglang", "speculators", "modelopt", "deepseek-v4")

FORMAT_NAMES = {
    "deepspec": engines.DEEPSPEC,
    "vllm-sglang": engines.ENGINE_FILE,
    "speculators": engines.SPECULATORS,
    "modelopt": engines.MODELOPT,
    "deepseek-v4": deepseek_v4.NAME,
}

# The engines that each format is written for.
MADE_FOR = {
    "deepspec": ("vLLM", "SGLang"),
    "vllm-sglang": ("vLLM", "SGLang", "llama.cpp"),
    "speculators": ("vLLM", "llama.cpp"),
    "modelopt": ("TensorRT-LLM",),
    "deepseek-v4": (),  # Engines read the drafter out of its target's repository.
}

# The function that lists what the software of a format does not support.
LIMITS: dict[str, Callable[[DSparkConfig], Iterator[str]]] = {
    "deepspec": deepspec.limits,
    "speculators": speculators.limits,
}

# Fields that do not affect what is drafted, so a format need not store them.
DESCRIPTIVE = {
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "has_embed_tokens",
    "has_lm_head",
    "initializer_range",
    "is_causal",  # Compared layer by layer.
    "name_or_path",
    "_name_or_path",
    "num_target_layers",
    "pad_token_id",
    "target_name_or_path",
    "transformers_version",
}

EMBEDDINGS = ("embed_tokens.weight", "lm_head.weight")


@dataclass
class Export:
    """
    The result of an export. `str()` gives a summary.

    Args:
        path: The folder that was written.
        format: The format's key, one of `EXPORT_FORMATS`.
        launch: The launch command of each engine that can serve the drafter.
        refused: For each engine that cannot, the reasons.
        notes: Remarks about the files.
    """

    path: Path
    format: str
    launch: dict[str, str]
    refused: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"Wrote {self.path} ({self.format})."]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [
            f"  {engine} ({engines.evidence(engine, FORMAT_NAMES[self.format])}): {command}"
            for engine, command in self.launch.items()
        ]
        lines += [f"  not for {engine}: {'; '.join(reasons)}" for engine, reasons in self.refused.items()]
        return "\n".join(lines)


def export(drafter: DrafterModel, dst: Any, format: str) -> Export:
    """
    Writes a drafter in a public format. Before the files appear at `dst`, they are read back and compared with the drafter, bit
    for bit.

    ```python
    >>> print(dspark_hf.checkpoints.export(drafter, "my-drafter", format="vllm-sglang"))  # doctest: +SKIP
    ```

    Args:
        drafter ([`Drafter`]): The drafter. Files in the deepspec format, and those with a reduced draft vocabulary, contain
            the target's embedding or LM head, so call `drafter.bind(target)` first.
        dst: A folder that does not exist or is empty.
        format (`str`):
            `"deepspec"` for DeepSpec, `"vllm-sglang"` for one file that both engines load, `"speculators"` for vLLM and the
            speculators package, `"modelopt"` for TensorRT-LLM, `"deepseek-v4"` for the drafter of a DeepSeek-V4 checkpoint
            without its target, with the quantized weights of the checkpoint where they are unchanged.

    Returns:
        [`Export`], with the launch command of each engine, or the reasons why an engine cannot serve the drafter.

    Raises:
        ValueError: when the format cannot hold this drafter, or none of the engines it is for can serve it.
        FileExistsError: when `dst` is a folder that is not empty.
    """
    if format not in EXPORT_FORMATS:
        raise ValueError(f"format must be one of {EXPORT_FORMATS}, got {format!r}.")
    dst = Path(dst)
    if dst.exists() and (not dst.is_dir() or any(dst.iterdir())):
        raise FileExistsError(f"{dst} already holds something: choose a new folder.")
    drafter.check_values(drafter.config.name_or_path or type(drafter).__name__)
    check_servable(drafter.config, dst, format)
    if format == "deepseek-v4":
        with whole_files(dst) as part:
            deepseek_v4_writing.write(drafter, part, original(drafter))
        return report(drafter, dst, format)
    config, tensors = contents(drafter, format)
    with whole_files(dst) as part:
        (part / CONFIG_NAME).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        save_file(tensors, part / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
        check_written(drafter, part, format)
    return report(drafter, dst, format)


def check_servable(config: Any, dst: Path, format: str) -> None:
    """Raises `ValueError` when the software of a format does not support this drafter, or none of its engines can serve it."""
    if format not in config.export_formats:
        raise ValueError(
            f"The {format} format cannot hold {config.method} drafters: leave format= out to save it for this library."
        )
    if format in LIMITS and (unknown := list(LIMITS[format](config))):
        raise ValueError(
            f"The {format} format cannot hold this drafter:\n" + "\n".join(f"- {part}" for part in unknown)
        )
    reasons = engines.obstacles(config, FORMAT_NAMES[format])
    made_for = [engine for engine in MADE_FOR[format] if engine != "llama.cpp"]
    if format in ("vllm-sglang", "modelopt") and all(reasons[engine] for engine in made_for):
        listed = "\n".join(f"- {engine}: {reason}" for engine in made_for for reason in reasons[engine])
        raise ValueError(f"No engine that reads {format} files can serve this drafter:\n{listed}")
    if format == "vllm-sglang" and config.markov_rank and any(word in dst.name.lower() for word in ("dflash", "eagle")):
        raise ValueError(
            f"vLLM chooses the kind of drafter by the folder's name, {dst.name!r}: choose a name without 'dflash' or 'eagle'."
        )


def original(drafter: DrafterModel) -> deepseek_v4.EmbeddedDrafter | None:
    """The part of a DeepSeek-V4 checkpoint that a drafter was loaded from, if it is still on this machine."""
    if drafter.config.target_name_or_path is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        source, _ = open_source(drafter.config.target_name_or_path, {"local_files_only": True})
        return source if isinstance(source, deepseek_v4.EmbeddedDrafter) else None
    return None


def contents(drafter: DrafterModel, format: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The `config.json` and the tensors to write."""
    config: Any = drafter.config  # Of a kind that the format supports.
    if format == "deepspec" or config.draft_vocab_size:
        drafter = owning(drafter)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    if format != "deepspec":
        # Engines and speculators use the target's; only a head for a reduced vocabulary is stored.
        dropped = EMBEDDINGS[:1] if config.draft_vocab_size else EMBEDDINGS
        check_dropped(drafter, dropped)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in dropped}
    if (ids := tensors.pop("draft_token_ids", None)) is not None:
        if (ids.diff() <= 0).any():
            raise ValueError("The draft vocabulary is not in ascending order, which readers of d2t and t2d expect.")
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if format == "modelopt":
        tensors = {modelopt.their_name(name): tensor for name, tensor in tensors.items()}
    if format == "speculators":
        written = speculators.write_config(config, target_architectures(drafter))
    else:
        written = {"deepspec": deepspec, "vllm-sglang": engine_file, "modelopt": modelopt}[format].write_config(config)
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values() if tensor.is_floating_point()}
    if len(dtypes) > 1:
        raise ValueError(
            f"Engines need one dtype for all weights, this drafter has {sorted(dtypes)}: call drafter.to(torch.bfloat16)."
        )
    return {name: value for name, value in written.items() if value is not None} | {"dtype": dtypes.pop()}, tensors


def owning(drafter: DrafterModel) -> DrafterModel:
    """
    The drafter, or a shallow copy that contains the embedding and LM head it borrows.

    Raises:
        ValueError: when they are neither in the drafter nor bound.
    """
    if drafter.lm_head is not None and (drafter.embed_tokens is not None or drafter.config.draft_vocab_size):
        return drafter
    return drafter.owning_embeddings()


def check_dropped(drafter: DrafterModel, names: tuple[str, ...]) -> None:
    """
    Raises `ValueError` when an embedding or LM head of the drafter would be left out although the target's differs. That is
    only known for a drafter that was bound to its target. The formats assume that they are frozen copies.
    """
    if (target := drafter.bound_target) is None:
        return
    for name, theirs in zip(EMBEDDINGS, target_embeddings(target), strict=True):
        ours = drafter.state_dict().get(name)
        if name not in names or ours is None:
            continue
        if not isinstance(theirs.weight, torch.Tensor) or not torch.equal(ours, theirs.weight.to(ours)):
            raise ValueError(
                f"The drafter's {name} differs from its target's, but engines would use the target's. Load the drafter with "
                "borrow_embeddings=True if that is intended, or write the deepspec format, which keeps it."
            )


def target_architectures(drafter: DrafterModel) -> list[str]:
    target = drafter.bound_target
    return [] if target is None else list(target.config.architectures or [type(target).__name__])


def check_written(drafter: DrafterModel, folder: Path, format: str) -> None:
    """
    Reads a written folder back and compares it with the drafter.

    Raises:
        ValueError: with a list of what the format changed about the drafter, or could not store.
    """
    checkpoint = read_checkpoint(folder, None, {})
    with torch.device("meta"):
        expected = {name: tuple(t.shape) for name, t in type(drafter)(checkpoint.config).state_dict().items()}
    checkpoint.check_tensors(expected)
    problems = list(differences(drafter.config, checkpoint.config))
    tensors = checkpoint.read_tensors(set(checkpoint.tensors))
    for name, ours in drafter.state_dict().items():
        if name in tensors and not _same_bits(ours.detach().cpu(), tensors[name]):
            problems.append(f"{name} did not come back bit for bit")
        elif name not in tensors and name not in EMBEDDINGS:
            problems.append(f"it cannot store {name}")
    if format != "speculators":
        problems += list(_parse_problems(folder, drafter.config))
    engines_agree = format == "speculators" and drafter.config.tap_before_norm
    layers = drafter.config.num_target_layers
    if layers and max(drafter.config.target_layer_ids or [-1]) > layers - 2 and not engines_agree:
        problems.append(
            f"the target's last layer ({layers - 1}) is tapped, which engines read before or after its final norm"
        )
    with safe_open(folder / SAFE_WEIGHTS_NAME, framework="pt") as opened:
        if (opened.metadata() or {}).get("format") != "pt":
            problems.append("the metadata of the safetensors file does not say that it is PyTorch's")
    if problems:
        raise ValueError(f"The {format} format cannot hold this drafter:\n" + "\n".join(f"- {p}" for p in problems))


def differences(ours: Any, read: Any) -> Iterator[str]:
    """The fields that were read back with other values and affect what is drafted."""
    first, second = ours.to_dict(), read.to_dict()
    for name in sorted(first.keys() - DESCRIPTIVE):
        if first[name] != second.get(name) and not _both_unused(name, ours):
            yield f"{name}={first[name]!r} would be read as {second.get(name)!r}"
    causal, again = ([config.layer_is_causal(i) for i in range(config.num_hidden_layers)] for config in (ours, read))
    if causal != again:
        yield f"causal layers {causal} would be read as {again}"


def _both_unused(name: str, config: DSparkConfig) -> bool:
    """Whether a field has no effect in this drafter."""
    return {
        "markov_head_type": not config.markov_rank,
        "confidence_head_with_markov": not config.enable_confidence_head,
        "tap_before_norm": max(config.target_layer_ids) != (config.num_target_layers or 0) - 1,
        "sliding_window": "sliding_attention" not in (config.layer_types or ()),
    }.get(name, False)


def _parse_problems(folder: Path, config: Any) -> Iterator[str]:
    """Problems when the file is read by transformers' configuration classes, as engines do."""
    parsed = AutoConfig.from_pretrained(folder)
    if "sliding_attention" in (config.layer_types or ()) and parsed.sliding_window != config.sliding_window:
        yield f"sliding_window={config.sliding_window} is read as {parsed.sliding_window}"
    rope, ours = parsed.rope_parameters, config.rope_parameters or {}
    theta = rope.get("full_attention", rope).get("rope_theta")
    if theta != ours["rope_theta"]:
        yield f"rope_theta={ours['rope_theta']} is read as {theta}"


def report(drafter: DrafterModel, dst: Path, format: str) -> Export:
    config = drafter.config
    reasons = engines.obstacles(config, FORMAT_NAMES[format])
    made_for = MADE_FOR[format]
    notes = []
    if format != "deepspec" and drafter.embed_tokens is not None:
        notes.append(
            "the drafter's copies of its target's embedding and LM head are left out; engines use the target's"
        )
    if drafter.dtype != torch.bfloat16:
        notes.append(f"weights are {str(drafter.dtype).removeprefix('torch.')}; engines run bfloat16, half the size")
    if not config.sample_from_anchor:
        notes.append(
            f"the anchor predicts nothing: a block of {config.block_size} gives {config.num_draft_tokens} drafts"
        )
        if format == "vllm-sglang":
            notes.append("needs SGLang 0.5.19 or newer")
    if format == "speculators" and config.sample_from_anchor:
        notes.append("needs vLLM 0.27 or newer; older versions assume that the anchor's slot predicts nothing")
    if config.num_target_layers is None:
        notes.append(
            "the target's number of layers is unknown, so it could not be checked that its last layer is not tapped"
        )
    return Export(
        path=dst,
        format=format,
        launch={e: engines.launch_command(e, config, dst) for e in made_for if not reasons[e]},
        refused={e: reasons[e] for e in reasons if reasons[e] and e in {*made_for, "vLLM", "SGLang"}},
        notes=notes,
    )


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8))
