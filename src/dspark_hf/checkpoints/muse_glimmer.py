"""transformers' DFlash drafter, `MuseGlimmerAssistantModel`: z-lab's method with different names.

Its layers have a sliding window and are bidirectional within a block. It uses the stored embedding rows of the target, without
the norm that the target's embedding module applies.
"""

from __future__ import annotations

from typing import Any

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import flat_config
from .files import TensorInfo

NAME = "transformers DFlash"

NAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return "MuseGlimmerAssistantModel" in (config.get("architectures") or ())


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    return flat_config(config, tensors, sample_from_anchor=False, is_causal=False, raw_embeddings=True)
