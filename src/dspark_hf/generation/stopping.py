"""When outputs are complete: by a length limit or an end token, which are checked per row, or by another criterion."""

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
        has_others (`bool`): Whether there are other criteria, which have to be called.
        pads_ended_rows (`bool`):
            Whether a row that has ended gets padding while others continue. Plain `generate` does so if there are
            end-of-sequence tokens; otherwise all rows continue until the last one has ended.
    """

    def __init__(self, criteria: StoppingCriteriaList, generation_config: GenerationConfig):
        self.criteria = criteria
        # A length limit passed by the user replaces the one that `generate` makes from its settings.
        limits = [c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)]
        self.max_length: int = min(limits, default=generation_config.max_length)
        self.eos_ids = {
            token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.reshape(-1).tolist()
        }
        self.has_others = any(type(c) not in (MaxLengthCriteria, EosTokenCriteria) for c in criteria)
        self.pads_ended_rows = any(hasattr(c, "eos_token_id") for c in criteria)  # The same test as in `generate`.

    def num_until_end(self, new_ids: list[int], room: int) -> int:
        """How many of a row's new tokens belong to its output, by the length limit and the end tokens; at least 1."""
        fitting = new_ids[: max(room, 1)]
        return next((n for n, token in enumerate(fitting, start=1) if token in self.eos_ids), len(fitting))

    def ends_with(self, token: int, room: int) -> bool:
        """Whether a row with this last token and room for `room` more is complete, by the same rules."""
        return token in self.eos_ids or room <= 0

    def ask(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None) -> list[bool]:
        """Calls all criteria on the rows `[B, L]`: which of them end here."""
        return self.criteria(input_ids, scores).tolist()
