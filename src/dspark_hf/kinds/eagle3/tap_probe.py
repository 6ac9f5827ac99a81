"""
Which target layers an EAGLE-3 drafter was really trained to read, found by drafting from neighbouring ones too.

Taps that are read one layer off load cleanly and are accepted seldom; engines differ in how they count them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...tapping import Tap
from ...target_config import num_decoder_layers
from ...transformers_names import GenerativeModel, compute_device
from .configuration_eagle3 import depth_taps
from .modeling_eagle3 import Eagle3Drafter

Taps = tuple[int, ...]


@dataclass
class TapProbe:
    """
    How many drafts of a chain are right with each choice of taps. Prints as a sentence.

    Args:
        declared: The taps as the files are read, outputs of layers.
        acceptance: For each choice, the drafts of a chain that were right before the first wrong one, on average.
        standard_error: Of the difference between the best choice and the declared one; 0 where they are the same.
        num_chains: Chains drafted with each choice.
    """

    declared: Taps
    acceptance: dict[Taps, float]
    standard_error: float
    num_chains: int

    @property
    def best(self) -> Taps:
        """The taps with which most drafts are right."""
        return max(self.acceptance, key=lambda taps: (self.acceptance[taps], taps == self.declared))

    @property
    def is_misread(self) -> bool:
        """Whether other taps than the declared ones fit better, beyond what chance explains."""
        return self.acceptance[self.best] - self.acceptance[self.declared] > 3 * self.standard_error

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            "declared": list(self.declared),
            "accepted_drafts": {str(list(taps)): mean for taps, mean in self.acceptance.items()},
            "best": list(self.best),
            "standard_error": self.standard_error,
            "num_chains": self.num_chains,
            "is_misread": self.is_misread,
        }

    def __str__(self) -> str:
        measured = ", ".join(f"{mean:.2f} with taps {list(taps)}" for taps, mean in self.acceptance.items())
        measured = f"Drafts per chain accepted: {measured} ({self.num_chains} chains)."
        if max(self.acceptance.values()) < 0.1:
            return f"{measured} None accepts anything: it is not the taps that are wrong, or this is not its target."
        if self.is_misread:
            return (
                f"{measured} The taps are misread: set config.target_layer_ids = {list(self.best)} and "
                "config.taps_from_depth = False, and save the drafter."
            )
        if self.best == self.declared:
            return f"{measured} The taps as read, {list(self.declared)}, fit best."
        return f"{measured} That does not tell which are right: try more prompts of the kind it was trained on."


@torch.no_grad()
def probe_taps(
    drafter: Eagle3Drafter, target: GenerativeModel, prompts: Sequence[torch.Tensor], max_new_tokens: int = 64
) -> TapProbe:
    """
    Drafts along the target's greedy continuations from the taps as read, from those one layer earlier and later, and, where three
    layers are tapped, from those that engines derive from the target's depth.

    ```python
    >>> prompts = [tokenizer(text, return_tensors="pt").input_ids for text in texts]  # doctest: +SKIP
    >>> print(probe_taps(drafter, target, prompts))  # doctest: +SKIP
    ```

    Args:
        drafter: The drafter.
        target: Its target.
        prompts: Token ids, each `[1, P]`. A few of the kind the drafter was trained on are enough.
        max_new_tokens: Tokens to continue each prompt by; a chain is drafted at every one.

    Raises:
        ValueError: when nothing could be drafted.
    """
    embeddings = drafter.bind(target)
    depth = num_decoder_layers(target.config.get_text_config(decoder=True))
    choices = tap_choices(drafter, depth)

    def entries(taps: Taps) -> list[int]:
        last = depth - 1 if drafter.config.tap_before_norm else None
        return [layer_id + 2 if layer_id == last else layer_id + 1 for layer_id in taps]

    tap = Tap(target, sorted({index for taps in choices for index in entries(taps)}))
    accepted: dict[Taps, list[int]] = {taps: [] for taps in choices}
    num_drafts = drafter.config.num_draft_tokens
    for prompt in prompts:
        sequence = target.generate(prompt.to(compute_device(target)), max_new_tokens=max_new_tokens, do_sample=False)
        with tap.reading():
            output = target(sequence, output_hidden_states=tap.argument)
        sequence = sequence.to(drafter.device)
        anchors = torch.arange(prompt.shape[1], sequence.shape[1] - num_drafts, device=drafter.device)
        if len(anchors) == 0:
            continue
        following = sequence[0].unfold(0, num_drafts, 1)[anchors + 1]  # [A, G]
        for taps, counts in accepted.items():
            features = tap.features(output, entries(taps)).to(drafter.device)
            # A chain that reads the true tokens drafts what it would draft by itself up to its first wrong draft.
            chains = drafter(sequence, anchors[None], features, embeddings=embeddings)
            drafts = drafter.base_logits(chains.last_hidden_state, embeddings).argmax(-1)  # [1, A * G]
            if drafter.draft_token_ids is not None:
                drafts = drafter.draft_token_ids[drafts]
            right = drafts.view_as(following) == following
            counts += right.long().cumprod(-1).sum(-1).tolist()
    counted = {taps: torch.tensor(found, dtype=torch.float64) for taps, found in accepted.items()}
    declared = choices[0]
    if (num_chains := len(counted[declared])) < 2:
        raise ValueError(
            f"Only {num_chains} chains of {num_drafts} drafts could be drafted: give more prompts or more max_new_tokens."
        )
    probe = TapProbe(declared, {taps: float(found.mean()) for taps, found in counted.items()}, 0.0, num_chains)
    if probe.best != declared:
        probe.standard_error = float((counted[probe.best] - counted[declared]).std()) / num_chains**0.5
    return probe


def tap_choices(drafter: Eagle3Drafter, depth: int) -> list[Taps]:
    """The taps to try, those of the drafter first, without repetition."""
    declared = tuple(drafter.config.target_layer_ids)
    choices = [declared]
    if drafter.config.use_aux_hidden_state:
        choices += [tuple(layer_id + by for layer_id in declared) for by in (-1, 1)]
        if len(declared) == 3:
            choices.append(tuple(depth_taps(depth)))
    possible = [taps for taps in choices if taps[0] >= -1 and taps[-1] < depth and list(taps) == sorted(set(taps))]
    return list(dict.fromkeys(possible))
