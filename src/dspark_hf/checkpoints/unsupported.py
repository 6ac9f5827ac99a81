"""Drafters that are recognised but not supported: other methods, layers or number formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .files import TensorInfo
from .repacked import is_unread

Test = Callable[[dict[str, Any], dict[str, TensorInfo]], bool]


class Unsupported(NamedTuple):
    """
    A kind of drafter that cannot be loaded.

    Args:
        name: Name of the kind.
        applies: Whether a configuration and an index of tensors are of this kind.
        needs: What is missing to support it, or what to do instead.
    """

    name: str
    applies: Test
    needs: str


class UnsupportedDrafterError(ValueError):
    """
    Raised for a drafter that is recognised but not supported.

    Attributes:
        kind ([`Unsupported`]): The kind of drafter.
        config, tensors: The raw configuration and the index of tensors.
    """

    def __init__(self, path: Any, kind: Unsupported, config: dict[str, Any], tensors: dict[str, TensorInfo]):
        super().__init__(f"{path} is a {kind.name} drafter, which is not loaded here. {kind.needs}")
        self.kind, self.config, self.tensors = kind, config, tensors


def named(*architectures: str) -> Test:
    return lambda config, tensors: any(name in architectures for name in config.get("architectures") or ())


def with_tensor(part: str) -> Test:
    return lambda config, tensors: any(part in info.name for info in tensors.values())


def either(*tests: Test) -> Test:
    return lambda config, tensors: any(test(config, tensors) for test in tests)


def is_embedded(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    """A drafter inside its target's repository (DeepSeek-V4)."""
    text = config.get("text_config")
    places = [config] + ([text] if isinstance(text, dict) else [])
    declared = any("dspark_block_size" in place or "dspark_target_layer_ids" in place for place in places)
    return declared and any(info.name.startswith("mtp.") for info in tensors.values())


def has_latent_block_layers(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    """Latent attention, and not in the layer of an EAGLE-3 drafter, which norms its state."""
    return any("kv_a_proj_with_mqa." in name for name in tensors) and "layers.0.hidden_norm.weight" not in tensors


def is_speculators_kind(kind: str) -> Test:
    return lambda config, tensors: config.get("speculators_model_type") == kind


UNSUPPORTED = (
    Unsupported(
        "dense DeepSeek-V4 (NeMo AutoModel)",
        named("DeepseekV4DSparkModel", "DeepseekV4ForCausalLMDSparkDense"),
        "It has DeepSeek-V4's attention without streams and experts, and reads the target's last state after the final norm. The "
        "drafter in DeepSeek-V4's checkpoints is read.",
    ),
    Unsupported(
        "Domino", with_tensor("prefix_gru."), "It would need Domino's GRU over the prefix and its embedding projection."
    ),
    Unsupported(
        "xpress",
        either(with_tensor("refiner_head."), is_speculators_kind("xpress")),
        "It would need xpress's refiner head.",
    ),
    Unsupported(
        "latent-attention (MLA) DSpark",
        either(named("K3DSparkModel"), has_latent_block_layers),
        "It would need multi-head latent attention in the layers of a block drafter; EAGLE-3 drafters have it.",
    ),
    Unsupported(
        "noise-conditioned (Bonsai)",
        with_tensor("log_snr"),
        "It would need the log-SNR embedding that is added to the block's inputs.",
    ),
    Unsupported(
        "P-EAGLE",
        either(is_speculators_kind("peagle"), with_tensor("mask_hidden")),
        "It drafts all tokens of a chain in one pass, from a learned state for each token that is not known yet. That would need "
        "a candidate generator of its own.",
    ),
    Unsupported(
        "DFly",
        either(
            named("Qwen3DFlyModel", "DFlyDraftModel"), with_tensor("layer_fusion_weights"), is_speculators_kind("dfly")
        ),
        "It would need DFly's fusion of the taps layer by layer, and its correction of hidden states by the token before.",
    ),
    Unsupported(
        "quantized",
        is_unread,
        "FP8, NVFP4 and compressed-tensors' INT4 weights are unpacked; these are of another packing (GPTQ, AWQ, bitsandbytes, "
        "zero points): load its unquantized sibling, or dequantize it with the tool that made it.",
    ),
)


def refuse_unsupported(
    path: Any, config: dict[str, Any], tensors: dict[str, TensorInfo], kinds: tuple[Unsupported, ...] = UNSUPPORTED
) -> None:
    """Raises [`UnsupportedDrafterError`] for a drafter of a known unsupported kind, one of `kinds`."""
    for kind in kinds:
        if kind.applies(config, tensors):
            raise UnsupportedDrafterError(path, kind, config, tensors)


def embedded_config(config: dict[str, Any]) -> dict[str, Any]:
    """The `dspark_*` keys of a target's configuration."""
    text = config.get("text_config")
    merged = config | (text if isinstance(text, dict) else {})
    return {name: value for name, value in merged.items() if name.startswith("dspark_")}


def num_stages(tensors: dict[str, TensorInfo]) -> int:
    """Number of stages of an embedded drafter, from its tensors `mtp.<stage>.`; its configuration does not say."""
    return len({info.name.split(".")[1] for info in tensors.values() if info.name.startswith("mtp.")})
