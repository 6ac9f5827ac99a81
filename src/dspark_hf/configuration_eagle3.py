"""What the weights of an EAGLE-3 drafter need (Li et al., "EAGLE-3", 2025): the autoregressive baseline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig

from .configuration_dspark import DSparkConfig

# Options of a decoder layer or a block that EAGLE-3's one layer does not have, with the value that means so.
_WITHOUT = {
    "markov_rank": 0,
    "enable_confidence_head": False,
    "sample_from_anchor": True,
    "has_mask_embedding": False,
    "sandwich_norms": False,
    "layer_scalar": False,
    "is_causal": None,
    "num_hidden_layers": 1,
}


class Eagle3Config(DSparkConfig):
    r"""
    Configuration of an [`Eagle3Drafter`]. Most users build it with [`Eagle3Config.for_target`].

    It shares the fields of [`DSparkConfig`]; these read differently:

    Args:
        block_size (`int`): Tokens drafted a round, one after the other, and steps unrolled in training (paper: 7).
        target_layer_ids (`list[int]`):
            Tapped target layers. The EAGLE-3 paper fuses three; comparisons with DSpark take the same five for both.
        norm_before_residual (`bool`):
            The residual stream of the layer starts from the normed state instead of the state itself.

    Raises:
        ValueError: when fields contradict each other, or one asks for what this drafter does not have (heads, masked slots,
            several layers). The message lists every contradiction found.
    """

    model_type = "dspark_eagle3"

    num_hidden_layers: int = 1
    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    norm_before_residual: bool = False

    @property
    def is_autoregressive(self) -> bool:
        """Always."""
        return True

    @classmethod
    def needs_mask_token(cls, block_size: int) -> bool:
        """Never: each token is drafted from the one before it."""
        return False

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        for name, value in _WITHOUT.items():
            if getattr(self, name) != value:
                yield f"{name}={getattr(self, name)!r}: an EAGLE-3 drafter has {name}={value!r} only."
        if "sliding_attention" in (self.layer_types or []):
            yield "layer_types has sliding layers: an EAGLE-3 drafter attends to all of its context."

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, *, block_size: int = 7, **overrides: Any) -> Eagle3Config:
        """
        A sensible EAGLE-3 configuration for a decoder-only target, as [`DSparkConfig.for_target`] makes one.

        Args:
            target_config (`PreTrainedConfig`): The target's configuration.
            block_size (`int`): Tokens drafted a round.
            overrides: Any other field.

        Raises:
            ValueError: as in [`DSparkConfig.for_target`].
        """
        own = {"num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False}
        return super().for_target(target_config, block_size=block_size, **(own | overrides))
