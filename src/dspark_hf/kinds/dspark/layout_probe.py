"""Finds out which slot layout a drafter was trained in, by drafting in both layouts with its target.

A drafter in the wrong layout loads without an error, drafts tokens that are one position off, and is never accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ...draft_cache import DraftCache
from ...tapping import Tap
from ...transformers_names import GenerativeModel, compute_device
from .modeling_dspark import DSparkDrafter


@dataclass
class LayoutProbe:
    """
    How many drafts of a block are right in each layout. `str()` gives a sentence.

    Args:
        declared: The layout the configuration says (`sample_from_anchor`).
        acceptance:
            For each layout, the mean number of drafts of a block that were right before the first wrong one. Only as many
            drafts are counted as the layout with fewer drafts has.
        standard_error: Of the difference between the two.
        num_blocks: Blocks drafted in each layout.
    """

    declared: bool
    acceptance: dict[bool, float]
    standard_error: float
    num_blocks: int

    @property
    def is_mislabelled(self) -> bool:
        """Whether the other layout accepts more, beyond what chance explains."""
        declared, other = self.acceptance[self.declared], self.acceptance[not self.declared]
        return other - declared > 3 * self.standard_error

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "declared": self.declared,
            "accepted_drafts": {str(layout): mean for layout, mean in self.acceptance.items()},
            "standard_error": self.standard_error,
            "num_blocks": self.num_blocks,
            "is_mislabelled": self.is_mislabelled,
        }

    def __str__(self) -> str:
        declared, other = self.acceptance[self.declared], self.acceptance[not self.declared]
        measured = (
            f"{declared:.2f} drafts per block accepted with sample_from_anchor={self.declared} as declared, {other:.2f} with "
            f"{not self.declared} ({self.num_blocks} blocks)."
        )
        if self.is_mislabelled:
            return f"{measured} The file is mislabelled: load it with config.sample_from_anchor = {not self.declared}."
        if max(declared, other) < 0.1:
            return f"{measured} Nothing is accepted in either: something else is wrong, or this is not the drafter's target."
        if declared - other > 3 * self.standard_error:
            return f"{measured} The declared layout is right."
        return f"{measured} The difference is too small to decide: try more prompts of the kind it was trained on."


@torch.no_grad()
def probe_layout(
    drafter: DSparkDrafter, target: GenerativeModel, prompts: Sequence[torch.Tensor], max_new_tokens: int = 64
) -> LayoutProbe:
    """
    Drafts along the target's greedy continuations, in both layouts.

    ```python
    >>> prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]  # doctest: +SKIP
    >>> print(probe_layout(drafter, target, prompts))  # doctest: +SKIP
    ```

    Args:
        drafter: The drafter, in either layout.
        target: Its target.
        prompts: Token ids, each `[1, P]`. A few prompts of the kind the drafter was trained on are enough.
        max_new_tokens: Tokens to continue each prompt by; a block is drafted at each of them.

    Raises:
        ValueError: when the block has a single slot, so that only one layout is possible, or nothing could be drafted.
    """
    config = drafter.config
    if config.block_size < 2:
        raise ValueError(f"block_size={config.block_size}: a block of one slot has one layout only.")
    matches: dict[bool, list[int]] = {True: [], False: []}
    for prompt in prompts:
        sequence = target.generate(prompt.to(compute_device(target)), max_new_tokens=max_new_tokens, do_sample=False)
        tap = Tap(target, config.hidden_state_indices)
        with tap.reading():
            output = target(sequence, output_hidden_states=tap.argument)
        features = tap.features(output).to(drafter.device)
        sequence, cache = sequence.to(drafter.device), drafter.new_cache()
        for anchor in range(prompt.shape[1], sequence.shape[1] - 1):
            held = cache.lengths[0]
            positions = torch.arange(held, anchor, device=drafter.device)[None]
            drafter.extend_cache(cache, features[:, held:anchor], positions)
            hidden_states = _block_hidden_states(drafter, target, sequence[:, anchor], anchor, cache)
            for layout, found in matches.items():
                predicting = hidden_states if layout else hidden_states[:, 1:]
                drafts = _greedy_drafts(drafter, target, sequence[:, anchor], predicting[:, : config.block_size - 1])
                following = sequence[0, anchor + 1 : anchor + 1 + len(drafts)]
                right = drafts[: len(following)] == following
                found.append(int(right.long().cumprod(0).sum()))
    counts = torch.tensor([matches[False], matches[True]], dtype=torch.float64)  # [2, number of blocks]
    num_blocks = counts.shape[1]
    if num_blocks < 2:
        raise ValueError(f"Only {num_blocks} blocks could be drafted: give more prompts or more max_new_tokens.")
    standard_error = float((counts[1] - counts[0]).std()) / num_blocks**0.5
    without, with_anchor = counts.mean(1).tolist()
    return LayoutProbe(config.sample_from_anchor, {False: without, True: with_anchor}, standard_error, num_blocks)


def _block_hidden_states(
    drafter: DSparkDrafter, target: PreTrainedModel, anchor_ids: torch.Tensor, anchor: int, cache: DraftCache
) -> torch.Tensor:
    """Normed hidden states of the block whose anchor is at position `anchor`, `[1, G, D]`."""
    config = drafter.config
    assert config.mask_token_id is not None, "blocks of several slots have a mask token"
    block_ids = torch.full((1, config.block_size), config.mask_token_id, device=anchor_ids.device)
    block_ids[:, 0] = anchor_ids
    positions = anchor + torch.arange(config.block_size, device=anchor_ids.device)[None]
    output = drafter(block_ids, positions, draft_cache=cache, embeddings=drafter.bind(target))
    return output.last_hidden_state


def _greedy_drafts(
    drafter: DSparkDrafter, target: PreTrainedModel, previous: torch.Tensor, hidden_states: torch.Tensor
) -> torch.Tensor:
    """The most likely drafts `[G]` of the predicting slots' `hidden_states` `[1, G, D]`, after the token `previous`."""
    base_logits = drafter.base_logits(hidden_states, drafter.bind(target))  # [1, G, V_draft]
    state, drafts = None, []
    for slot in range(base_logits.shape[1]):
        scores = base_logits[:, slot]
        if (head := drafter.markov_head) is not None:
            step, state = head.step(previous, hidden_states[:, slot], state)
            scores = scores + head.markov_w2(step)
        previous = scores.argmax(-1)
        if drafter.draft_token_ids is not None:
            previous = drafter.draft_token_ids[previous]
        drafts.append(previous)
    return torch.cat(drafts)
