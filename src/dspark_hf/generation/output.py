"""The tokens of a row so far, up to where its output is complete."""

from __future__ import annotations

import torch
from transformers.generation.streamers import BaseStreamer

from .returned import Returned
from .stopping import StoppingRules
from .streamer import DraftStreamer
from .target_model import TargetOutput
from .token_choice import TokenChoice


class Output:
    """
    The output of one row of a `generate` call.

    Args:
        input_ids: The row's prompt, `[1, P]`.
        rules: The stopping criteria.
        returned: Collects the scores, states, ... that the user asked for.
        is_alone: Whether it is the only row of the call. Then the criteria are asked here after every token; for a batch,
            [`~dspark_hf.generation.batch_steps.BatchSteps`] asks them.
        streamer: Gets every token.

    Attributes:
        ids (`torch.Tensor` of shape `[1, L]`): All tokens.
        new_ids (`list[int]`): Those after the prompt.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        rules: StoppingRules,
        returned: Returned,
        is_alone: bool = True,
        streamer: BaseStreamer | None = None,
    ):
        self.ids = input_ids
        self.new_ids: list[int] = []
        self.is_finished = False
        self.returned = returned
        self._rules = rules
        self._prompt_length = input_ids.shape[1]
        self._asks_criteria = is_alone and rules.has_others
        self._streamer = streamer

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self._rules.max_length - self.ids.shape[1]

    @property
    def num_new(self) -> int:
        """Tokens after the prompt."""
        return len(self.new_ids)

    def commit(self, choice: TokenChoice, fed: TargetOutput) -> None:
        """
        Adds the tokens of a round, up to the end of the output.

        Args:
            choice: The tokens of the round, chosen already or to be chosen one by one.
            fed: The target's pass, for the attentions and hidden states to return.
        """
        num_committed = 0
        if choice.tokens is not None:
            num_committed = self._rules.num_until_end(choice.listed, self.room)
            self._append(choice, 0, choice.tokens[:, :num_committed], choice.listed[:num_committed])
        else:
            for token_ids, token in choice.one_by_one(lambda: self.ids):
                self._append(choice, num_committed, token_ids[:, None], [token])
                num_committed += 1
                if self.is_finished:
                    break
        self.returned.add_states(fed, num_committed, choice.num_slots)

    def end_after(self, num_new: int) -> None:
        """Completes the output after `num_new` new tokens; later ones are dropped."""
        self.ids = self.ids[:, : self._prompt_length + num_new]
        del self.new_ids[num_new:]
        self.returned.truncate(num_new)
        self.is_finished = True

    def _append(self, choice: TokenChoice, start: int, tokens: torch.Tensor, listed: list[int]) -> None:
        """Adds `tokens` `[1, n]`, those of slots `start` and following of the round; `listed` holds the same as a list."""
        self.ids = torch.cat([self.ids, tokens], dim=1)
        self.new_ids += listed
        self.returned.add_scores(choice, start, start + len(listed))
        if isinstance(self._streamer, DraftStreamer):
            self._streamer.next_are_drafted(max(choice.num_accepted - start, 0))
        if self._streamer is not None:
            for token in listed:
                self._streamer.put(torch.tensor([token]))
        if self._asks_criteria:
            self.is_finished = all(self._rules.ask(self.ids, self.returned.scores))
        else:
            self.is_finished = self._rules.ends_with(listed[-1], self.room)
