"""The project's own format: what `save_pretrained` of a drafter writes (`model_type` "dspark" or "dspark_eagle3")."""

from __future__ import annotations

from typing import Any

from ..configuration_dspark import DSparkConfig
from ..configuration_eagle3 import Eagle3Config
from .files import TensorInfo

NAME = "dspark-hf"

CONFIGS = {config.model_type: config for config in (DSparkConfig, Eagle3Config)}


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return config.get("model_type") in CONFIGS


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    return CONFIGS[config["model_type"]].from_dict(config)
