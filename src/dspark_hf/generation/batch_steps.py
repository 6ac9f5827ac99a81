"""Several rows as plain `generate` shows them to streamers and criteria: one new token of every row per step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.generation.streamers import BaseStreamer

from .output import Output
from .returned import stacked
from .stopping import StoppingRules


class BatchSteps:
    """
    Shows the tokens of a batch to criteria and streamers, one step of all rows at a time.

    Rows have different lengths here. Once every row has its token of a step, the criteria and the streamer see exactly the batch
    that plain `generate` would have shown them. So a criterion may use a row's index, compare rows or end the whole batch.
    Tokens that rows ahead of the others had produced beyond the end are dropped.

    Args:
        outputs: The outputs of all rows.
        rules: The criteria.
        streamer: Gets the tokens `[B]` of each step.
        pad_token_id: Fills rows that have ended.
    """

    def __init__(
        self, outputs: Sequence[Output], rules: StoppingRules, streamer: BaseStreamer | None, pad_token_id: int
    ):
        self._outputs = outputs
        self._rules = rules
        self._streamer = streamer
        self._pad_token_id = pad_token_id
        self._num_steps = 0
        self._unfinished = [True] * len(outputs)
        self._scores: tuple[torch.Tensor, ...] | None = None if outputs[0].returned.scores is None else ()

    def advance(self) -> None:
        """Called after each round: ends outputs where a criterion has ended them."""
        while any(self._unfinished) and all(o.is_finished or o.num_new > self._num_steps for o in self._outputs):
            self._num_steps += 1
            tokens, ended = self._tokens_of_step(), self._ended_by_step()
            if self._streamer is not None:
                self._streamer.put(torch.tensor(tokens))
            for row, output in enumerate(self._outputs):
                if ended[row] and self._unfinished[row]:
                    self._unfinished[row] = False
                    if self._rules.pads_ended_rows:
                        output.end_after(self._num_steps)
        if not any(self._unfinished):
            for output in self._outputs:
                output.end_after(self._num_steps)

    def _tokens_of_step(self) -> list[int]:
        """The token of each row at the step, padding for rows that have ended."""
        step = self._num_steps - 1
        return [o.new_ids[step] if step < o.num_new else self._pad_token_id for o in self._outputs]

    def _ended_by_step(self) -> list[bool]:
        """Which rows the criteria end at the step. Only those that limits and end tokens do not cover are called."""
        if self._rules.has_others:
            return self._rules.ask(self._ids_of_step(), self._scores_of_step())
        rooms = [output.room + output.num_new - self._num_steps for output in self._outputs]
        return [self._rules.ends_with(*pair) for pair in zip(self._tokens_of_step(), rooms, strict=True)]

    def _ids_of_step(self) -> torch.Tensor:
        """All rows up to the step, `[B, P + num_steps]`."""
        rows = [output.ids[:, : output.ids.shape[1] - output.num_new + self._num_steps] for output in self._outputs]
        longest = max(row.shape[1] for row in rows)
        pad = torch.nn.functional.pad
        return torch.cat([pad(row, (0, longest - row.shape[1]), value=self._pad_token_id) for row in rows])

    def _scores_of_step(self) -> tuple[torch.Tensor, ...] | None:
        """The scores `[B, V]` of all steps, where the user asked for scores."""
        if self._scores is not None:
            step = slice(self._num_steps - 1, self._num_steps)
            rows = [(output.returned.scores or ())[step] for output in self._outputs]
            self._scores += stacked(rows) or ()
        return self._scores
