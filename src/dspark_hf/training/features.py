"""What the drafter reads of the target: tapped hidden states, computed on the fly or read from a cache on disk.

A cache makes training several times faster when it sees its data more than once, and costs about
`2 * (m + 1) * D` bytes a token in bfloat16, `m` the tapped layers. It is a folder:

    index.json              what was cached, and the rows of each shard
    shard-00000.safetensors tokens and features of some rows, one after the other

Shards are written whole and then listed, so a caching run that was stopped goes on after the last whole shard.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from ..configuration_dspark import DSparkConfig
from ..embeddings import SharedEmbeddings, target_embeddings
from ..hidden_states import context_features, output_hidden_states
from .collator import pad_rows

_INDEX = "index.json"
_VERSION = 1


class TargetFeatures(NamedTuple):
    """
    Args:
        context_features (`[B, T, m * D]`): Tapped hidden states, concatenated in the order of the tapped layers.
        last_hidden_states (`[B, T, D]`): After the final norm: what the LM head reads.
    """

    context_features: torch.Tensor
    last_hidden_states: torch.Tensor


@torch.no_grad()
def target_features(target: PreTrainedModel, config: DSparkConfig, input_ids: torch.Tensor) -> TargetFeatures:
    """
    One pass of the target without its LM head.

    There is no attention mask: rows are padded on the right, where a causal target never looks from a token before,
    and without a mask attention takes its faster causal path.

    Args:
        target: The frozen target.
        config: The drafter's; names the tapped layers.
        input_ids: `[B, T]`, padded on the right.

    Raises:
        ValueError: when the target gives no hidden states to tap.
    """
    indices = config.hidden_state_indices
    outputs = target.base_model(
        input_ids=input_ids,
        output_hidden_states=output_hidden_states(indices),
        use_cache=False,
    )
    states, last = outputs.hidden_states, getattr(outputs, "last_hidden_state", None)
    if states is None or last is None:
        raise ValueError(
            f"{type(target.base_model).__name__} gives no hidden states, so there is nothing for a drafter to read. "
            "Load the target with AutoModelForCausalLM."
        )
    return TargetFeatures(context_features(outputs, indices).to(last.device), last)


@torch.no_grad()
def normalizers_and_argmax(
    head: SharedEmbeddings, hidden_states: torch.Tensor, softcap: float | None, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log of the softmax denominator over the full vocabulary, and the most likely token, of `[N, D]` states."""
    normalizers, ids = [], []
    for chunk in hidden_states.split(chunk_size):
        logits = head.target_logits(chunk)  # [n, V]
        if softcap is not None:
            logits = torch.tanh(logits.float() / softcap) * softcap
        ids.append(logits.argmax(dim=-1))
        logits = logits.float()
        top = logits.gather(-1, ids[-1][:, None])
        normalizers.append((logits - top).exp_().sum(dim=-1).log() + top[:, 0])
    if not ids:
        return hidden_states.new_zeros(0, dtype=torch.float32), hidden_states.new_zeros(0, dtype=torch.long)
    return torch.cat(normalizers), torch.cat(ids)


# --------------------------------------------------------------------------------------------------------------- cache


def cache_features(
    target: PreTrainedModel,
    config: DSparkConfig,
    rows: Sequence[dict[str, Any]],
    folder: str | Path,
    batch_size: int = 16,
    shard_rows: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
) -> Path:
    """
    Runs the target once over all rows and keeps what the drafter will read.

    Args:
        target: The target, in the dtype and on the device it is to run in.
        config: The drafter's. With a `draft_vocab_size` each position also keeps the log of the target's softmax
            denominator and its most likely token, so that training needs the logits of the draft vocabulary only.
        rows: `{"input_ids": [T], "loss_mask": [T]}` each.
        folder: Where to write; rows that are there already are not computed again. Rows may be added at the end.
        batch_size: Rows a target pass.
        shard_rows: Rows a file.
        dtype: Of the features on disk.
        progress: Show a progress bar.

    Raises:
        ValueError: when the folder holds features of other taps or other rows, or the disk has no room.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    description = {
        "version": _VERSION,
        "target": target.config.name_or_path,
        "target_layer_ids": list(config.target_layer_ids or []),
        "target_hidden_size": config.target_hidden_size,
        "dtype": str(dtype).removeprefix("torch."),
        "with_normalizers": config.draft_vocab_size is not None,
    }
    index = _read_index(folder) or description | {"shards": []}
    if different := [key for key, value in description.items() if index[key] != value]:
        found = {key: (index[key], description[key]) for key in different}
        raise ValueError(f"'{folder}' holds other features (there, wanted): {found}. Give another folder.")
    done = sum(len(shard["lengths"]) for shard in index["shards"])
    _check_space(folder, config, rows[done:], dtype)
    head = SharedEmbeddings(*target_embeddings(target))
    target.eval()
    with tqdm(total=len(rows), initial=min(done, len(rows)), unit="row", disable=not progress, mininterval=5) as bar:
        start = 0
        for number in range(len(index["shards"]) + -(-max(len(rows) - done, 0) // shard_rows)):
            if number < len(index["shards"]):
                shard = index["shards"][number]
                some = rows[start : start + len(shard["lengths"])]
                if _digest(some) != shard["digest"]:
                    raise ValueError(
                        f"'{folder}/{shard['file']}' was made from other rows than those given: rows may be added at "
                        "the end, not changed. Give another folder."
                    )
                start += len(some)
                continue
            some = rows[start : start + shard_rows]
            tensors = _shard(target, config, head, some, batch_size, dtype, bar)
            name = f"shard-{number:05d}.safetensors"
            save_file(tensors, folder / f"{name}.part")
            os.replace(folder / f"{name}.part", folder / name)
            lengths = [len(row["input_ids"]) for row in some]
            index["shards"].append({"file": name, "lengths": lengths, "digest": _digest(some)})
            _write_index(folder, index)
            start += len(some)
    return folder


class CachedFeatureDataset(Dataset):
    """
    The rows of a feature cache, read from memory-mapped files as they are asked for.

    Args:
        folder: What [`cache_features`] wrote.
        config (`DSparkConfig`, *optional*): The drafter's; checks that the cache holds the layers it taps.

    Raises:
        ValueError: when there is no cache in the folder, or it was made for other taps.
    """

    def __init__(self, folder: str | Path, config: DSparkConfig | None = None):
        self.folder = Path(folder)
        index = _read_index(self.folder)
        if index is None:
            raise ValueError(f"'{folder}' holds no feature cache (no {_INDEX}): make one with cache_features.")
        if config is not None and index["target_layer_ids"] != list(config.target_layer_ids or []):
            raise ValueError(
                f"'{folder}' holds the target layers {index['target_layer_ids']}, but the drafter taps "
                f"{config.target_layer_ids}: cache its features in another folder."
            )
        self.index = index
        self.files = [shard["file"] for shard in index["shards"]]
        self.lengths = [length for shard in index["shards"] for length in shard["lengths"]]
        self.first_rows: list[int] = []
        self.offsets: list[int] = []
        for shard in index["shards"]:
            self.first_rows.append(len(self.offsets))
            offset = 0
            for length in shard["lengths"]:
                self.offsets.append(offset)
                offset += length
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        shard = bisect_right(self.first_rows, row) - 1
        file = self._file(shard)
        begin = self.offsets[row]
        return {key: file.get_slice(key)[begin : begin + self.lengths[row]] for key in file.keys()}

    def _file(self, shard: int):
        if shard not in self._open:
            self._open[shard] = safe_open(self.folder / self.files[shard], framework="pt")
        return self._open[shard]

    def __getstate__(self) -> dict:
        return self.__dict__ | {"_open": {}}  # Workers map the files themselves.


def _shard(target, config, head, rows, batch_size: int, dtype: torch.dtype, bar) -> dict[str, torch.Tensor]:
    """Tokens and features of some rows, one row after the other."""
    softcap = getattr(target.config.get_text_config(decoder=True), "final_logit_softcapping", None)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))  # Rows of like length share a pass.
    found: list[dict[str, torch.Tensor]] = [{} for _ in rows]
    for start in range(0, len(rows), batch_size):
        some = order[start : start + batch_size]
        ids = [torch.as_tensor(rows[i]["input_ids"]).long() for i in some]
        masks = [torch.as_tensor(rows[i]["loss_mask"]).bool() for i in some]
        length = max(1, *(len(row) for row in ids))
        features = target_features(target, config, pad_rows(ids, length).to(target.device))
        loss_mask = pad_rows(masks, length)
        extra: dict[str, torch.Tensor] = {}
        if config.draft_vocab_size is not None:
            # Laws are only ever needed at response tokens: those before a label, anchors included.
            states = features.last_hidden_states[loss_mask.to(target.device)]
            values = normalizers_and_argmax(head, states, softcap)
            extra["log_normalizers"] = torch.zeros(loss_mask.shape).masked_scatter_(loss_mask, values[0].cpu())
            extra["greedy_ids"] = torch.zeros_like(loss_mask, dtype=torch.long).masked_scatter_(
                loss_mask, values[1].cpu()
            )
        for batch_row, i in enumerate(some):
            size = len(ids[batch_row])
            found[i] = {
                "input_ids": ids[batch_row],
                "loss_mask": masks[batch_row],
                "context_features": features.context_features[batch_row, :size].to("cpu", dtype),
                "last_hidden_states": features.last_hidden_states[batch_row, :size].to("cpu", dtype),
                **{key: values[batch_row, :size] for key, values in extra.items()},
            }
        bar.update(len(some))
    return {key: torch.cat([row[key] for row in found]) for key in found[0]}


def _digest(rows: Sequence[dict[str, Any]]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for row in rows:
        for key in ("input_ids", "loss_mask"):
            content.update(torch.as_tensor(row[key]).to(torch.int64).numpy().tobytes())
    return content.hexdigest()


def _check_space(folder: Path, config: DSparkConfig, rows: Sequence[dict[str, Any]], dtype: torch.dtype) -> None:
    states = len(config.target_layer_ids or []) + 1
    token_bytes = states * (config.target_hidden_size or 0) * dtype.itemsize + 32
    needed = token_bytes * sum(len(row["input_ids"]) for row in rows)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"Caching the features of {len(rows)} rows takes {needed / 1e9:.1f} GB, and '{folder}' has "
            f"{free / 1e9:.1f} GB left. Train without a cache: the trainer then computes features as it goes."
        )


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / _INDEX
    return json.loads(path.read_text()) if path.is_file() else None


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    part = folder / f"{_INDEX}.part"
    part.write_text(json.dumps(index))
    os.replace(part, folder / _INDEX)
