"""The kinds of drafter by the `model_type` of their configuration. Each is registered in `dspark_hf/__init__.py`."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, AutoModel

from .configuration_drafter import DrafterConfig

_drafters: dict[str, type[Any]] = {}


def register_kind(drafter: type[Any]) -> None:
    """
    Makes a kind of drafter known to `Drafter.from_pretrained`, to the readers of checkpoints, to `dspark-hf train --kind` and to
    transformers' Auto classes.

    Args:
        drafter: A subclass of [`Drafter`] whose `config_class` is the configuration of that kind.
    """
    config = drafter.config_class
    _drafters[config.model_type] = drafter
    AutoConfig.register(config.model_type, config, exist_ok=True)
    AutoModel.register(config, drafter, exist_ok=True)


def unregister_kind(drafter: type[Any]) -> None:
    """Undoes [`register_kind`], except in transformers' Auto classes, which have no way to remove an entry."""
    del _drafters[drafter.config_class.model_type]


def drafter_class(config: DrafterConfig) -> type[Any]:
    """The class of the drafters with such a configuration."""
    return _drafters[config.model_type]


def config_classes() -> dict[str, type[DrafterConfig]]:
    """The configuration of each kind, by its `model_type`."""
    return {model_type: drafter.config_class for model_type, drafter in _drafters.items()}


def presets() -> dict[str, tuple[type[DrafterConfig], dict[str, Any]]]:
    """The drafters that can be made by name: the configuration of their kind and the fields that the name sets."""
    return {name: (config, fields) for config in config_classes().values() for name, fields in config.presets.items()}
