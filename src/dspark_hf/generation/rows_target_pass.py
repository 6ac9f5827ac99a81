"""The target's side of a round for several rows, each feeding and keeping its own number of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..masks import as_attention_argument
from ..transformers_names import CACHE_KEY, context_features, output_hidden_states
from .row_cache import RowCache, RowPlan, can_pack, following, refill, row_attention_in_place
from .target_pass import TargetOutput, TargetPass

logger = logging.get_logger(__name__)


class RowStates(NamedTuple):
    """What one row's tokens gave in a pass, in the fields of a model output. Attention weights are not recorded."""

    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None = None


def states_of_row(raw: Any, row: int, num_rows: int) -> Any:
    """What a pass over all rows gave for one of them."""
    if num_rows == 1:
        return raw
    states = raw.hidden_states
    wanted = states is not None and all(state is not None for state in states)
    return RowStates(tuple(state[row : row + 1] for state in states) if wanted else None)


class RowsTargetPass:
    """
    Verifies several rows at once; takes over from a [`TargetPass`] that has fed their prompts.

    A pass sends `sum(1 + drafts of a row)` tokens through the target's linear layers. Where the target's attention cannot
    be put in the place of (it does not go through transformers' attention interface), rows are padded to the longest one.

    Args:
        prompt: The pass that fed the prompts.
        keep_cache: Whether the caller's cache has to hold the rows in the end.
    """

    def __init__(self, prompt: TargetPass, keep_cache: bool):
        self.model = prompt.model
        self.hidden_state_indices = prompt.hidden_state_indices
        self._wants_all_states = bool(prompt.generation_config.output_hidden_states)
        self._prompt = prompt
        self._keep_cache = keep_cache
        if any(not hasattr(layer, "keys") or hasattr(layer, "conv_states") for layer in prompt.cache.layers):
            prompt.refuse(
                f"{type(self.model).__name__} keeps states that rows of different lengths cannot share a pass with"
            )
        num_columns = prompt.past_length
        self.cache = RowCache(prompt.cache, prompt.attended_columns(0, num_columns))
        self._first_column = num_columns
        position_ids = prompt.model_kwargs.get("position_ids")
        if position_ids is None:
            prompt.refuse(f"{type(self.model).__name__} takes no position_ids, which rows of different lengths need")
        if position_ids.shape[-1] < num_columns:
            prompt.refuse(
                "its cache holds tokens that have no id (prefix tuning), which several rows at once do not allow"
            )
        self._next_positions = position_ids[..., num_columns - 1] + 1  # [B], or [axes, B] for multi-axis positions
        self._packs = can_pack(self.model)
        if self._packs:
            prompt.ending.enter_context(row_attention_in_place(self.model))
        else:
            logger.warning_once(
                f"{type(self.model).__name__} computes attention in a way of its own, so rows are padded to the longest draft of "
                "each round instead of packed: the same output, at a higher cost."
            )
        self._rows = list(range(len(self.cache.lengths)))
        self._ended: dict[int, list] = {}

    def verify(self, input_ids: list[torch.Tensor], draft_ids: list[torch.Tensor]) -> list[TargetOutput]:
        """
        Feeds each row's anchor and drafts.

        Args:
            input_ids: Of each row all committed tokens, the anchor last, `[1, L_row]`.
            draft_ids: Of each row `[1, N_row]`.

        Returns:
            Of each row the logits `[1, N_row + 1, V]` and features of the tokens fed.
        """
        fed_ids = [
            torch.cat([ids[:, -1:], drafts.to(ids.device)], dim=1)
            for ids, drafts in zip(input_ids, draft_ids, strict=True)
        ]
        counts = [ids.shape[1] for ids in fed_ids]
        plan = self.cache.plan(counts)
        raw = self._packed(plan, fed_ids) if self._packs else self._padded(plan, fed_ids)
        features = context_features(raw, self.hidden_state_indices)
        if not self._packs:
            features = _pack(features, plan)
        states = [
            _pack(state, plan) if not self._packs else state
            for state in (raw.hidden_states if self._wants_all_states else ())
        ]
        logits = raw.logits if self._packs else _pack(raw.logits, plan)
        logits = logits.to(device=fed_ids[0].device, dtype=torch.float32)
        split_states = list(zip(*(state.split(counts, dim=1) for state in states), strict=True)) or [None] * len(counts)
        rows = zip(logits.split(counts, dim=1), features.split(counts, dim=1), split_states, strict=True)
        return [TargetOutput(own_logits, own_features, RowStates(own)) for own_logits, own_features, own in rows]

    def commit(self, num_committed: list[int]) -> None:
        """Ends a round: each row keeps its committed tokens but the last, which is the next anchor."""
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, num_committed, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows still being decoded: ended ones cost nothing more."""
        for place in set(range(len(self._rows))) - set(rows):
            if self._keep_cache:
                self._ended[self._rows[place]] = self.cache.extract(place)
        self.cache.select(rows)
        self._next_positions = self._next_positions[
            ..., torch.tensor(rows, dtype=torch.long, device=self._next_positions.device)
        ]
        self._rows = [self._rows[place] for place in rows]

    def finish(self) -> Any:
        """The caller's cache, holding every row where that is wanted."""
        cache = self._prompt.finish()
        if self._keep_cache:
            refill(cache, self._ended)
        return cache

    # ------------------------------------------------------------------ the two ways to feed

    def _packed(self, plan: RowPlan, fed_ids: list[torch.Tensor]) -> Any:
        with following(plan):
            return self._forward(
                torch.cat(fed_ids, dim=1), self._positions(plan.columns, plan.rows)[..., None, :], attention_mask=None
            )

    def _padded(self, plan: RowPlan, fed_ids: list[torch.Tensor]) -> Any:
        ids = torch.nn.utils.rnn.pad_sequence([row[0] for row in fed_ids], batch_first=True)  # [B, num_slots]
        rows = torch.arange(len(ids), device=plan.rows.device)[:, None].expand_as(plan.query_columns)
        return self._forward(ids, self._positions(plan.query_columns, rows), attention_mask=self._additive_masks(plan))

    def _positions(self, columns: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Position ids of tokens at `columns` of `rows`, in the shape of `columns` (with leading axes, if any)."""
        return self._next_positions[..., rows] + (columns - self._first_column)

    def _forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: Any) -> Any:
        wanted = True if self._wants_all_states else output_hidden_states(self.hidden_state_indices)
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=True,
            output_hidden_states=wanted,
            return_dict=True,
            **{CACHE_KEY: self.cache},
        )

    def _additive_masks(self, plan: RowPlan) -> Any:
        def additive(mask: torch.Tensor) -> torch.Tensor:
            return as_attention_argument(mask, "eager", self.model.dtype)

        config = self.model.config.get_text_config(decoder=True)
        window, layer_types = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
        if layer_types and "sliding_attention" in layer_types:
            return {"full_attention": additive(plan.mask()), "sliding_attention": additive(plan.mask(window))}
        return additive(plan.mask(None if layer_types else window))


def _pack(states: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """`[1, N, ...]` from padded `[B, num_slots, ...]`."""
    return states[plan.rows.to(states.device), plan.slots.to(states.device)][None]
