"""The files of a checkpoint: its configuration and the name, shape and type of every tensor, without reading weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from huggingface_hub import HfApi, is_offline_mode
from huggingface_hub.errors import LocalEntryNotFoundError, SafetensorsParsingError
from safetensors import SafetensorError, safe_open
from transformers.utils import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    cached_file,
)

Shape = tuple[int, ...]

# Settings of a drafter in generation_config.json: drafts per round, the confidence below which drafting stops, the name of the
# verification scheduler, and whether drafting pauses while it costs more than it saves.
GENERATION_SETTINGS = (
    "num_assistant_tokens",
    "assistant_confidence_threshold",
    "verify_scheduler",
    "drafting_backoff",
)
# The measured cost of a target pass.
THROUGHPUT_CURVE_NAME = "throughput_curve.json"

# What to do about weights in a pickle file, which is never opened here.
PICKLE_ADVICE = (
    "Only safetensors files are read; a pickle file (.bin, .pt) can run code when it is opened. If you trust it, convert it "
    'with `python -c "import torch; from safetensors.torch import save_file; save_file({k: v.contiguous() for k, v in '
    "torch.load('pytorch_model.bin', map_location='cpu', weights_only=True).items()}, 'model.safetensors', {'format': 'pt'})\"`"
)

FLOAT_TYPES = {"F64", "F32", "F16", "BF16"}
ID_TYPES = {"I64", "I32", "U32"}


class TensorInfo(NamedTuple):
    """
    One tensor of a file.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype in safetensors' spelling (`"BF16"`).
        name: Name of the tensor in the file.
        file: The file that contains it.
    """

    shape: Shape
    dtype: str
    name: str
    file: str


class Source(Protocol):
    """The files of a drafter: raw configuration, index of tensors by name in the file, and a method to read tensors."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, tensors: dict[str, TensorInfo]) -> dict[str, torch.Tensor]: ...


@dataclass
class SafetensorsSource:
    """A folder or Hub repository with a `config.json` and safetensors files."""

    config: dict[str, Any]
    tensors: dict[str, TensorInfo]

    def read(self, tensors: dict[str, TensorInfo]) -> dict[str, torch.Tensor]:
        """Reads the given tensors; the result has the same keys."""
        read: dict[str, torch.Tensor] = {}
        for file in sorted({info.file for info in tensors.values()}):
            with safe_open(file, framework="pt") as opened:
                read |= {name: opened.get_tensor(info.name) for name, info in tensors.items() if info.file == file}
        return read


def read_json(path: Any, name: str, hub: dict[str, Any]) -> dict[str, Any] | None:
    """
    A JSON file of a checkpoint; `None` if it does not exist.

    Raises:
        OSError: when the folder or repository cannot be reached, or the file is not a JSON object.
    """
    file = cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        return None
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise OSError(
            f"{file} is not a readable JSON file ({error}). It may be cut short: download it again."
        ) from error
    if not isinstance(content, dict):
        raise OSError(f"{file} has to hold a JSON object, but it holds a {type(content).__name__}.")
    return content


def read_config(path: Any, hub: dict[str, Any]) -> dict[str, Any]:
    """
    The raw `config.json`.

    Raises:
        OSError: when it does not exist.
        ValueError: when `architectures`, which identifies the format, is not a list of names.
    """
    config = read_json(path, CONFIG_NAME, hub)
    if not config and read_json(path, ADAPTER_CONFIG_NAME, hub):
        raise OSError(
            f"{path} is an adapter of a drafter: load the drafter, and the adapter onto it with "
            f"peft.PeftModel.from_pretrained(drafter, {str(path)!r})."
        )
    if not config:
        try:
            cached_file(path, CONFIG_NAME, **hub)
        except OSError as error:
            if isinstance(error.__cause__, LocalEntryNotFoundError):  # The repository could not be reached.
                raise
        raise OSError(f"{path} has no {CONFIG_NAME}, so it is not a drafter checkpoint.")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise ValueError(
            f"The configuration of {path} is damaged: architectures is {architectures!r}, not a list of names."
        )
    return config


def read_generation_settings(path: Any, hub: dict[str, Any]) -> dict[str, Any]:
    """The drafter's settings in a checkpoint's generation_config.json; its other entries concern the target."""
    stored = read_json(path, GENERATION_CONFIG_NAME, hub) or {}
    return {name: stored[name] for name in GENERATION_SETTINGS if stored.get(name) is not None}


def read_weight_map(path: Any, hub: dict[str, Any], headers_only: bool = False) -> dict[str, str] | None:
    """
    The shard of each tensor; `None` for a checkpoint in one file. With `headers_only` that file is not downloaded.

    Raises:
        OSError: when there is no safetensors file, or the index names something other than files in the same folder.
    """
    if headers_only:
        single = has_file(path, SAFE_WEIGHTS_NAME, hub)
    else:
        single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **hub) is not None
    if single:
        return None
    index = read_json(path, SAFE_WEIGHTS_INDEX_NAME, hub)
    if index is None:
        raise OSError(f"{path} has no {SAFE_WEIGHTS_NAME}. {PICKLE_ADVICE}")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise OSError(f"{SAFE_WEIGHTS_INDEX_NAME} of {path} has no weight_map. Download it again.")
    if strange := [shard for shard in weight_map.values() if not _is_plain_shard_name(shard)]:
        raise OSError(
            f"{SAFE_WEIGHTS_INDEX_NAME} of {path} names {strange[0]!r} as a shard, which is not a safetensors file "
            "in the same folder, so nothing was read."
        )
    return weight_map


def read_tensor_index(
    path: Any, weight_map: dict[str, str] | None, hub: dict[str, Any], headers_only: bool = False
) -> dict[str, TensorInfo]:
    """
    The index of all tensors in a checkpoint's safetensors files, sharded or not. With `headers_only`, only the headers of
    files on the Hub are downloaded.

    Raises:
        OSError: when a shard is missing, lacks what the index says it holds, or is damaged.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(set(weight_map.values())) if weight_map else [SAFE_WEIGHTS_NAME]:
        if headers_only and is_remote(path):
            tensors |= _remote_tensors_of(path, file, hub)
        else:
            tensors |= _tensors_of(str(cached_file(path, file, **hub)))
    if lost := sorted((weight_map or {}).keys() - tensors.keys()):
        raise OSError(f"The shards of {path} lack {printable(lost[0])}, which its index lists. Download it again.")
    return tensors


def _is_plain_shard_name(shard: Any) -> bool:
    return isinstance(shard, str) and shard.endswith(".safetensors") and not set(shard) & set("/\\:\0")


def _tensors_of(file: str) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {n: TensorInfo(tuple(s.get_shape()), s.get_dtype(), n, str(file)) for n, s in slices.items()}
    except SafetensorError as error:
        raise OSError(
            f"{file} is not a readable safetensors file ({error}). It may be cut short: download it again."
        ) from error


def is_remote(path: Any) -> bool:
    """Whether a path is a repository on the Hub and the Hub may be accessed."""
    return not Path(path).exists() and not is_offline_mode()


def has_file(path: Any, name: str, hub: dict[str, Any]) -> bool:
    """Whether a checkpoint has a file of that name, without downloading it."""
    if is_remote(path):
        return _hub_api(hub).file_exists(str(path), _in_repository(name, hub), revision=hub.get("revision"))
    return cached_file(path, name, _raise_exceptions_for_missing_entries=False, **hub) is not None


def _hub_api(hub: dict[str, Any]) -> HfApi:
    return HfApi(token=hub.get("token"))


def _in_repository(file: str, hub: dict[str, Any]) -> str:
    return f"{hub['subfolder']}/{file}" if hub.get("subfolder") else file


def _remote_tensors_of(path: Any, file: str, hub: dict[str, Any]) -> dict[str, TensorInfo]:
    try:
        header = _hub_api(hub).parse_safetensors_file_metadata(
            str(path), _in_repository(file, hub), revision=hub.get("revision")
        )
    except SafetensorsParsingError as error:
        raise OSError(f"{file} of {path} is not a readable safetensors file ({error}).") from error
    return {name: TensorInfo(tuple(t.shape), t.dtype, name, file) for name, t in header.tensors.items()}


def printable(name: str) -> str:
    """A name from a file, safe to print."""
    return name if name.isascii() and name.isprintable() else ascii(name)
