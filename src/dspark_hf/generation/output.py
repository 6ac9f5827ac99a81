"""What a call has produced so far: the tokens, when they are complete, and everything the user asked to see of them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import StaticLayer
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from ..transformers_names import CACHE_KEY
from .token_choice import TokenChoice


class Output:
    """
    The output of one row of a `generate` call, grown one committed token at a time.

    Args:
        input_ids: The row's prompt, `[1, P]`.
        stopping_criteria: As `generate` prepared them; asked after every token, like plain `generate` does.
        generation_config: Says what to return.
        streamer: Gets every token.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: BaseStreamer | None = None,
    ):
        self.ids = input_ids
        self.is_finished = False
        self._criteria = stopping_criteria
        # A limit among the user's own criteria replaces the one that `generate` makes of its settings.
        limits = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
        self._max_length = min(limits, default=generation_config.max_length)
        self._streamer = streamer
        self.returns_dict = bool(generation_config.return_dict_in_generate)
        self.scores = self._wanted(generation_config.output_scores)
        self.logits = self._wanted(generation_config.output_logits)
        self.attentions = self._wanted(generation_config.output_attentions)
        self.hidden_states = self._wanted(generation_config.output_hidden_states)
        # Limits and end-of-sequence tokens can be found in a list of new tokens without a call for each.
        self._is_simple = all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in stopping_criteria)
        eos = [c.eos_token_id for c in stopping_criteria if type(c) is EosTokenCriteria]
        self._eos_ids = {token for ids in eos for token in ids.reshape(-1).tolist()}

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self._max_length - self.ids.shape[1]

    def commit(self, choice: TokenChoice, raw: Any, is_prefill: bool = False) -> None:
        """
        Adds the tokens that `choice` makes, up to the end of the output.

        Args:
            choice: The tokens of this round.
            raw: The target's output of this round, for attentions and hidden states.
            is_prefill: Whether this is the first token, from the prompt's pass.
        """
        if self._is_simple and choice.is_rowwise:
            num_committed = self._commit_together(choice)
        else:
            num_committed = 0
            for token_ids in choice.one_by_one(lambda: self.ids):
                self._append(token_ids[:, None], choice, num_committed, num_committed + 1)
                num_committed += 1
                if bool(self._criteria(self.ids, self.scores).all()):
                    self.is_finished = True
                    break
        self._collect(raw, num_committed, choice.num_slots, is_prefill)

    # ------------------------------------------------------------------ helpers

    def _wanted(self, flag: bool | None) -> tuple | None:
        return () if self.returns_dict and flag else None

    def _commit_together(self, choice: TokenChoice) -> int:
        tokens = choice.all_tokens()  # [B, N]
        listed = tokens[0].tolist()[: max(self.room, 1)]
        ends = [i + 1 for i, token in enumerate(listed) if token in self._eos_ids]
        num_committed = ends[0] if ends else len(listed)
        self._append(tokens[:, :num_committed], choice, 0, num_committed)
        self.is_finished = bool(ends) or self.room <= 0
        return num_committed

    def _append(self, tokens: torch.Tensor, choice: TokenChoice, start: int, end: int) -> None:
        """Adds `tokens` `[B, end - start]`, chosen at slots `start..end-1` of the round."""
        self.ids = torch.cat([self.ids, tokens], dim=1)
        if self.scores is not None:
            self.scores += tuple(choice.scores_at(slot) for slot in range(start, end))
        if self.logits is not None:
            self.logits += tuple(choice.logits_at(slot) for slot in range(start, end))
        if self._streamer is not None:
            if hasattr(self._streamer, "next_are_drafted"):
                self._streamer.next_are_drafted(max(choice.num_accepted - start, 0))
            for column in tokens.cpu().unbind(1):
                self._streamer.put(column)

    def _collect(self, raw: Any, num_committed: int, num_slots: int, is_prefill: bool) -> None:
        """One entry a token, as in plain `generate`: the states at the position whose logits gave the token."""
        if self.hidden_states is not None:
            if is_prefill:
                self.hidden_states += (raw.hidden_states,)
            else:
                self.hidden_states += tuple(
                    tuple(state[:, slot : slot + 1] for state in raw.hidden_states) for slot in range(num_committed)
                )
        if self.attentions is not None:
            if is_prefill:
                self.attentions += (raw.attentions,)
            else:
                layers = list(raw[CACHE_KEY].layers)
                self.attentions += tuple(
                    tuple(
                        _row_of(weights, slot, num_slots, layer)
                        for weights, layer in itertools.zip_longest(raw.attentions, layers[: len(raw.attentions)])
                    )
                    for slot in range(num_committed)
                )


def assemble(outputs: list[Output], pad_token_id: int, cache: Any) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """
    What plain `generate` returns for these rows.

    Where plain `generate` goes on computing scores and states for a row that has ended, which mean nothing, ours are zero.

    Args:
        outputs: Of every row, in the order of the batch.
        pad_token_id: Fills rows that ended before the longest.
        cache: The target's cache, to be returned with the rest.
    """
    longest = max(output.ids.shape[1] for output in outputs)
    padded = [torch.nn.functional.pad(o.ids, (0, longest - o.ids.shape[1]), value=pad_token_id) for o in outputs]
    sequences = torch.cat(padded)
    if not outputs[0].returns_dict:
        return sequences
    return GenerateDecoderOnlyOutput(
        sequences=sequences,
        scores=_stacked([output.scores for output in outputs]),
        logits=_stacked([output.logits for output in outputs]),
        attentions=_stacked([output.attentions for output in outputs]),
        hidden_states=_stacked([output.hidden_states for output in outputs]),
        **{CACHE_KEY: cache},
    )


def _stacked(rows: list[tuple | None]) -> tuple | None:
    """One entry a step with the rows along the batch axis, from each row's entries."""
    if rows[0] is None or len(rows) == 1:
        return rows[0]
    longest = max(rows, key=len)
    steps = []
    for step, like in enumerate(longest):
        present = [row[step] if step < len(row) else None for row in rows]
        if isinstance(like, tuple):  # One tensor a layer.
            steps.append(
                tuple(_rows_of([None if p is None else p[i] for p in present], like[i]) for i in range(len(like)))
            )
        else:
            steps.append(_rows_of(present, like))
    return tuple(steps)


def _rows_of(present: list[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros_like(like) if tensor is None else tensor for tensor in present])


def _row_of(weights: torch.Tensor, slot: int, num_slots: int, layer: Any) -> torch.Tensor:
    """Attention `[B, H, 1, T]` of one fed position over what a pass of its own would have seen."""
    row = weights[:, :, slot : slot + 1]
    if isinstance(layer, StaticLayer):  # All of the buffer, whatever it holds.
        return row
    row = row[..., : row.shape[-1] - (num_slots - 1 - slot)]  # Without the later positions of the round.
    window = getattr(layer, "sliding_window", None)
    return row if window is None else row[..., -window:]
