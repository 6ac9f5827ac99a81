"""Training and held-out rows, from conversations in files or data sets, or from cached features."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from accelerate import PartialState
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..configuration_drafter import DrafterConfig
from ..conversations.prompts import read_prompts
from ..conversations.rows import encode_rows, end_token_ids
from .features import CachedFeatureDataset, file_sha256


@dataclass
class TrainingData:
    """
    One source of training rows.

    Args:
        name: The file, data set or folder.
        rows: Rows with `input_ids` and `loss_mask`, and features if they are cached.
        sha256: Hash of the file, or of a cache's index; `None` for a data set on the Hub.
    """

    name: str
    rows: Any
    sha256: str | None = None

    def tokens(self, index: int) -> dict[str, torch.Tensor]:
        """`input_ids` and `loss_mask` of a row, `[T]` each, without reading its features."""
        row = self.rows.tokens(index) if isinstance(self.rows, CachedFeatureDataset) else self.rows[index]
        return {"input_ids": torch.as_tensor(row["input_ids"]).long(), "loss_mask": torch.as_tensor(row["loss_mask"])}

    def split(self, share: float) -> tuple[list[int], list[int]]:
        """Indices of the rows to train on and of those held out."""
        held_out = [is_held_out(self.tokens(index), share) for index in range(len(self.rows))]
        return [i for i, held in enumerate(held_out) if not held], [i for i, held in enumerate(held_out) if held]

    def summary(self, indices: Sequence[int]) -> dict[str, Any]:
        """A description of these rows for the model card."""
        learned = sum(int(self.tokens(index)["loss_mask"].sum()) for index in indices)
        return {"name": self.name, "sha256": self.sha256, "rows": len(indices), "response_tokens": learned}


def is_held_out(row: dict[str, torch.Tensor], share: float) -> bool:
    """
    Whether a conversation belongs to the `share` that is held out. It depends on the tokens before the first response only, so
    all answers to one prompt are treated the same, whatever file, order or cache they are in.
    """
    if not share:
        return False
    learned = row["loss_mask"].bool().nonzero()
    prompt = row["input_ids"][: int(learned[0]) if len(learned) else None]
    digest = hashlib.blake2b(prompt.to(torch.int64).numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def encode_source(
    source: str,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    split: str = "train",
    template_options: Mapping[str, Any] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Token ids and loss masks of the rows of a JSONL file or a data set on the Hub."""
    rows = read_prompts(source, split=split)
    return encode_rows(rows, tokenizer, max_length, end_token_ids(target, tokenizer) or None, **template_options)


def load_source(source: str, config: DrafterConfig | None = None, **encoding: Any) -> TrainingData:
    """
    Loads a feature cache, a JSONL file or a data set on the Hub.

    Args:
        source: Path or name.
        config: The drafter's configuration, to check that a cache fits.
        encoding: Additional arguments of [`encode_source`].

    Raises:
        ValueError: when the source does not exist or has no rows, or a cache is damaged or for another drafter or target.
    """
    path = Path(source)
    if is_cache(source):
        cached = CachedFeatureDataset(path, config)
        if PartialState().is_local_main_process:
            cached.verify()
        if (target := encoding.get("target")) is not None:
            cached.check_target(target)
        return TrainingData(source, cached, file_sha256(path / "index.json"))
    if path.is_dir():
        raise ValueError(
            f"'{source}' is a folder without index.json, so it is not a feature cache. Give a file or a cache."
        )
    rows = encode_source(source, **encoding)
    if not rows:
        raise ValueError(f"'{source}' holds no row with a response of two tokens within max_length.")
    return TrainingData(source, rows, file_sha256(path) if path.is_file() else None)


def check_source(source: str, split: str = "train") -> None:
    """
    Checks a source as far as possible before the target is loaded.

    Raises:
        ValueError: when the source does not exist, or has no rows.
    """
    if is_cache(source):
        return
    if Path(source).is_dir():
        raise ValueError(
            f"'{source}' is a folder without index.json, so it is not a feature cache. Give a file or a cache."
        )
    if next(iter(read_prompts(source, split=split)), None) is None:
        raise ValueError(f"'{source}' holds no rows.")


def is_cache(source: str) -> bool:
    """Whether a source is a folder of cached features."""
    return (Path(source) / "index.json").is_file()


def cache_index(source: str) -> dict[str, Any]:
    """The index of a feature cache."""
    return json.loads((Path(source) / "index.json").read_text(encoding="utf-8"))


def joined(sources: Sequence[TrainingData], chosen: Sequence[Sequence[int]]) -> Dataset[Any] | None:
    """The chosen rows of all sources as one data set; `None` if there are none."""
    parts = [Subset(_Rows(source.rows), list(some)) for source, some in zip(sources, chosen, strict=True) if some]
    return ConcatDataset(parts) if parts else None


class _Rows(Dataset[Any]):
    """Makes a `Dataset` of a sequence."""

    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]
