"""Reads a drafter's files: recognises the format, translates configuration and tensor names, and checks before loading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeGuard

import torch

from ..configuration_drafter import DrafterConfig
from . import (
    deepseek_v4,
    deepspec,
    dflash2,
    dspark,
    eagle3,
    gguf,
    laguna,
    modelopt,
    muse_glimmer,
    specforge,
    speculators,
    zlab,
)
from .fields import draft_token_ids
from .files import (
    FLOAT_TYPES,
    ID_TYPES,
    THROUGHPUT_CURVE_NAME,
    SafetensorsSource,
    Shape,
    Source,
    TensorInfo,
    has_file,
    printable,
    read_config,
    read_generation_settings,
    read_json,
    read_tensor_index,
    read_weight_map,
)
from .places import reading
from .repacked import has_offset_norms, repacked, with_whole_norms
from .unsupported import UNSUPPORTED, is_embedded, refuse_unsupported

# In the order in which they are tried.
FORMATS: tuple[ModuleType, ...] = (
    dspark,
    deepseek_v4,
    eagle3,
    dflash2,
    laguna,
    speculators,
    modelopt,
    deepspec,
    specforge,
    zlab,
    muse_glimmer,
)

# Endings of the names of architectures that are targets.
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration")

HUB_ARGUMENTS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")

# Frozen copies of the target's tensors, which are not needed when the drafter borrows the target's.
OPTIONAL_TENSORS = ("embed_tokens.weight", "lm_head.weight")

# Parts of names that differ between formats; the rest of a name is the same everywhere.
PREFIXES = {
    "model.": "",
    "logit_head.": "",
    "midlayer.": "layers.0.",
    "aux_hidden_norms.": "fc_norm.",
    "markov_w1.": "markov_head.markov_w1.",
    "markov_w2.": "markov_head.markov_w2.",
    "gate_proj.": "markov_head.gate_proj.",
    "joint_proj.": "markov_head.joint_proj.",
    "confidence_proj.": "confidence_head.proj.",
}
NAMES = muse_glimmer.NAMES | {"d2t": "draft_token_ids", "mask_embedding.weight": "mask_embedding"}

# Tensors that repeat which tokens are in the draft vocabulary, and those that speculators keeps from its verifier.
BESIDE = ("t2d", "verifier_lm_head.weight", "verifier_norm.weight")

MOST_PROBLEMS = 20


def our_name(name: str) -> str:
    """The drafter's parameter name for a tensor that a public format calls `name`."""
    for prefix, ours in PREFIXES.items():
        if name.startswith(prefix):
            name = ours + name.removeprefix(prefix)
    return NAMES.get(name, name)


@dataclass
class Checkpoint:
    """
    A drafter's files, with the configuration and the index of tensors translated, but no weights read.

    Args:
        path: Where the files are.
        format_name: Their public format.
        config: The drafter's configuration.
        tensors: The tensors in the files, by the drafter's parameter names.
        source: Reads the files.
        beside: Tensors of the format that are not parameters of the drafter.
        generation_settings: The drafter's generation settings, if the files have them.
        throughput_curve: The measured cost of a target pass, if the files have it: the contents of that file.
    """

    path: Any
    format_name: str
    config: DrafterConfig
    tensors: dict[str, TensorInfo]
    source: Source
    beside: dict[str, TensorInfo]
    generation_settings: dict[str, Any]
    throughput_curve: dict[str, Any] | None = None

    @property
    def loads_by_name(self) -> bool:
        """Whether no tensor has to be converted, so that transformers can load the files lazily."""
        same_names = all(name == info.name for name, info in self.tensors.items())
        return isinstance(self.source, SafetensorsSource) and same_names and not self.beside

    def check_tensors(self, expected: dict[str, Shape]) -> None:
        """
        Compares the tensors in the files with those that the configuration requires.

        Raises:
            ValueError: one message with all missing and unexpected tensors and those of a wrong shape or dtype.
        """
        if problems := sorted(self._problems(expected)):
            if len(problems) > MOST_PROBLEMS:
                problems[MOST_PROBLEMS:] = [f"and {len(problems) - MOST_PROBLEMS} more"]
            raise ValueError(
                f"The tensors of {self.path} do not fit its configuration, so it was not loaded:\n"
                + "\n".join(f"- {problem}" for problem in problems)
            )

    def _problems(self, expected: dict[str, Shape]) -> Iterator[str]:
        yield from (f"missing: {name} {list(shape)}" for name, shape in expected.items() if name not in self.tensors)
        for name, (shape, dtype, *_) in self.tensors.items():
            if name not in expected:
                if name not in OPTIONAL_TENSORS:
                    yield f"unexpected: {printable(name)} {list(shape)}"
                continue
            if shape != expected[name]:
                yield f"wrong shape: {name} is {list(shape)}, but has to be {list(expected[name])} according to the configuration"
            allowed = ID_TYPES if name == "draft_token_ids" else FLOAT_TYPES
            if dtype not in allowed:
                yield f"wrong type: {name} is {dtype}, but has to be one of {', '.join(sorted(allowed))}"

    def read_tensors(self, names: set[str]) -> dict[str, torch.Tensor]:
        """Reads the tensors of the given parameter names."""
        tensors = self.source.read({name: info for name, info in self.tensors.items() if name in names})
        if "draft_token_ids" in tensors and self.tensors["draft_token_ids"].name == "d2t":
            marked = self.source.read({n: info for n, info in self.beside.items() if n == "t2d"}).get("t2d")
            tensors["draft_token_ids"] = draft_token_ids(tensors["draft_token_ids"], marked, self.config.vocab_size)
        return tensors


def read_checkpoint(
    path: Any, config: DrafterConfig | None, kwargs: dict[str, Any], headers_only: bool = False
) -> Checkpoint:
    """
    Finds a checkpoint, recognises its format and reads its configuration and tensor index; no weights are read.

    Args:
        path: Folder or Hub repository, or a GGUF file.
        config: Used instead of the checkpoint's configuration.
        kwargs: Arguments of `from_pretrained`; those that choose a file on the Hub are used.
        headers_only: Do not download the weights of a repository on the Hub; then they cannot be read.

    Raises:
        OSError: when the configuration or the weights cannot be found or read.
        ValueError: when no known format fits, or a known one is not supported.
    """
    hub = {name: kwargs[name] for name in HUB_ARGUMENTS if kwargs.get(name) is not None}
    with reading(path, hub.get("revision")):
        return _read_checkpoint(path, config, hub, kwargs.get("gguf_file"), headers_only)


def _read_checkpoint(
    path: Any, config: DrafterConfig | None, hub: dict[str, Any], gguf_file: str | None, headers_only: bool
) -> Checkpoint:
    source, reader = open_source(path, hub, gguf_file, headers_only)
    tensors: dict[str, TensorInfo] = {}
    for name, info in source.tensors.items():
        if tensors.setdefault(our_name(name), info) is not info:
            raise ValueError(
                f"{path} contains {printable(our_name(name))} twice, the second time as {printable(name)}."
            )
    beside = {name: tensors.pop(name) for name in BESIDE if name in tensors}
    if config is None:
        config = translated_config(path, reader, source.config, tensors)
    if config.draft_vocab_size is None and "draft_token_ids" in tensors:
        beside["d2t"] = tensors.pop("draft_token_ids")  # A list of the full vocabulary, so it is not a reduced one.
    settings = read_generation_settings(path, hub) if isinstance(source, SafetensorsSource) else {}
    curve = read_json(path, THROUGHPUT_CURVE_NAME, hub) if reader is dspark else None
    return Checkpoint(path, reader.NAME, config, tensors, source, beside, settings, curve)


def open_source(
    path: Any, hub: dict[str, Any], gguf_file: str | None = None, headers_only: bool = False
) -> tuple[Source, ModuleType]:
    """The files of a checkpoint and the module for its format."""
    if gguf_file is not None or str(path).endswith(".gguf"):
        return gguf.open_gguf(path, gguf_file, hub), gguf
    raw = read_config(path, hub)
    weight_map = read_weight_map(path, hub, headers_only)
    if weight_map is not None:  # By tensor names, before shards are downloaded, which may be as large as a target.
        reader = reader_of(path, raw, {our_name(name): TensorInfo((), "", name, "") for name in weight_map})
        weight_map = own_part(reader, weight_map)
    tensors = read_tensor_index(path, weight_map, hub, headers_only)
    renamed = {our_name(name): info for name, info in tensors.items()}
    reader = reader_of(path, raw, renamed)
    if holds_more(reader):
        return reader.open_tensors(path, raw, own_part(reader, tensors)), reader
    if zlab.is_mimo(raw) and "mask_embedding" not in renamed and has_file(path, zlab.MASK_PICKLE, hub):
        raise ValueError(
            f"The masked slots of {path} start from a vector in {zlab.MASK_PICKLE}, without which it drafts nonsense. "
            f"{zlab.MASK_ADVICE}"
        )
    source = repacked(path, SafetensorsSource(raw, tensors))
    return (with_whole_norms(source) if has_offset_norms(raw, renamed) else source), reader


def holds_more(reader: ModuleType | None) -> TypeGuard[ModuleType]:
    """Whether the files of a format hold more than a drafter, such as the target's checkpoint that the drafter is a part of."""
    return hasattr(reader, "is_own")


def own_part(reader: ModuleType, by_name: dict[str, Any]) -> dict[str, Any]:
    """What is said of the drafter's tensors; all of it but for formats whose files hold more than a drafter."""
    return {name: said for name, said in by_name.items() if not holds_more(reader) or reader.is_own(name)}


def is_drafter(raw: dict[str, Any]) -> bool:
    """Whether a configuration alone identifies a checkpoint as a drafter in a supported format."""
    return any(reader.recognise(raw, {}) for reader in FORMATS)


def reader_of(path: Any, raw: dict[str, Any], tensors: dict[str, TensorInfo]) -> ModuleType:
    """
    The module for the format of a checkpoint.

    Args:
        path: Folder or Hub repository.
        raw: Its configuration.
        tensors: The tensors in its files, by the drafter's parameter names.

    Raises:
        ValueError: when no format matches: the checkpoint is a language model, an unsupported drafter, or neither.
    """
    reader = next((reader for reader in FORMATS if reader.recognise(raw, tensors)), None)
    language_models = [name for name in raw.get("architectures") or [] if name.endswith(LANGUAGE_MODELS)]
    if reader is None and language_models and not is_embedded(raw, tensors):
        raise ValueError(
            f"{path} is a language model ({language_models[0]}), not a drafter: use it as the target, with a drafter that "
            "was trained for it."
        )
    refuse_unsupported(path, raw, tensors, UNSUPPORTED if not holds_more(reader) else reader.UNSUPPORTED)
    if reader is None:
        raise ValueError(
            f"{path} is not a drafter in a known format: its model_type is {raw.get('model_type')!r}, its architectures are "
            f"{raw.get('architectures')}. Known formats: {', '.join(reader.NAME for reader in FORMATS)}."
        )
    return reader


def translated_config(
    path: Any, reader: ModuleType, raw: dict[str, Any], tensors: dict[str, TensorInfo]
) -> DrafterConfig:
    """
    The drafter's configuration.

    Raises:
        ValueError: when the files do not give a valid configuration.
    """
    try:
        config: DrafterConfig = reader.read_config(raw, tensors)
        config.check()
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        said = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ValueError(f"The configuration of {path} ({reader.NAME}) cannot be used. {said}") from error
    layers = {name.split(".")[1] for name in tensors if name.startswith("layers.")}
    if len(layers) != config.num_hidden_layers:
        raise ValueError(
            f"The tensors of {path} do not fit its configuration: they have {len(layers)} layers, num_hidden_layers is "
            f"{config.num_hidden_layers}."
        )
    # Of files that hold more than a drafter, what lies beside them is not about the drafter.
    config.name_or_path = "" if holds_more(reader) else str(path)
    return config
