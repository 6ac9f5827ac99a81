"""Describes a drafter checkpoint: format, sizes, layout, unusual settings, and which engines can serve it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from ..configuration_drafter import DrafterConfig
from . import engines, speculators
from .fields import Fields
from .reading import OPTIONAL_TENSORS, Checkpoint, read_checkpoint
from .unsupported import UnsupportedDrafterError, embedded_config, num_stages

BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2}

# Fields copied from the target that have no meaning for the draft layers.
INHERITED = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "attn_output_gate", "num_experts")


@dataclass
class Inspection:
    """
    A description of a checkpoint, made without reading its weights. `str()` gives a summary.

    Args:
        path: Where the checkpoint is.
        format: Its public format, or the name of the unsupported kind of drafter.
        refusal: Why it cannot be loaded; `None` if it can.
        config: Its configuration; `None` if it cannot be loaded.
        num_parameters, num_bytes: Size of its tensors.
        dtypes: Number of tensors of each dtype.
        oddities: Unusual settings, many of which cost acceptance when software ignores them.
        engines: For each engine the reasons why it cannot serve these files; empty if it can.
        embedded: For a drafter inside its target's repository: its keys in the configuration and its number of stages.
    """

    path: str
    format: str
    refusal: str | None = None
    config: DrafterConfig | None = None
    num_parameters: int = 0
    num_bytes: int = 0
    dtypes: dict[str, int] = field(default_factory=dict)
    oddities: list[str] = field(default_factory=list)
    engines: dict[str, list[str]] = field(default_factory=dict)
    embedded: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """All fields in JSON types; `description` is the configuration in words."""
        shown = {name: value for name, value in vars(self).items() if name != "config"}
        if (config := self.config) is not None:
            shown["config"] = config.to_dict()
            shown["hidden_state_indices"] = config.hidden_state_indices if config.target_layer_ids else None
            shown["description"] = config.describe()
        return shown

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.path}: {self.format}"
        if self.refusal is not None:
            yield f"  not loaded: {self.refusal}"
        for name, value in self.embedded.items():
            yield f"  {name}: {value}"
        if (config := self.config) is not None:
            yield f"  method: {config.method}"
            yield f"  target: {config.target_name_or_path or 'not named'}"
            yield from (f"  {topic}: {words}" for topic, words in config.describe().items())
        if self.num_parameters:
            kinds = ", ".join(f"{count} {dtype}" for dtype, count in self.dtypes.items())
            yield f"  size: {self.num_parameters:,} parameters, {self.num_bytes / 1e9:.2f} GB ({kinds} tensors)"
        yield from (f"  odd: {oddity}" for oddity in self.oddities)
        for engine, reasons in self.engines.items():
            said = "no, " + "; ".join(reasons) if reasons else f"yes ({engines.evidence(engine, self.format)})"
            yield f"  {engine}: {said}"


def inspect_checkpoint(path: Any, **kwargs: Any) -> Inspection:
    """
    Describes a checkpoint without reading its weights. Of one on the Hub, only configuration and headers are downloaded.

    ```python
    >>> print(dspark_hf.checkpoints.inspect_checkpoint("RadixArk/Qwen3.8-27B-DSpark"))  # doctest: +SKIP
    ```

    Args:
        path: Folder, Hub repository or GGUF file.
        kwargs: `revision`, `token`, `subfolder`, ... as in `from_pretrained`.

    Raises:
        OSError: when there is no checkpoint.
        ValueError: when it is not a drafter, or is damaged. A drafter of a known unsupported kind is not an error here.
    """
    try:
        checkpoint = read_checkpoint(path, None, kwargs, headers_only=True)
    except UnsupportedDrafterError as error:
        embedded = embedded_config(error.config)
        if embedded:
            embedded["stages"] = num_stages(error.tensors)
        return Inspection(str(path), error.kind.name, refusal=error.kind.needs, embedded=embedded)
    tensors = checkpoint.tensors
    return Inspection(
        path=str(path),
        format=checkpoint.format_name,
        config=checkpoint.config,
        num_parameters=sum(prod(info.shape) for info in tensors.values()),
        num_bytes=sum(prod(info.shape) * BYTES.get(info.dtype, 1) for info in tensors.values()),
        dtypes=dict(Counter(info.dtype for info in tensors.values())),
        oddities=list(oddities(checkpoint)),
        engines=engine_obstacles(checkpoint),
    )


def engine_obstacles(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Why each engine cannot serve these files: features it does not support, and fields that it would misread."""
    reasons = engines.obstacles(checkpoint.config, checkpoint.format_name)
    if checkpoint.format_name == engines.DEEPSPEC:
        for engine in ("vLLM", "SGLang"):
            reasons[engine] += _misread(engine, checkpoint.config, checkpoint.source.config)
    if checkpoint.format_name == engines.SPECULATORS and reasons:
        config: Any = checkpoint.config
        read = speculators.causality_in_vllm(checkpoint.source.config, config.layer_types)
        if read != [config.layer_is_causal(i) for i in range(config.num_hidden_layers)]:
            reasons["vLLM"].append("it would take other layers to be causal: convert to speculators or vllm-sglang")
    return reasons


def _misread(engine: str, config: Any, raw: dict[str, Any]) -> Iterator[str]:
    advice = "convert to vllm-sglang"
    if config.markov_rank and raw.get("markov_rank") is None:
        yield f"it reads markov_rank at the top level only: {advice}"
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    partial = raw.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
    if engine == "vLLM" and partial != 1.0 and "partial_rotary_factor" not in (config.rope_parameters or {}):
        yield f"it would rotate only a part of each head, because of the copied partial_rotary_factor: {advice}"
    slides = "sliding_attention" in (config.layer_types or ())
    if slides and not (raw.get("use_sliding_window") and raw.get("sliding_window")):
        yield f"it ignores the sliding window unless use_sliding_window and sliding_window are set: {advice}"
    if config.is_causal is not None and raw.get("is_causal") is None and engine == "SGLang":
        yield f"it only looks at is_causal to find out whether blocks are causal: {advice}"


def oddities(checkpoint: Checkpoint) -> Iterator[str]:
    """Unusual settings, most of which silently cost acceptance in software that ignores them."""
    config, raw = checkpoint.config, checkpoint.source.config
    fields = Fields(raw)
    contested = checkpoint.format_name in (engines.SPECFORGE, engines.SPECULATORS, engines.ZLAB)
    if contested and not fields.all("sample_from_anchor") and not fields.all("dspark_bonus_anchor"):
        reading = "predicts" if config.sample_from_anchor else "predicts nothing"
        yield f"it does not say whether the anchor predicts; files of this format without the key are read as: it {reading}"
    for name in ("block_size", "mask_token_id", "target_layer_ids", "markov_rank", "is_causal"):
        if len(values := fields.all(name)) > 1:
            yield f"{name} is given as {' and as '.join(map(str, values))}; the first is used"
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    used = config.to_dict().get("rope_parameters") or {}
    if copied := [name for name in INHERITED if (raw.get(name) or rope.get(name)) and name not in used]:
        yield f"{', '.join(copied)} copied from the target: ignored"
    proposals = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    if (tokens := proposals[0].get("speculative_tokens")) not in (None, config.num_draft_tokens):
        yield f"it asks for {tokens} drafts per round, but its block gives {config.num_draft_tokens}"
    yield from _odd_taps(config)
    if frozen := [name for name in OPTIONAL_TENSORS if name in checkpoint.tensors and not config.draft_vocab_size]:
        yield f"it contains copies of the target's {' and '.join(frozen)} (borrow_embeddings=True does not read them)"
    expected = {"I64", "I32"} | ({"F32"} if config.has_float32_weights else set())
    if len({info.dtype for info in checkpoint.tensors.values()} - expected) > 1:
        yield "its weights are of different types"
    if "auto_map" in raw:
        yield "it refers to Python code in its repository (auto_map), which is not run"
    if isinstance(checkpoint.path, str | Path) and Path(checkpoint.path).is_dir():
        pickles = sorted(
            file.name for file in Path(checkpoint.path).iterdir() if file.suffix in (".bin", ".pt", ".pth")
        )
        if pickles:
            yield f"{', '.join(pickles)} in the same folder: pickle files are not read"


def _odd_taps(config: DrafterConfig) -> Iterator[str]:
    ids = config.target_layer_ids
    if not ids:
        yield "it does not say which target layers feed it; they follow from the target's depth (check with --target)"
        return
    if ids[0] == -1:
        yield "it taps the embedding output (layer -1), which SGLang cannot"
    if config.num_target_layers is not None and ids[-1] == config.num_target_layers - 1 and not config.tap_before_norm:
        yield "it taps the target's last layer, whose output is taken after the final norm by transformers, before it by others"
    elif config.num_target_layers is None:
        yield "it does not say how many layers its target has"
