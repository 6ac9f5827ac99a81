"""This project's format, which `save_pretrained` writes for drafters of every kind."""

from __future__ import annotations

from typing import Any

from ..configuration_drafter import DrafterConfig
from ..registry import config_classes
from .files import TensorInfo

NAME = "dspark-hf"


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    return config.get("model_type") in config_classes()


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DrafterConfig:
    return config_classes()[config["model_type"]].from_dict(config)
