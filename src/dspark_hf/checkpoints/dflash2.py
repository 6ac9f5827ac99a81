"""DFlash2 checkpoints: z-lab's and incoai's (`DFlash2DraftModel`), and those of the speculators package."""

from __future__ import annotations

from typing import Any

from ..kinds.dflash2.configuration_dflash2 import DFlash2Config
from ..kinds.dspark.configuration_dspark import DSparkConfig
from .fields import Fields, flat_config
from .files import TensorInfo
from .speculators import flattened

NAME = "DFlash2"
TENSOR = "candidate_selector.predecessor_codebook"

OWN_FIELDS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    named = "DFlash2DraftModel" in (config.get("architectures") or ())
    return named or config.get("speculators_model_type") == "dflash2" or TENSOR in tensors


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> DSparkConfig:
    """
    Raises:
        ValueError: when a size of the convolutions or of the selector is missing: none can be guessed but from the tensors.
    """
    options: dict[str, Any] = {}
    if config.get("speculators_model_type") is not None:
        # Unlike in DFlash files, sliding layers are not causal unless the file says so.
        options["is_causal"] = False if config.get("sliding_window_non_causal", True) else None
        config = flattened(config)
    fields = Fields(config)
    own = {name: fields.get(name) for name in OWN_FIELDS}
    if missing := [name for name, value in own.items() if value is None]:
        raise ValueError(f"The drafter's configuration lacks {', '.join(missing)}.")
    return flat_config(config, tensors, DFlash2Config, sample_from_anchor=False, **own, **options)
