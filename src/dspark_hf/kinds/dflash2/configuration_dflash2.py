"""The configuration of DFlash2 drafters: a DFlash block whose slots also see their neighbours, and a selector of candidates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..dspark.configuration_dspark import DSparkConfig


class DFlash2Config(DSparkConfig):
    r"""
    Configuration of a [`DFlash2Drafter`]. Most users build it with [`DFlash2Config.for_target`].

    Args:
        conv_kernel_size (`int`): Slots that a convolution sees: a slot and those before it in its block.
        conv_group_size (`int`): Neighbouring channels that share the part of a kernel that depends on the slot.
        selector_rank (`int`): Rank of the selector's score of a token after another.
        selector_top_k (`int`): Candidates of each slot, the most likely tokens, among which the selector chooses.

    The remaining arguments are those of [`DSparkConfig`]. There is no sequential head and no confidence head.

    Raises:
        ValueError: when fields contradict each other. The message lists every contradiction found.
    """

    model_type = "dflash2"

    largest: ClassVar[dict[str, int]] = DSparkConfig.largest | {
        "conv_kernel_size": 4096,
        "conv_group_size": 2**20,
        "selector_rank": 2**20,
        "selector_top_k": 2**20,
    }
    presets: ClassVar[dict[str, dict[str, Any]]] = {
        "dflash2": {
            "markov_rank": 0,
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
            "sample_from_anchor": False,
        }
    }
    export_formats: ClassVar[tuple[str, ...]] = ()

    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = False
    sample_from_anchor: bool = False

    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16

    @property
    def method(self) -> str:
        return "DFlash2"

    def _heads_in_words(self) -> str:
        return (
            f"a selector of rank {self.selector_rank} among the {self.selector_top_k} most likely tokens of each slot"
        )

    def describe(self) -> dict[str, str]:
        described = super().describe()
        return described | {"layers": f"{described['layers']}, convolutions over {self.conv_kernel_size} slots"}

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.markov_rank or self.enable_confidence_head:
            yield "a DFlash2 drafter has no sequential head and no confidence head: markov_rank=0, enable_confidence_head=False."
        if self.hidden_size % self.conv_group_size:
            yield f"conv_group_size={self.conv_group_size} does not divide hidden_size={self.hidden_size}."
        if self.selector_top_k > self.vocab_size:
            yield f"selector_top_k={self.selector_top_k} is more than the vocabulary of {self.vocab_size} tokens."
        if self.draft_vocab_size is not None:
            yield f"draft_vocab_size={self.draft_vocab_size}: a DFlash2 drafter has the full vocabulary."

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, *, block_size: int = 8, **overrides: Any) -> Any:
        """As in [`DSparkConfig`]; blocks are of 8, as in the released drafters."""
        return super().for_target(target_config, block_size=block_size, **(cls.presets["dflash2"] | overrides))
