"""z-lab's DFlash checkpoints (`z-lab/*-DFlash*`): only the backbone, used with the target's embedding and LM head.

The anchor's slot predicts nothing: a block of 16 gives 15 drafts. Embedding rows are not scaled, even for targets that scale
them. Fields may be at the top level or in `dflash_config`, which has priority.

Some of these files have a sequential head. These are DSpark drafters, whose anchor predicts.
"""

from __future__ import annotations

from typing import Any

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import Fields, flat_config, rotation
from .files import TensorInfo

NAME = "z-lab DFlash"

# MiMo drafters store the vector of their masked slots in a pickle file.
MASK_PICKLE = "mask_embedding.pt"
MASK_ADVICE = (
    "Pickle files are not read, since they can run code when they are opened. If you trust it, put the vector beside the weights "
    'with `python -c "import glob, torch; from safetensors.torch import load_file, save_file; w = {k: v.clone() for f in '
    "glob.glob('*.safetensors') for k, v in load_file(f).items()}; m = torch.load('mask_embedding.pt', map_location='cpu', "
    "weights_only=True); w['mask_embedding.weight'] = (m['embedding'] if isinstance(m, dict) else m).flatten().clone(); "
    "save_file(w, 'model.safetensors', {'format': 'pt'})\"`"
)


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return "DFlashDraftModel" in (config.get("architectures") or ())


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    has_head = any(name.startswith("markov_head.") for name in tensors) or bool(Fields(config).get("markov_rank"))
    # MiMo's layers, recognised by their value_scale, really rotate a part of the head; elsewhere the factor was just copied.
    rope = rotation(config, keep_partial=is_mimo(config))
    return flat_config(config, tensors, sample_from_anchor=has_head, block_size=16, rope_parameters=rope)


def is_mimo(config: dict[str, Any]) -> bool:
    return Fields(config).get("attention_value_scale") is not None
