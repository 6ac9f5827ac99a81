"""The configuration of DeepSeek-V4's embedded drafter. Its fields are called as in the target's configuration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ...configuration_drafter import is_positive
from ...target_config import decoder_config, optional_field
from ..dspark.configuration_dspark import BlockDrafterConfig


class DeepseekV4DrafterConfig(BlockDrafterConfig):
    r"""
    Configuration of a [`DeepseekV4Drafter`]. The defaults are those of DeepSeek-V4-Flash.

    Args:
        num_hidden_layers (`int`): Stages, each a decoder layer of DeepSeek-V4.
        num_attention_heads, head_dim (`int`): Query heads and their width. Keys and values are one row for all heads.
        qk_rope_head_dim (`int`): Channels of a head that are rotated, the last ones.
        q_lora_rank (`int`): Rank of the query projection.
        o_groups, o_lora_rank (`int`): Groups of heads in the output projection, and its rank in each.
        rope_theta (`float`): RoPE base; positions are never scaled.
        sliding_window (`int`): Context tokens that a block sees: those just before its anchor, the same for all slots.
        moe_intermediate_size (`int`): Width of an expert.
        n_routed_experts, num_experts_per_tok (`int`): Experts, and how many of them a token is sent to.
        routed_scaling_factor (`float`): Factor on the weights of the experts.
        swiglu_limit (`float`): Largest value of what enters the experts' product.
        hc_mult (`int`): Residual streams (manifold-constrained hyper-connections).
        hc_sinkhorn_iters (`int`): Rounds that make the mixing of the streams doubly stochastic.
        hc_eps (`float`): Added to sums that are divided by there.

    The remaining arguments are those of [`~dspark_hf.kinds.dspark.configuration_dspark.BlockDrafterConfig`] and
    [`~dspark_hf.configuration_drafter.DrafterConfig`].

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    model_type = "deepseek_v4_dspark"

    largest: ClassVar[dict[str, int]] = BlockDrafterConfig.largest | {
        "num_attention_heads": 2**16,
        "head_dim": 2**16,
        "qk_rope_head_dim": 2**16,
        "q_lora_rank": 2**20,
        "o_groups": 2**16,
        "o_lora_rank": 2**20,
        "sliding_window": 2**24,
        "moe_intermediate_size": 2**22,
        "n_routed_experts": 2**16,
        "num_experts_per_tok": 2**16,
        "hc_mult": 64,
        "hc_sinkhorn_iters": 1024,
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {"deepseek-v4": {}}
    export_formats: ClassVar[tuple[str, ...]] = ("deepseek-v4",)
    confidence_bias: ClassVar[bool] = False
    has_float32_weights: ClassVar[bool] = True

    hidden_size: int = 4096
    num_hidden_layers: int = 3
    vocab_size: int = 129280
    max_position_embeddings: int = 1048576
    block_size: int = 5
    tap_before_norm: bool = True

    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1024
    o_groups: int = 8
    o_lora_rank: int = 1024
    rope_theta: float = 10000.0
    sliding_window: int = 128
    moe_intermediate_size: int = 2048
    n_routed_experts: int = 256
    num_experts_per_tok: int = 6
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6

    @property
    def method(self) -> str:
        return "DeepSeek-V4 DSpark"

    def describe(self) -> dict[str, str]:
        layers = (
            f"{self.num_hidden_layers} (DeepSeek-V4), hidden size {self.hidden_size} in {self.hc_mult} streams, "
            f"{self.num_attention_heads} heads of {self.head_dim}, {self.n_routed_experts} experts of "
            f"{self.moe_intermediate_size} with {self.num_experts_per_tok} for each token"
        )
        taps = f"{super().describe()['taps']}, each the mean of its {self.hc_mult} streams"
        attention = f"the {self.sliding_window} tokens before the anchor, and the block"
        return super().describe() | {"layers": layers, "attention": attention, "taps": taps}

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        for name, value in self.named(("rope_theta", "swiglu_limit", "hc_eps", "routed_scaling_factor")).items():
            if not is_positive(value):
                yield f"{name} must be a positive number, got {value!r}."
        if self.qk_rope_head_dim % 2 or self.qk_rope_head_dim > self.head_dim:
            yield f"qk_rope_head_dim={self.qk_rope_head_dim} has to be even and at most head_dim={self.head_dim}."
        if self.num_attention_heads % self.o_groups:
            yield f"num_attention_heads={self.num_attention_heads} is not a multiple of o_groups={self.o_groups}."
        if self.num_experts_per_tok > self.n_routed_experts:
            yield f"num_experts_per_tok={self.num_experts_per_tok} are more than n_routed_experts={self.n_routed_experts}."
        if self.markov_head_type != "vanilla":
            yield f"markov_head_type={self.markov_head_type!r}: this kind of drafter has vanilla heads only."

    @classmethod
    def for_target(
        cls,
        target_config: PreTrainedConfig,
        *,
        block_size: int = 5,
        num_hidden_layers: int = 3,
        target_layer_ids: list[int] | None = None,
        **overrides: Any,
    ) -> Any:
        """
        The drafter that DeepSeek-V4's checkpoints embed, for a target of that family.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration.
            block_size, num_hidden_layers: As in the class.
            target_layer_ids (`list[int]`, *optional*): Tapped layers; the last three by default.
            overrides: Other fields, and the arguments of
                [`~dspark_hf.kinds.dspark.configuration_dspark.BlockDrafterConfig.for_target`].

        Raises:
            ValueError: when the target is of another family, or as there.
        """
        text = decoder_config(target_config)
        if target_layer_ids is None:
            target_layer_ids = list(range(max(text.num_hidden_layers - 3, 0), text.num_hidden_layers))
        return super().for_target(
            target_config,
            block_size=block_size,
            num_hidden_layers=num_hidden_layers,
            target_layer_ids=target_layer_ids,
            **overrides,
        )

    @classmethod
    def _fields_of_target(cls, text: PreTrainedConfig) -> dict[str, Any]:
        if text.model_type != "deepseek_v4":
            raise ValueError(
                f"{cls.__name__} is for targets of the DeepSeek-V4 family, whose layers it has; this one is of type "
                f"{text.model_type!r}. Use DSparkConfig.for_target."
            )
        named = {name: optional_field(text, name) for name in LAYER_FIELDS}
        named["qk_rope_head_dim"] = rotated_channels(text.to_dict())
        return super()._fields_of_target(text) | named


# What the stages have in common with the target's layers, under the same names.
LAYER_FIELDS = (
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "rope_theta",
    "sliding_window",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "swiglu_limit",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
)


def rotated_channels(config: dict[str, Any]) -> int:
    """Channels of a head that are rotated, from a target's configuration in either spelling."""
    if (size := config.get("qk_rope_head_dim")) is not None:
        return int(size)
    rope = config.get("rope_parameters") or {}
    factor = (rope.get("main") or rope).get("partial_rotary_factor") or config.get("partial_rotary_factor") or 64 / 512
    return round(config["head_dim"] * factor)
