"""Verification for several rows, each with a different number of tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..ragged.cache import KeyValues, RaggedCache, fill
from ..ragged.target import CannotShareRows, RaggedTarget
from ..target_config import cross_attention_layers
from .requirements import refuse
from .target_model import TargetOutput
from .target_pass import TargetPass


class RowStates(NamedTuple):
    """One row's part of a pass, in the fields of a model output. Attention weights are not recorded."""

    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None = None


def states_of_row(raw: Any, row: int, prompt: TargetPass) -> Any:
    """One row's part of the output of the pass over all prompts."""
    if prompt.num_rows == 1:
        return raw
    states = raw.hidden_states
    wanted = states is not None and all(state is not None for state in states)
    return RowStates(tuple(s.narrow(prompt.tap.batch_axis(s), row, 1) for s in states) if wanted else None)


class RowsTargetPass:
    """
    Verifies several rows at once; takes over from a [`TargetPass`] that has fed their prompts.

    Args:
        prompt: The pass that fed the prompts.
        keep_cache: Whether the caller's cache has to contain all rows at the end.

    Raises:
        CannotShareRows: for targets whose rows cannot share a pass.
        ValueError: for calls whose rows cannot share a pass.
    """

    def __init__(self, prompt: TargetPass, keep_cache: bool):
        # These fail while the prompts' cache is still whole.
        layers: dict[int, Any] = dict(enumerate(prompt.cache.layers))
        of_images = (layers.get(index) for index in cross_attention_layers(prompt.model.config))
        if any(layer is not None and layer.is_initialized for layer in of_images):
            raise CannotShareRows(prompt.model, "some layers of its cache hold images")
        RaggedTarget(prompt.model, RaggedCache(len(prompt.cache.layers), 1), with_prompts=True).try_packing()
        self._wants_all_states = bool(prompt.generation_config.output_hidden_states)
        self._prompt = prompt
        self._keep_cache = keep_cache
        self.cache = self._cache_of_prompts(prompt)
        self._target = RaggedTarget(prompt.model, self.cache, with_prompts=True)
        prompt.ending.enter_context(self._target.attention_in_place())
        self._rows = list(range(len(self.cache.lengths)))
        self._ended: dict[int, dict[int, KeyValues]] = {}

    @property
    def num_owed(self) -> list[int]:
        """Of each row, the committed tokens that are to be fed again: none."""
        return [0] * len(self._rows)

    def verify(self, input_ids: list[torch.Tensor], draft_ids: list[torch.Tensor]) -> list[TargetOutput]:
        """
        Runs the target over each row's anchor and drafts.

        Args:
            input_ids: For each row all committed tokens, the anchor last, `[1, L_row]`.
            draft_ids: For each row its drafts, `[1, N_row]`.

        Returns:
            For each row the logits `[1, N_row + 1, V]` and features of these tokens.
        """
        device = input_ids[0].device
        fed_ids = [
            torch.cat([ids[0, -1:], drafts[0].to(device)]) for ids, drafts in zip(input_ids, draft_ids, strict=True)
        ]
        counts = [len(ids) for ids in fed_ids]
        wanted = True if self._wants_all_states else self._prompt.tap.argument
        fed = torch.cat(fed_ids)
        with self._prompt.mode(), self._prompt.tap.reading():
            raw = self._target.feed(fed, counts, output_hidden_states=wanted)
        features = self._prompt.tap.features(raw).split(counts, dim=1)
        logits = raw.logits.to(device=device, dtype=torch.float32, copy=True).split(counts, dim=1)
        tap, of_layers = self._prompt.tap, raw.hidden_states if self._wants_all_states else ()
        states = [state.split(counts, dim=tap.batch_axis(state) + 1) for state in of_layers]
        of_rows: list[Any] = list(zip(*states, strict=True)) or [None] * len(counts)
        rows = zip(logits, features, of_rows, strict=True)
        return [TargetOutput(own_logits, own_features, RowStates(own)) for own_logits, own_features, own in rows]

    def commit(self, num_committed: list[int]) -> None:
        """Ends a round: each row keeps its committed tokens but the last, which is the next anchor."""
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, num_committed, strict=True)]

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows still being decoded."""
        for place in set(range(len(self._rows))) - set(rows):
            if self._keep_cache:
                self._ended[self._rows[place]] = self.cache.extract(place)
        self.cache.select(rows)
        self._rows = [self._rows[place] for place in rows]

    def finish(self, sequences: torch.Tensor, num_new: list[int]) -> Any:
        """
        The caller's cache, with all rows if `keep_cache`.

        Args:
            sequences: All rows, padded on the right, `[B, L]`.
            num_new: Tokens after each row's prompt.
        """
        num_columns = self._prompt.past_length + max(num_new) - 1  # The last token never goes through the target.
        self._prompt.end()
        if self._keep_cache:
            fill(self._prompt.cache, self._ended, num_columns)
        return self._prompt.cache

    @staticmethod
    def _cache_of_prompts(prompt: TargetPass) -> RaggedCache:
        """The rows as the pass over the prompts left them."""
        num_columns = prompt.past_length
        position_ids = prompt.model_kwargs.get("position_ids")
        if position_ids is None:
            raise CannotShareRows(prompt.model, "it takes no position_ids")
        if position_ids.shape[-1] < num_columns:
            refuse("its cache holds tokens that have no id (prefix tuning), which several rows at once do not allow")
        return RaggedCache.of_prompts(prompt.cache, prompt.attended_columns(0, num_columns), prompt.last_positions())
