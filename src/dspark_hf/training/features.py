"""The target's features for training: tapped hidden states, computed on the fly or read from a cache on disk.

A cache makes training for several epochs several times faster, and takes about `2 * (m + 1) * D` bytes per token in bfloat16
for `m` tapped layers. It is a folder:

    index.json              a description of the contents, and the rows of each shard
    shard-00000.safetensors tokens and features of some rows, concatenated

[`CachePlan`] can leave out features that training does not use. A shard is added to the index when it is complete, so an
interrupted run resumes after the last complete shard.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset
from tqdm import tqdm
from transformers import PreTrainedModel

from ..configuration_drafter import DrafterConfig
from ..embeddings import SharedEmbeddings, target_embeddings
from ..storage.atomic import whole_file, write_text
from ..storage.single_writer import single_writer
from ..tapping import Tap
from ..target_config import num_decoder_layers
from ..transformers_names import compute_device
from .anchors import counted_drafts, draft_positions, row_generator, sample_anchors, stack_anchors
from .collator import pad_rows
from .target_logits import LogitRule, logit_rule

POSITIONS = ("all", "response", "anchors")
CHECKED_TOKENS = 64  # Tokens of a cached row that are compared, to find out whether the features are the target's.
MAX_DIFFERENCE = 0.25  # Other dtypes and quantization differ by far less, other models by more.
_INDEX = "index.json"
_VERSION = 1
# Features at the positions whose distributions drafts are compared with.
_COMPARED_KEYS = ("last_hidden_states", "log_normalizers", "greedy_ids")


class TargetFeatures(NamedTuple):
    """
    Args:
        context_features (`[B, T, m * D]`): Tapped hidden states, concatenated in the order of the tapped layers.
        last_hidden_states (`[B, T, D]`): After the final norm: the input of the LM head.
    """

    context_features: torch.Tensor
    last_hidden_states: torch.Tensor


@torch.no_grad()
def target_features(target: PreTrainedModel, indices: list[int], input_ids: torch.Tensor) -> TargetFeatures:
    """
    One pass of the target without its LM head.

    No attention mask is passed: rows are padded on the right, so a causal target never attends to padding, and attention is
    faster without a mask.

    Args:
        target: The frozen target.
        indices: Entries of `hidden_states` that the drafter reads.
        input_ids: `[B, T]`, padded on the right.

    Raises:
        ValueError: when the target gives no hidden states to tap.
    """
    tap = Tap(target, indices)
    with tap.reading():
        outputs = target.base_model(input_ids=input_ids, output_hidden_states=tap.argument, use_cache=False)
    states, last = outputs.hidden_states, outputs.get("last_hidden_state")
    if states is None or last is None:
        raise ValueError(
            f"{type(target.base_model).__name__} gives no hidden states, so there is nothing for a drafter to read. "
            "Load the target with AutoModelForCausalLM."
        )
    return TargetFeatures(tap.features(outputs).to(last.device), last)


@torch.no_grad()
def normalizers_and_argmax(
    head: SharedEmbeddings, hidden_states: torch.Tensor, rule: LogitRule, chunk_size: int = 128
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log of the softmax denominator over the full vocabulary, and the most likely token, for states `[N, D]`."""
    normalizers, ids = [], []
    for chunk in hidden_states.split(chunk_size):
        logits = rule(head.target_logits(chunk))  # [n, V]
        ids.append(logits.argmax(dim=-1))
        top = logits.gather(-1, ids[-1][:, None])
        normalizers.append((logits - top).exp_().sum(dim=-1).log() + top[:, 0])
    if not ids:
        return hidden_states.new_zeros(0, dtype=torch.float32), hidden_states.new_zeros(0, dtype=torch.long)
    return torch.cat(normalizers), torch.cat(ids)


# --------------------------------------------------------------------------------------------------- what is to be kept


@dataclass(frozen=True)
class CachePlan:
    """
    Decides for which positions of a row features are kept, and so how large a cache is.

    In any case, training uses exactly the features that it would compute on the fly; only features that no block uses are left
    out.

    Args:
        config: The drafter's configuration.
        dtype: Dtype of the features on disk: bfloat16, float16 or float32.
        positions: `"all"`; `"response"` leaves out the last hidden states of prompts, which no draft is compared with;
            `"anchors"` chooses the anchors once, so that every epoch has the same blocks, and keeps last hidden states at
            their drafts and context features up to the last anchor.
        num_anchors: Anchors per row, for `"anchors"`.
        seed: Seed of the anchors, for `"anchors"`.

    Raises:
        ValueError: for other values of `positions` or `dtype`.
    """

    config: DrafterConfig
    dtype: torch.dtype = torch.bfloat16
    positions: str = "all"
    num_anchors: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise ValueError(f"positions is {self.positions!r}; give one of {', '.join(POSITIONS)}.")
        if not self.dtype.is_floating_point:
            raise ValueError(f"Features cannot be kept as {self.dtype}: give bfloat16, float16 or float32.")

    def anchor_mask(self, row: Mapping[str, Any]) -> torch.Tensor | None:
        """The fixed anchors of a row, bool `[T]`; `None` if they are drawn in every epoch."""
        if self.positions != "anchors":
            return None
        ids, loss_mask = _tokens(row)
        mask = torch.zeros_like(loss_mask)
        mask[sample_anchors(loss_mask, self.num_anchors, row_generator(self.seed, 0, ids))] = True
        return mask

    def compared_mask(self, loss_mask: torch.Tensor, anchor_mask: torch.Tensor | None) -> torch.Tensor:
        """Positions whose last hidden state is kept, bool `[T]`."""
        if self.positions == "all":
            return torch.ones_like(loss_mask)
        if anchor_mask is None:
            return loss_mask
        anchors = stack_anchors([anchor_mask.nonzero().squeeze(-1)])
        drafts = self.config.num_draft_tokens
        counted = counted_drafts(loss_mask[None], anchors, drafts)
        kept = torch.zeros_like(loss_mask)
        kept[draft_positions(anchors, drafts)[counted]] = True
        return kept

    def context_length(self, length: int, anchor_mask: torch.Tensor | None) -> int:
        """Positions whose context features are kept: those before the last anchor, or all `length`."""
        if anchor_mask is None:
            return length
        found = anchor_mask.nonzero()
        return int(found.max()) if len(found) else 0

    def description(self, target_name: str) -> dict[str, Any]:
        """What has to be the same for all rows of a cache; `target_name` is the name it was loaded by."""
        config = self.config
        description = {
            "version": _VERSION,
            "target": target_name,
            "target_layer_ids": list(config.target_layer_ids or []),
            "target_hidden_size": config.target_hidden_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "with_normalizers": config.draft_vocab_size is not None,
            "positions": self.positions,
        }
        if config.taps_unnormed_state:
            description["tap_before_norm"] = True
        if self.positions == "anchors":
            description |= {"num_anchors": self.num_anchors, "seed": self.seed, "num_drafts": config.num_draft_tokens}
        return description

    def num_bytes(self, rows: Iterable[Mapping[str, Any]]) -> int:
        """Bytes on disk of the features of rows, without headers and the index."""
        return sum(self._row_bytes(row) for row in rows)

    def _row_bytes(self, row: Mapping[str, Any]) -> int:
        config, loss_mask, anchor_mask = self.config, _tokens(row)[1], self.anchor_mask(row)
        token_bytes = 9 if anchor_mask is None else 10  # The token id and its masks.
        state_bytes = (config.target_hidden_size or 0) * self.dtype.itemsize
        compared_bytes = state_bytes + (12 if config.draft_vocab_size is not None else 0)
        return (
            token_bytes * len(loss_mask)
            + state_bytes * config.num_taps * self.context_length(len(loss_mask), anchor_mask)
            + compared_bytes * int(self.compared_mask(loss_mask, anchor_mask).sum())
        )


def _tokens(row: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.as_tensor(row["input_ids"]).long(), torch.as_tensor(row["loss_mask"]).bool()


# --------------------------------------------------------------------------------------------------------------- cache


def cache_features(
    target: PreTrainedModel,
    config: DrafterConfig,
    rows: Sequence[dict[str, Any]],
    folder: str | Path,
    batch_size: int = 16,
    shard_rows: int = 256,
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
    positions: str = "all",
    num_anchors: int = 512,
    seed: int = 0,
) -> Path:
    """
    Runs the target once over all rows and writes the features that training needs.

    Args:
        target: The target, in the dtype and on the device to use.
        config: The drafter's configuration. With a `draft_vocab_size`, the log of the target's softmax denominator and its
            most likely token are kept too, so that training only computes logits of the draft vocabulary.
        rows: Rows `{"input_ids": [T], "loss_mask": [T]}`.
        folder: The cache. Rows that it contains already are not computed again. Rows can be added at the end.
        batch_size: Rows per target pass.
        shard_rows: Rows per file.
        dtype: Dtype of the features on disk.
        progress: Show a progress bar.
        positions, num_anchors, seed: As in [`CachePlan`].

    Raises:
        ValueError: when the folder has features of other layers, rows or weights, or is being written by another process;
            when there is not enough space on the disk; or when the target's hidden states are too large for float16.
    """
    plan = CachePlan(config, dtype, positions, num_anchors, seed)
    folder = Path(folder)
    config.settle_taps(num_decoder_layers(target.config.get_text_config(decoder=True)))
    folder.mkdir(parents=True, exist_ok=True)
    with single_writer(folder):
        _write_missing(target, plan, rows, folder, batch_size, shard_rows, progress)
    return folder


def _write_missing(
    target: PreTrainedModel,
    plan: CachePlan,
    rows: Sequence[dict[str, Any]],
    folder: Path,
    batch_size: int,
    shard_rows: int,
    progress: bool,
) -> None:
    """Writes the shards of the rows that the cache does not contain yet."""
    index = _open_index(folder, plan.description(target.config.name_or_path or ""))
    done = _check_rows(folder, index, rows)
    if 0 < done < len(rows):
        CachedFeatureDataset(folder).check_target(target)
    check_space(folder, plan, rows[done:])
    if done < len(rows):
        writer = _ShardWriter(target.eval(), plan, batch_size)
        with tqdm(total=len(rows), initial=done, unit="row", disable=not progress, mininterval=5) as bar:
            for start in range(done, len(rows), shard_rows):
                some = rows[start : start + shard_rows]
                shard = writer.write(some, folder, f"shard-{len(index['shards']):05d}.safetensors", bar)
                index["shards"].append(shard)
                _write_index(folder, index)


def amount(num_bytes: float) -> str:
    """`"1.2 GB"`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.3g} TB"


def check_space(folder: Path, plan: CachePlan, rows: Sequence[dict[str, Any]]) -> int:
    """
    The number of bytes needed to cache rows in `folder`.

    Raises:
        ValueError: when there is not enough space on the disk.
    """
    needed, free = plan.num_bytes(rows), shutil.disk_usage(folder).free
    if needed > free:
        raise ValueError(
            f"Caching the features of {len(rows)} rows takes {amount(needed)}, and '{folder}' has {amount(free)} left. "
            "Train without a cache: the trainer then computes features as it goes. --positions response (or anchors) takes "
            "less."
        )
    return needed


class CachedFeatureDataset(Dataset[dict[str, Any]]):
    """
    The rows of a feature cache, read from memory-mapped files on access.

    Args:
        folder: A folder written by [`cache_features`].
        config (`DrafterConfig`, *optional*): The drafter's configuration, to check that the cache fits.

    Raises:
        ValueError: when there is no cache in the folder, or it is for other tapped layers.
    """

    def __init__(self, folder: str | Path, config: DrafterConfig | None = None):
        self.folder = Path(folder)
        index = _read_index(self.folder)
        if index is None:
            raise ValueError(f"'{folder}' holds no feature cache (no {_INDEX}): make one with cache_features.")
        self.index = index
        if config is not None:
            self._check(config)
        self.files = [shard["file"] for shard in index["shards"]]
        self.lengths = [length for shard in index["shards"] for length in shard["lengths"]]
        self.first_rows: list[int] = []
        # The offset of each row in the tensors with tokens, with context features, and with what drafts are compared with.
        self.spans: dict[str, list[tuple[int, int]]] = {"lengths": [], "context_lengths": [], "compared_lengths": []}
        for shard in index["shards"]:
            self.first_rows.append(len(self.spans["lengths"]))
            for kind, spans in self.spans.items():
                ends = list(accumulate(shard.get(kind, shard["lengths"])))
                spans += zip([0, *ends[:-1]], ends)
        self._open: dict[int, Any] = {}

    def _check(self, config: DrafterConfig) -> None:
        if self.index["target_layer_ids"] != list(config.target_layer_ids or []):
            raise ValueError(
                f"'{self.folder}' holds the target layers {self.index['target_layer_ids']}, but the drafter taps "
                f"{config.target_layer_ids}: cache its features in another folder."
            )
        if self.index.get("tap_before_norm", False) != config.taps_unnormed_state:
            held, read = ("after", "before") if config.taps_unnormed_state else ("before", "after")
            raise ValueError(
                f"'{self.folder}' holds the output of the target's last layer {held} the final norm, the drafter reads it {read} "
                "the norm: cache its features in another folder."
            )
        if self.index.get("num_drafts", config.num_draft_tokens) < config.num_draft_tokens:
            raise ValueError(
                f"'{self.folder}' was made for blocks of {self.index['num_drafts']} drafts at its anchors, but the drafter "
                f"drafts {config.num_draft_tokens}: cache its features in another folder."
            )

    @torch.no_grad()
    def check_target(self, target: PreTrainedModel) -> None:
        """
        Compares the features of the first row's first tokens with those of a target, because an equal name does not mean equal
        weights.

        Raises:
            ValueError: when another target made them.
        """
        wanted = self.index["target_hidden_size"], target.config.get_text_config(decoder=True).hidden_size
        difference = self._difference(target) if wanted[0] == wanted[1] else 1.0
        if difference > MAX_DIFFERENCE:
            raise ValueError(
                f"'{self.folder}' holds features of another target: those of '{self.index['target']}', which differ by "
                f"{100 * difference:.0f} % from those of '{target.config.name_or_path}'. Cache this one's in another folder."
            )

    def _difference(self, target: PreTrainedModel) -> float:
        """Relative difference between the cached context features and the target's, as median over tokens and tapped layers."""
        row = next((row for row, (begin, end) in enumerate(self.spans["context_lengths"]) if end > begin), None)
        if row is None:
            return 0.0
        tensors, width = self._read(row, ("input_ids", "context_features")), self.index["target_hidden_size"]
        cached = tensors["context_features"][:CHECKED_TOKENS].float().unflatten(-1, (-1, width))  # [T, m, D]
        indices, ids = [layer_id + 1 for layer_id in self.index["target_layer_ids"]], tensors["input_ids"]
        if self.index.get("tap_before_norm"):
            indices[-1] += 1
        found = target_features(target, indices, ids[None, : len(cached)].to(compute_device(target)))
        own = found.context_features[0].float().cpu().unflatten(-1, (-1, width))
        return float(((cached - own).norm(dim=-1) / own.norm(dim=-1)).median())

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        tensors = self._read(row)
        loss_mask, anchor_mask = tensors["loss_mask"].bool(), tensors.get("anchor_mask")
        length = len(loss_mask)
        if len(tensors["context_features"]) < length:
            tensors["context_features"] = pad_rows([tensors["context_features"]], length)[0]
        if (positions := self.index.get("positions", "all")) != "all":
            plan = CachePlan(_Drafts(self.index.get("num_drafts")), positions=positions)  # type: ignore[arg-type]
            kept = plan.compared_mask(loss_mask, anchor_mask)
            for key in set(_COMPARED_KEYS) & tensors.keys():
                packed = tensors[key]
                tensors[key] = packed.new_zeros(length, *packed.shape[1:])
                tensors[key][kept] = packed
        return tensors

    def tokens(self, row: int) -> dict[str, torch.Tensor]:
        """Only `input_ids` and `loss_mask` of a row."""
        return self._read(row, ("input_ids", "loss_mask"))

    def verify(self) -> None:
        """
        Reads every file and checks its hash.

        Raises:
            ValueError: when files are damaged, with their names.
        """
        wrong = []
        for shard in tqdm(self.index["shards"], desc=f"Checking {self.folder}", unit="file", delay=5):
            file = self.folder / shard["file"]
            if not file.is_file() or ("sha256" in shard and file_sha256(file) != shard["sha256"]):
                wrong.append(shard["file"])
        if wrong:
            raise ValueError(self._damaged(wrong))

    def _damaged(self, files: Sequence[str]) -> str:
        return (
            f"The feature cache '{self.folder}' is damaged: {', '.join(files)} is not as it was written. "
            "Delete the folder and make the cache again."
        )

    def _read(self, row: int, keys: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        if not 0 <= row < len(self):
            raise IndexError(row)
        file = self._file(bisect_right(self.first_rows, row) - 1)
        tensors = {}
        for key in file.keys() if keys is None else keys:
            kind = "context_lengths" if key == "context_features" else "lengths"
            if key in _COMPARED_KEYS:
                kind = "compared_lengths"
            begin, end = self.spans[kind][row]
            tensors[key] = file.get_slice(key)[begin:end]
        return tensors

    def _file(self, shard: int) -> Any:
        if shard not in self._open:
            try:
                self._open[shard] = safe_open(self.folder / self.files[shard], framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(self._damaged([self.files[shard]])) from error
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": {}}  # Each worker process maps the files again.


class _Drafts(NamedTuple):
    """The field of a configuration that `CachePlan.compared_mask` needs."""

    num_draft_tokens: int | None


class _ShardWriter:
    """Runs the target over rows and writes the features that a plan keeps."""

    def __init__(self, target: PreTrainedModel, plan: CachePlan, batch_size: int):
        self.target, self.plan, self.batch_size = target, plan, batch_size
        self.head: SharedEmbeddings | None = None
        self.rule = LogitRule()
        if plan.config.draft_vocab_size is not None:
            self.head, self.rule = SharedEmbeddings(*target_embeddings(target)), logit_rule(target)

    def write(self, rows: Sequence[dict[str, Any]], folder: Path, name: str, bar: tqdm) -> dict[str, Any]:
        """Writes one file, completely or not at all; returns its entry for the index."""
        found: list[dict[str, torch.Tensor]] = [{} for _ in rows]
        # Rows of similar length share a pass.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["input_ids"]))
        for start in range(0, len(rows), self.batch_size):
            some = order[start : start + self.batch_size]
            for i, tensors in zip(some, self.batch([rows[i] for i in some])):
                found[i] = tensors
            bar.update(len(some))
        tensors = {key: torch.cat([row[key] for row in found]) for key in found[0]}
        with whole_file(folder / name) as part:
            save_file(tensors, part)
            checksum = file_sha256(part)
        return {
            "file": name,
            "lengths": [len(row["input_ids"]) for row in found],
            "context_lengths": [len(row["context_features"]) for row in found],
            "compared_lengths": [len(row["last_hidden_states"]) for row in found],
            "digest": _rows_digest(rows),
            "sha256": checksum,
        }

    def batch(self, rows: list[dict[str, Any]]) -> Iterator[dict[str, torch.Tensor]]:
        """The features to keep of each of some rows, after one target pass over them."""
        tokens = [_tokens(row) for row in rows]
        length = max(1, *(len(ids) for ids, _ in tokens))
        ids = pad_rows([ids for ids, _ in tokens], length)
        features = target_features(
            self.target, self.plan.config.hidden_state_indices, ids.to(compute_device(self.target))
        )
        for index, (row, (ids, loss_mask)) in enumerate(zip(rows, tokens)):
            anchor_mask = self.plan.anchor_mask(row)
            kept = self.plan.compared_mask(loss_mask, anchor_mask)
            size = self.plan.context_length(len(ids), anchor_mask)
            states = features.last_hidden_states[index, : len(ids)][kept.to(features.last_hidden_states.device)]
            yield {
                "input_ids": ids,
                "loss_mask": loss_mask,
                **({} if anchor_mask is None else {"anchor_mask": anchor_mask}),
                "context_features": self.on_disk(features.context_features[index, :size]),
                "last_hidden_states": self.on_disk(states),
                **self.distributions(states, loss_mask[kept]),
            }

    def distributions(self, states: torch.Tensor, loss_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Normalizers and most likely tokens of the positions that drafts are compared with; for reduced vocabularies only."""
        if self.head is None:
            return {}
        found = normalizers_and_argmax(self.head, states[loss_mask.to(states.device)], self.rule)
        normalizers = torch.zeros(loss_mask.shape).masked_scatter_(loss_mask, found[0].cpu())
        greedy_ids = torch.zeros_like(loss_mask, dtype=torch.long).masked_scatter_(loss_mask, found[1].cpu())
        return {"log_normalizers": normalizers, "greedy_ids": greedy_ids}

    def on_disk(self, states: torch.Tensor) -> torch.Tensor:
        states = states.to("cpu", self.plan.dtype)
        if self.plan.dtype == torch.float16 and not torch.isfinite(states).all():
            raise ValueError(
                f"Hidden states of {type(self.target).__name__} are too large for float16: cache them as bfloat16."
            )
        return states


def _open_index(folder: Path, description: dict[str, Any]) -> dict[str, Any]:
    """The index of a cache, new or existing; refuses a cache of other features."""
    index = _read_index(folder) or description | {"shards": []}
    there = {"positions": "all"} | index
    if different := [key for key, value in description.items() if there.get(key) != value]:
        found = "; ".join(f"{key} was {there.get(key)!r}, now {description[key]!r}" for key in different)
        raise ValueError(f"'{folder}' holds features of other settings ({found}). Choose another folder.")
    return index


def check_cache_folder(folder: str | Path, plan: CachePlan, target_name: str) -> None:
    """
    Checks, before a target is loaded, whether its features can be written to a folder.

    Raises:
        ValueError: when the folder contains other features.
    """
    _open_index(Path(folder), plan.description(target_name))


def _check_rows(folder: Path, index: dict[str, Any], rows: Sequence[dict[str, Any]]) -> int:
    """How many rows the cache has; refuses a cache that was made from other rows."""
    start = 0
    for shard in index["shards"]:
        some = rows[start : start + len(shard["lengths"])]
        if _rows_digest(some) != shard["digest"]:
            raise ValueError(
                f"'{folder}/{shard['file']}' was made from other conversations: conversations can be added at the end, but not "
                "changed. Choose another folder."
            )
        start += len(some)
    return start


def _rows_digest(rows: Sequence[dict[str, Any]]) -> str:
    content = hashlib.blake2b(digest_size=16)
    for row in rows:
        for key in ("input_ids", "loss_mask"):
            content.update(torch.as_tensor(row[key]).to(torch.int64).numpy().tobytes())
    return content.hexdigest()


def file_sha256(path: Path) -> str:
    """The SHA-256 hash of a file, in hexadecimal."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _read_index(folder: Path) -> dict[str, Any] | None:
    path = folder / _INDEX
    return json.loads(path.read_text()) if path.is_file() else None


def _write_index(folder: Path, index: dict[str, Any]) -> None:
    write_text(folder / _INDEX, json.dumps(index))
