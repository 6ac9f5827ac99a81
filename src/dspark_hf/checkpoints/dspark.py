"""The project's own format: what `DSparkDrafter.save_pretrained` writes (`model_type` "dspark")."""

from __future__ import annotations

from typing import Any

from ..configuration_dspark import DSparkConfig
from .files import TensorInfo

NAME = "dspark-hf"


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return config.get("model_type") == DSparkConfig.model_type


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    return DSparkConfig.from_dict(config)
