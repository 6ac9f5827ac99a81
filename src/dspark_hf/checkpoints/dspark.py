"""The project's own format: what `DSparkDrafter.save_pretrained` writes (`model_type` "dspark")."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ..configuration_dspark import DSparkConfig


def recognise(config: dict[str, Any], tensor_names: Collection[str]) -> bool:
    return config.get("model_type") == DSparkConfig.model_type


def read_config(config: dict[str, Any], tensor_names: Collection[str]) -> DSparkConfig:
    return DSparkConfig.from_dict(config)
