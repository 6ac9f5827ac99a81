"""Finding a checkpoint's safetensors files and listing their tensors, without reading any weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from ..configuration_dspark import DSparkConfig

Shape = tuple[int, ...]

# Frozen copies of the target's tensors, which the drafter does without where it borrows the target's own.
OPTIONAL_TENSORS = ("embed_tokens.weight", "lm_head.weight")

# What a drafter's own generation_config.json says: drafts a round, and the confidence that ends a round's drafts.
GENERATION_SETTINGS = ("num_assistant_tokens", "assistant_confidence_threshold")


@dataclass
class Checkpoint:
    """A drafter's configuration, its generation settings, and the name and shape of every tensor in its files."""

    path: Any
    config: DSparkConfig
    tensors: dict[str, Shape]
    generation_settings: dict[str, Any]

    def check_tensors(self, expected: dict[str, Shape]) -> None:
        """
        Compares the files with what the configuration asks for.

        Raises:
            ValueError: one message with all missing, unexpected and wrongly shaped tensors.
        """
        problems = [f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in self.tensors]
        for name, shape in self.tensors.items():
            if name not in expected:
                if name not in OPTIONAL_TENSORS:
                    problems.append(f"unexpected: {name} {list(shape)}")
            elif shape != expected[name]:
                problems.append(
                    f"wrong shape: {name} is {list(shape)}, the configuration asks for {list(expected[name])}"
                )
        if problems:
            raise ValueError(
                f"The tensors of {self.path} do not fit its configuration, so it was not loaded:\n"
                + "\n".join(f"- {problem}" for problem in sorted(problems))
            )


def read_tensor_index(path: Any, hub: dict[str, Any]) -> dict[str, Shape]:
    """
    Name and shape of every tensor in a checkpoint's safetensors files, sharded or not.

    Raises:
        OSError: when there is no safetensors file, a shard is missing, or a file is damaged.
    """
    single = cached_file(path, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if single is not None:
        return _tensors_of(single)
    index = cached_file(path, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if index is None:
        raise OSError(
            f"{path} has no {SAFE_WEIGHTS_NAME}. Only safetensors files are read; a pickle file (.bin, .pt) can run "
            "code when it is opened and has to be converted where it came from."
        )
    with open(index, encoding="utf-8") as file:
        shards = sorted(set(json.load(file)["weight_map"].values()))
    tensors: dict[str, Shape] = {}
    for shard in shards:
        tensors |= _tensors_of(cached_file(path, shard, **hub))
    return tensors


def read_generation_settings(path: Any, hub: dict[str, Any]) -> dict[str, Any]:
    """The settings of a round in a checkpoint's generation_config.json; what else it holds is about the target."""
    file = cached_file(path, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **hub)
    if file is None:
        return {}
    with open(file, encoding="utf-8") as opened:
        stored = json.load(opened)
    return {name: stored[name] for name in GENERATION_SETTINGS if stored.get(name) is not None}


def _tensors_of(file: str) -> dict[str, Shape]:
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}
    except SafetensorError as error:
        raise OSError(
            f"{file} is not a readable safetensors file ({error}). It may be cut short: download it again."
        ) from error
