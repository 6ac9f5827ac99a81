"""Writes the drafter of a DeepSeek-V4 checkpoint as such a checkpoint holds it, without the target."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from ..kinds.deepseek_v4.configuration_deepseek_v4 import LAYER_FIELDS, DeepseekV4DrafterConfig
from ..modeling_drafter import DrafterModel
from .deepseek_v4 import EXPERT_NAMES, FIXED, EmbeddedDrafter, open_tensors, read_config, single_names
from .files import read_tensor_index

# Fields of the same name in a target's configuration, beside those of the layers.
SAME_FIELDS = (
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "qk_rope_head_dim",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "target_name_or_path",
    "confidence_temperatures",
)
# What has to be read back as it was.
WRITTEN_FIELDS = (
    *LAYER_FIELDS,
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "rms_norm_eps",
    "qk_rope_head_dim",
    "block_size",
    "mask_token_id",
    "sample_from_anchor",
    "target_layer_ids",
    "num_target_layers",
    "markov_rank",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_temperatures",
    "embedding_scale",
    "logit_scale",
    "final_logit_softcapping",
)


def write_config(config: DeepseekV4DrafterConfig) -> dict[str, Any]:
    """A target's configuration, as far as the drafter depends on it."""
    written = config.named((*LAYER_FIELDS, *SAME_FIELDS))
    written |= FIXED | {
        "model_type": "deepseek_v4",
        "architectures": ["DeepseekV4ForCausalLM"],
        "num_hidden_layers": config.num_target_layers,
        "dspark_block_size": config.block_size,
        "dspark_noise_token_id": config.mask_token_id,
        "dspark_target_layer_ids": config.target_layer_ids,
        "dspark_markov_rank": config.markov_rank,
    }
    return {name: value for name, value in written.items() if value is not None}


def their_tensors(drafter: DrafterModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The drafter's tensors under the names of the checkpoints, one expert's map at a time."""
    stages, state = list(range(drafter.config.num_hidden_layers)), drafter.state_dict()
    yield from ((name, state[ours]) for name, ours in single_names(stages).items())
    for s in stages:
        for ours, maps in EXPERT_NAMES.items():
            for e, whole in enumerate(state[f"layers.{s}.{ours}"]):
                parts = zip(maps, whole.chunk(len(maps)), strict=True)
                yield from ((f"mtp.{s}.ffn.experts.{e}.{part}.weight", tensor) for part, tensor in parts)


def write(drafter: DrafterModel, part: Path, source: EmbeddedDrafter | None) -> None:
    """
    Writes a drafter's part of a checkpoint, and reads it back.

    Args:
        drafter: A drafter of this kind.
        part: The temporary folder to write to, see [`~dspark_hf.storage.atomic.whole_files`].
        source: The checkpoint it was loaded from. Weights that are still those of it are written as they are there, quantized;
            all others, and without a source all, in the drafter's dtype.

    Raises:
        ValueError: when the format has no place for what the drafter has.
    """
    config: Any = drafter.config
    known = config.num_target_layers is not None and config.markov_rank and config.enable_confidence_head
    if not known or config.draft_vocab_size or config.has_lm_head or config.has_embed_tokens:
        raise ValueError(
            "DeepSeek-V4's format has a Markov head, a confidence head, its target's embedding, LM head and vocabulary, and the "
            "number of its target's layers. This drafter differs: leave format= out to save it for this library."
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in their_tensors(drafter):
        tensor = tensor.detach().cpu()
        if source is not None and source.holds(name, tensor):
            tensors |= source.as_stored(name)
        else:
            tensors[name] = tensor.contiguous()
    written = write_config(config) | {"dtype": str(drafter.dtype).removeprefix("torch.")}
    (part / CONFIG_NAME).write_text(json.dumps(written, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    save_file(tensors, part / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
    infos = read_tensor_index(part, None, {})
    read = open_tensors(part, written, infos)
    again, ours = read_config(read.config, read.tensors).to_dict(), config.to_dict()
    changed = [f"{n}={ours[n]!r} would be read as {again.get(n)!r}" for n in WRITTEN_FIELDS if ours[n] != again.get(n)]
    changed += [
        f"{name} did not come back" for name, tensor in their_tensors(drafter) if not read.holds(name, tensor.cpu())
    ]
    if changed:
        raise ValueError("DeepSeek-V4's format cannot hold this drafter:\n" + "\n".join(f"- {c}" for c in changed))
