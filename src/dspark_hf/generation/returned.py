"""What `generate` returns: scores, logits, attentions and hidden states per token as requested, and the final result."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import StaticLayer
from transformers.generation import GenerateDecoderOnlyOutput

from ..transformers_names import CACHE_KEY
from .target_model import TargetOutput
from .token_choice import TokenChoice

FIELDS = ("scores", "logits", "attentions", "hidden_states")


class Returned:
    """
    The requested scores, logits, attentions and hidden states of one row, one entry per token; `None` if not requested.

    Args:
        generation_config: Says what is requested.
    """

    def __init__(self, generation_config: GenerationConfig):
        def wanted(flag: bool | None) -> tuple[Any, ...] | None:
            return () if generation_config.return_dict_in_generate and flag else None

        self.scores = wanted(generation_config.output_scores)
        self.logits = wanted(generation_config.output_logits)
        self.attentions = wanted(generation_config.output_attentions)
        self.hidden_states = wanted(generation_config.output_hidden_states)

    def add_scores(self, choice: TokenChoice, start: int, end: int) -> None:
        """Adds scores and logits of the tokens at slots `start..end-1` of a round."""
        if self.scores is not None:
            self.scores += tuple(choice.scores_at(slot) for slot in range(start, end))
        if self.logits is not None:
            self.logits += tuple(choice.logits_at(slot) for slot in range(start, end))

    def add_states(self, fed: TargetOutput, num_committed: int, num_slots: int) -> None:
        """Adds attentions and hidden states of the first `num_committed` of `num_slots` positions of a pass."""
        if self.hidden_states is not None:
            states = fed.raw.hidden_states
            if fed.is_whole:
                self.hidden_states += (states,)
            else:
                self.hidden_states += tuple(
                    tuple(_state_at(slot, state) for state in states) for slot in range(num_committed)
                )
        if self.attentions is not None:
            attentions = fed.raw.attentions
            if fed.is_whole:
                self.attentions += (attentions,)
            else:
                layers = list(fed.raw[CACHE_KEY].layers)[: len(attentions)]
                self.attentions += tuple(
                    tuple(
                        _attention_at(slot, num_slots, weights, layer)
                        for weights, layer in itertools.zip_longest(attentions, layers)
                    )
                    for slot in range(num_committed)
                )

    def truncate(self, num_tokens: int) -> None:
        """Keeps the entries of the first tokens."""
        for name in FIELDS:
            if (entries := vars(self)[name]) is not None:
                setattr(self, name, entries[:num_tokens])


def padded(rows: Sequence[torch.Tensor], pad_token_id: int) -> torch.Tensor:
    """Rows `[1, L_row]` as one batch `[B, L]`; rows that ended before the longest are padded on the right."""
    longest = max(ids.shape[1] for ids in rows)
    return torch.cat([torch.nn.functional.pad(ids, (0, longest - ids.shape[1]), value=pad_token_id) for ids in rows])


def assemble(
    sequences: torch.Tensor, returned: Sequence[Returned], generation_config: GenerationConfig, cache: Any
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """
    What plain `generate` returns for these rows.

    For rows that have ended, plain `generate` returns meaningless scores and states until the longest row ends. Here these
    are zero.

    Args:
        sequences: The tokens of all rows, `[B, L]`.
        returned: The scores and states of each row.
        generation_config: Says what to return.
        cache: The target's cache, which is part of the result.
    """
    if not generation_config.return_dict_in_generate:
        return sequences
    shown: dict[str, Any] = {"sequences": sequences, CACHE_KEY: cache} | {
        name: stacked([vars(row)[name] for row in returned]) for name in FIELDS
    }
    return GenerateDecoderOnlyOutput(**shown)


def stacked(rows: Sequence[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """Stacks the entries of all rows along the batch axis, token by token; zeros for rows that have ended."""
    if rows[0] is None or len(rows) == 1:
        return rows[0]
    steps: list[Any] = []
    for present in itertools.zip_longest(*[row or () for row in rows]):
        like = next(entry for entry in present if entry is not None)
        if isinstance(like, tuple):  # A tensor per layer.
            layers = range(len(like))
            steps.append(tuple(_rows_of([None if p is None else p[i] for p in present], like[i]) for i in layers))
        else:
            steps.append(_rows_of(present, like))
    return tuple(steps)


def _rows_of(present: Sequence[torch.Tensor | None], like: torch.Tensor) -> torch.Tensor:
    rows = [torch.zeros_like(like) if tensor is None else tensor for tensor in present]
    return torch.cat(rows, dim=_batch_axis(like))


def _state_at(slot: int, state: torch.Tensor) -> torch.Tensor:
    """The hidden state of one token of one row."""
    return state.narrow(_batch_axis(state) + 1, slot, 1)


def _batch_axis(of_row: torch.Tensor) -> int:
    """The first axis of one row's scores, attentions or hidden states, but the second of AltUp's streams, `[n, 1, N, D]`."""
    return 1 if of_row.dim() == 4 and of_row.shape[0] > 1 else 0


def _attention_at(slot: int, num_slots: int, weights: torch.Tensor, layer: Any) -> torch.Tensor:
    """Attention `[B, H, 1, T]` of one position of a pass, in the shape that a pass over this position alone would give."""
    row = weights[:, :, slot : slot + 1]
    if isinstance(layer, StaticLayer):  # Attention always covers the whole buffer.
        return row
    row = row[..., : row.shape[-1] - (num_slots - 1 - slot)]  # Leaves out the later positions of the round.
    window = getattr(layer, "sliding_window", None)
    return row if window is None else row[..., -window:]
