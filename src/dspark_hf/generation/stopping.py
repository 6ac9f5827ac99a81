"""When outputs are complete: by limits and end tokens that each row finds for itself, or by any other criterion."""

from __future__ import annotations

import torch
from transformers import GenerationConfig
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList


class StoppingRules:
    """
    The stopping criteria of a call, as `generate` prepared them.

    Attributes:
        max_length (`int`): Most tokens of a row, its prompt included.
        eos_ids (`set[int]`): Tokens that end a row.
        has_others (`bool`): Whether there are criteria that cannot be found in a list of new tokens without a call.
        pads_ended_rows (`bool`):
            Whether a row that has ended gets padding while others go on. Plain `generate` does so where there are
            end-of-sequence tokens; otherwise all rows go on until the last one has ended.
    """

    def __init__(self, criteria: StoppingCriteriaList, generation_config: GenerationConfig):
        self.criteria = criteria
        # A limit among the user's own criteria replaces the one that `generate` makes of its settings.
        limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.max_length: int = min(limits, default=generation_config.max_length)
        self.eos_ids = {
            token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1).tolist()
        }
        self.has_others = any(type(c) not in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)
        self.pads_ended_rows = any(hasattr(c, "eos_token_id") for c in criteria)  # The very question `generate` asks.

    def num_until_end(self, new_ids: list[int], room: int) -> int:
        """How many of a row's new tokens belong to its output, by its limit and the tokens that end it; at least 1."""
        fitting = new_ids[: max(room, 1)]
        return next((n for n, token in enumerate(fitting, start=1) if token in self.eos_ids), len(fitting))

    def ends_with(self, token: int, room: int) -> bool:
        """Whether a row with this last token and room for so many more is complete, by the same rules."""
        return token in self.eos_ids or room <= 0

    def ask(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> list[bool]:
        """Which of the rows `[B, L]` all criteria together end here."""
        return self.criteria(input_ids, scores).tolist()
