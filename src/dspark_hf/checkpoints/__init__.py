"""Drafter checkpoints: one module a public format, and the reading they share.

A format module has `recognise(config, tensor_names)` and `read_config(config, tensor_names)`. Formats are tried in
order; what the file holds decides before what it is called.
"""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ..configuration_dspark import DSparkConfig
from . import dspark, native
from .files import Checkpoint, read_generation_settings, read_tensor_index

FORMATS = (dspark, native)

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")


def read_checkpoint(path: Any, config: DSparkConfig | None, kwargs: dict[str, Any]) -> Checkpoint:
    """
    Finds a checkpoint, recognises its format and reads its configuration and tensor index; no weights are read.

    Args:
        path: Folder or Hub repository.
        config: Used instead of the checkpoint's own configuration.
        kwargs: Arguments of `from_pretrained`, of which those that choose a file on the Hub are used.

    Raises:
        OSError: when the configuration or the safetensors file cannot be found or read.
        ValueError: when no known format fits.
    """
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
    raw, _ = PreTrainedConfig.get_config_dict(path, **hub)
    if not raw:
        raise OSError(f"{path} has no config.json, so it is not a drafter checkpoint.")
    tensors = read_tensor_index(path, hub)
    if config is None:
        reader = next((fmt for fmt in FORMATS if fmt.recognise(raw, tensors.keys())), None)
        if reader is None:
            raise ValueError(
                f"{path} is not a DSpark drafter in a format known here: model_type={raw.get('model_type')!r}, "
                f"architectures={raw.get('architectures')}. Known: dspark_hf's own (model_type 'dspark') and DeepSpec's "
                f"({', '.join(native.ARCHITECTURES)})."
            )
        config = reader.read_config(raw, tensors.keys())
        config.name_or_path = str(path)
    return Checkpoint(path, config, tensors, read_generation_settings(path, hub))
