"""The configuration of EAGLE-3 drafters (Li et al., "EAGLE-3", 2025), which draft token by token."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from ...configuration_drafter import DecoderDrafterConfig


class Eagle3Config(DecoderDrafterConfig):
    r"""
    Configuration of an [`Eagle3Drafter`]. Most users build it with [`Eagle3Config.for_target`].

    Args:
        block_size (`int`): Tokens drafted per round, one after the other, and steps unrolled in training (paper: 7).
        target_layer_ids (`list[int]`):
            Tapped target layers. The EAGLE-3 paper uses three; for comparisons with DSpark, use the same five for both.
        norm_before_residual (`bool`):
            The residual stream of the layer starts from the normed state instead of the state itself.

    The remaining arguments are those of [`~dspark_hf.configuration_drafter.DecoderDrafterConfig`] and
    [`~dspark_hf.configuration_drafter.DrafterConfig`], or have their usual transformers meaning.

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    model_type = "dspark_eagle3"

    presets: ClassVar[dict[str, dict[str, Any]]] = {"eagle3": {}}
    # A draft starts from the state of the token before its anchor.
    first_anchor: ClassVar[int] = 1

    norm_before_residual: bool = False

    @property
    def method(self) -> str:
        return "EAGLE-3"

    def describe(self) -> dict[str, str]:
        return super().describe() | {"drafts": f"one after the other, up to {self.block_size} per round"}

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.num_hidden_layers != 1:
            yield f"num_hidden_layers={self.num_hidden_layers}: an EAGLE-3 drafter has one layer."
