"""Rows of different lengths in one pass of a target with recurrent state.

Keys and values of each row lie in a [`RaggedCache`], and recurrent states along the axis of rows. Rows that feed fewer tokens
than the longest are padded behind them. Padding cannot be kept out of a recurrent state, so such a row returns to the copy from
before the pass, as if a draft of it had been rejected, and its tokens are fed again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, LinearAttentionLayer
from transformers.masking_utils import causal_mask_function

from ..ragged.attention import RaggedMask
from ..ragged.cache import RaggedCache
from ..ragged.plan import Group
from ..transformers_names import CACHE_KEY, attention_name, compute_device
from ..trials import is_near
from .rollback_trial import PromptedTarget

_shares_rightly: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


class SharedStates:
    """
    The cache of several rows, each of which feeds and keeps its own number of tokens.

    Args:
        model: The target.
        cache: Its cache after the prompts; its recurrent states are used up.
        attended: False at padding, `[B, T]`; `None` for no padding.
        position_ids: Positions of the columns, `[B, T]` or `[axes, B, T]`; those of the last column are enough.
    """

    def __init__(self, model: PreTrainedModel, cache: Cache, attended: torch.Tensor | None, position_ids: torch.Tensor):
        self._model = model
        layers: list[Any] = cache.layers
        with_keys = [layer for layer in layers if isinstance(layer, CacheLayerMixin)]
        self._keys = RaggedCache.of_prompts(Cache(layers=list(with_keys)), attended, position_ids)
        self._keys.pads = True
        ragged = iter(self._keys.layers)
        whole: list[Any] = [next(ragged) if isinstance(layer, CacheLayerMixin) else layer for layer in layers]
        self._cache = Cache(layers=whole)
        linear = [layer for layer in layers if isinstance(layer, LinearAttentionLayer)]
        self._states: list[dict[int, Any]] = [
            states for layer in linear for states in (layer.conv_states, layer.recurrent_states)
        ]
        self._copies: list[dict[int, torch.Tensor]] = [{} for _ in self._states]
        self._counts: list[int] = []

    def feed(self, token_ids: list[torch.Tensor], may_reject: bool = True, **forward_kwargs: Any) -> tuple[Any, Group]:
        """
        One pass over new tokens of each row, at least one.

        Args:
            token_ids: Of each row, `[N_row]`.
            may_reject: Whether any of them may be rejected. Otherwise nothing is copied, unless rows are padded.
            forward_kwargs: For the target.

        Returns:
            The target's output of padded rows `[B, Q, ...]`, and the group whose `unpad` gives that of the tokens.
        """
        self._counts = [len(ids) for ids in token_ids]
        if may_reject or len(set(self._counts)) > 1:
            self._save()
        plan = self._keys.plan(self._counts)
        group, device = plan.groups[0], token_ids[0].device
        rows = torch.arange(len(token_ids))[:, None].expand_as(group.query_columns)
        positions = self._keys.positions(rows, group.query_columns)
        rule: Callable[..., Any] = causal_mask_function
        like = torch.empty(0, dtype=self._model.dtype, device=device)
        mask = RaggedMask(plan, rule).additive(0, 1, like)
        group = plan.on(device).groups[0]
        output = self._model(
            input_ids=group.pad(torch.cat(token_ids)),
            position_ids=positions.to(device),
            attention_mask=mask,
            use_cache=True,
            return_dict=True,
            **{CACHE_KEY: self._cache},
            **forward_kwargs,
        )
        return output, group

    def keep(self, kept: list[int]) -> list[int]:
        """
        Ends a pass.

        Args:
            kept: How many of the tokens that each row has fed stay.

        Returns:
            How many of them are to be fed again, because the row's states have returned to where they were.
        """
        longest = max(self._counts)
        is_whole = [count == keeps == longest for count, keeps in zip(self._counts, kept, strict=True)]
        back = [row for row, whole in enumerate(is_whole) if not whole]
        if back:
            for states, copies in zip(self._states, self._copies, strict=True):
                for index, before in copies.items():
                    states[index][back] = before[back]
        lengths = zip(self._keys.lengths, kept, is_whole, strict=True)
        self._keys.lengths = [length + keeps * whole for length, keeps, whole in lengths]
        return [0 if whole else keeps for keeps, whole in zip(kept, is_whole, strict=True)]

    def select(self, rows: list[int]) -> None:
        """Keeps only these rows."""
        self._keys.select(rows)
        for states in self._states:
            for index, state in states.items():
                states[index] = None if state is None else state[rows]
        self._copies = [{} for _ in self._states]

    def _save(self) -> None:
        for states, copies in zip(self._states, self._copies, strict=True):
            for index, state in states.items():
                if state is not None:
                    copies.setdefault(index, torch.empty_like(state)).copy_(state)


def can_share(model: PreTrainedModel, cache: Cache) -> bool:
    """
    Whether rows of different lengths may share a pass of this target.

    Its layers must keep all keys and values, or states alone, and its attention must take a mask with a row for each token.
    Whether the logits are right is tried once for each target.
    """
    layers: list[Any] = cache.layers
    has_other_layers = any(
        (type(layer) is not DynamicLayer and isinstance(layer, CacheLayerMixin)) or not _has_all_states(layer)
        for layer in layers
    )
    if has_other_layers or attention_name(model.config.get_text_config(decoder=True)) not in ("eager", "sdpa"):
        return False
    if not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return False
    if model not in _shares_rightly:
        _shares_rightly[model] = _is_right(model)
    return _shares_rightly[model]


def _has_all_states(layer: Any) -> bool:
    """Whether a layer is no convolution that records its past instead of being copied."""
    if not isinstance(layer, LinearAttentionLayer):
        return True
    return not getattr(layer, "record_past", False)


@torch.no_grad()
def _is_right(model: PreTrainedModel) -> bool:
    """Whether two rows of different lengths get the logits that each gets alone, also after drafts were rejected."""
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    ids = torch.arange(1, 25, device=compute_device(model)).view(2, 12) % vocab_size
    positions = torch.arange(5, device=compute_device(model)).expand(2, 5)
    try:
        alone = []
        for row in ids.split(1):
            single = PromptedTarget(model, row[:, :5])
            alone.append(torch.cat([single.feed(token) for token in row[:, 5:10].split(1, dim=1)], dim=1)[0])
        cache = DynamicCache(config=model.config)
        model(input_ids=ids[:, :5], position_ids=positions, use_cache=True, **{CACHE_KEY: cache})
        shared = SharedStates(model, cache, None, positions)
        together = []
        # Of the first row a draft is rejected, and the second is padded. Then both feed again what they kept, and more.
        for first, second, kept in (((5, 9), (5, 7), [3, 2]), ((5, 9), (5, 9), [4, 4]), ((9, 10), (9, 10), [1, 1])):
            output, group = shared.feed([ids[0, slice(*first)], ids[1, slice(*second)]])
            shared.keep(kept)
            together.append(group.unpad(output.logits))
    except Exception:  # Whatever the model objects to, it does not take rows in this form.
        return False
    expected = [alone[0][:4], alone[1][:2], alone[0][:4], alone[1][:4], alone[0][4:], alone[1][4:]]
    return is_near(torch.cat(together).float(), torch.cat(expected), model)
