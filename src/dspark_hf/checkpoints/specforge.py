"""SpecForge's DSpark checkpoints (`RadixArk/*-DSpark`): z-lab's layout with heads, and with an anchor that predicts.

The drafter's fields are in `dflash_config`. In files of early versions, the heads' tensors have the prefix `logit_head.`.
"""

from __future__ import annotations

from typing import Any

from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import Fields, flat_config
from .files import TensorInfo

NAME = "SpecForge"


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return "DSparkDraftModel" in (config.get("architectures") or ())


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    fields = Fields(config)
    options: dict[str, Any] = {}
    # Some files only have the loss weight of the confidence head: the head exists if that was not zero.
    alpha = fields.get("confidence_head_alpha")
    if fields.get("enable_confidence_head") is None and alpha is not None and not alpha > 0:
        options["enable_confidence_head"] = False
    return flat_config(config, tensors, sample_from_anchor=True, **options)
