"""Training a drafter: features, losses and the trainer. Each name is documented in its module."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "CachePlan": ".features",
    "CachedFeatureDataset": ".features",
    "DSparkCollator": ".collator",
    "DSparkTrainer": ".trainer",
    "DSparkTrainingArguments": ".arguments",
    "add_lora": ".adaptation",
    "cache_features": ".features",
    "encode_rows": "..conversations",
    "select_draft_vocabulary": ".draft_vocab",
    "set_draft_vocabulary": ".draft_vocab",
    "warm_start": ".adaptation",
}
__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    # Imported on demand, because `dspark-hf regenerate` does not need the trainer, which takes long to import.
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_EXPORTS[name], __name__), name)
