"""A target that processes tokens of several rows in one pass."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.utils import logging

from ..tapping import batch_axis
from ..target_config import layer_types, optional_field, shares_keys
from ..transformers_names import CACHE_KEY, takes_cache
from ..trials import is_near, trial_ids, trial_positions
from .attention import NotPackable, RaggedMask
from .cache import RaggedCache
from .exchange import attention_in_place, can_exchange_attention, following
from .plan import RaggedPlan

logger = logging.get_logger(__name__)

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")

# Targets whose rows cannot be packed; and, for targets that pad rows, whether a trial gave the right logits.
_not_packable: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
# The latter for caches that begin with prompts, and for empty ones.
_right_when_padded: weakref.WeakKeyDictionary[PreTrainedModel, dict[bool, bool]] = weakref.WeakKeyDictionary()
_right_when_packed: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()

_TRIAL_LENGTH = 8  # Tokens of each row in a trial.


class CannotShareRows(ValueError):
    """
    Rows of different lengths in one pass of a target would not get the logits that each gets alone.

    Args:
        model: The target.
        reason: Why, as the part of a sentence that follows "because".
    """

    def __init__(self, model: PreTrainedModel, reason: str):
        name = type(model).__name__
        super().__init__(
            f"Rows of different lengths cannot share a pass of {name}: {reason}. Generate for each row alone."
        )
        self.reason = reason


class RaggedTarget:
    """
    Runs a target over new tokens of several rows of different lengths, in one pass.

    The tokens of all rows are packed into one sequence for the target's linear layers; only the attention, which is exchanged
    for ours, treats rows separately. If a target does not allow that, its rows are padded to the longest of the pass: the same
    output at a higher cost. Once per such target, a trial checks that the output really is the same.

    Args:
        model: The target.
        cache: The keys and values of its rows.
        with_prompts: Whether the target was fed prompts in the ordinary way, and the cache holds them. Otherwise it is empty.

    Raises:
        CannotShareRows: when rows cannot share a pass of the target.
    """

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, with_prompts: bool = False) -> None:
        if not takes_cache(model):
            raise CannotShareRows(model, "it has no cache")
        self.model = model
        self.cache = cache
        self._with_prompts = with_prompts
        self._rules = mask_rules(model)
        self._shares_keys = shares_keys(model.config.get_text_config(decoder=True))
        if model in _not_packable:
            self._pad_rows("")
        elif not can_exchange_attention(model):
            self._pad_rows("it does not use transformers' attention interface")

    def try_packing(self) -> None:
        """
        Once for each target, finds out whether packed rows get the right logits. Otherwise they are padded.

        Raises:
            CannotShareRows: when padded rows do not get them either.
        """
        if self.cache.pads or self.model in _right_when_packed:
            return
        if _is_right(self.model, len(self.cache.layers), self._with_prompts):
            _right_when_packed.add(self.model)
        else:
            _not_packable.add(self.model)
            self._pad_rows("a trial with two packed rows gave other logits than each row alone")

    def attention_in_place(self) -> contextlib.AbstractContextManager[None]:
        """The context in which [`~RaggedTarget.feed`] can be called; it may stay open as long as the target is in use."""
        return contextlib.nullcontext() if self.cache.pads else attention_in_place(self.model)

    def feed(self, token_ids: torch.Tensor, counts: list[int], wants_logits: bool = True, **forward_kwargs: Any) -> Any:
        """
        One pass of the target. It does not change the lengths of the cache: the caller raises them by the tokens to keep.

        Args:
            token_ids: The new tokens of all rows, one row after the other, `[N]`.
            counts: How many of them belong to each row, possibly none.
            wants_logits: Whether to compute logits; prompts need none.
            forward_kwargs: Arguments of the target, such as `output_hidden_states`.

        Returns:
            The target's output. Its logits and hidden states have the shape `[1, N, ...]`.

        Raises:
            ValueError: when rows cannot share a pass of the target.
        """
        if not wants_logits and "logits_to_keep" in inspect.signature(self.model.forward).parameters:
            forward_kwargs["logits_to_keep"] = token_ids.new_zeros(1)
        if not self.cache.pads:
            try:
                return self._packed(self.cache.plan(counts), token_ids, forward_kwargs)
            except NotPackable as reason:
                _not_packable.add(self.model)
                self._pad_rows(str(reason))
        return self._padded(self.cache.plan(counts), token_ids, wants_logits, forward_kwargs)

    # ------------------------------------------------------------------ the two ways to feed

    def _packed(self, plan: RaggedPlan, token_ids: torch.Tensor, forward_kwargs: dict[str, Any]) -> Any:
        positions = self.cache.positions(plan.rows, plan.columns)[..., None, :]
        with following(plan):
            return self._forward(token_ids[None], positions, None, forward_kwargs)

    def _padded(
        self, plan: RaggedPlan, token_ids: torch.Tensor, wants_logits: bool, forward_kwargs: dict[str, Any]
    ) -> Any:
        group, device = plan.groups[0], token_ids.device
        rows = torch.arange(len(plan.counts))[group.rows][:, None].expand_as(group.query_columns)
        positions = self.cache.positions(rows, group.query_columns)
        like = torch.empty(0, dtype=self.model.dtype, device=device)
        masks = {kind: RaggedMask(plan, rule).additive(0, 1, like) for kind, rule in self._rules.items()}
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        output = self._forward(plan.on(device).groups[0].pad(token_ids), positions, mask, forward_kwargs)

        def packed(states: torch.Tensor) -> torch.Tensor:
            return plan.on(states.device).groups[0].unpad(states)[None]

        text = self.model.config.get_text_config(decoder=True)

        def packed_state(state: torch.Tensor | None) -> torch.Tensor | None:
            if state is None:
                return None
            has_streams_first = batch_axis(text, state) == 1
            return torch.stack([packed(stream) for stream in state]) if has_streams_first else packed(state)

        output.logits = packed(output.logits) if wants_logits else None
        if output.hidden_states is not None:
            output.hidden_states = tuple(packed_state(state) for state in output.hidden_states)
        return output

    def _forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, attention_mask: Any, forward_kwargs: dict[str, Any]
    ) -> Any:
        if self._shares_keys:
            # Indices, because with a number of tokens Gemma 4 would drop the queries of the other tokens.
            all_tokens = torch.arange(input_ids.shape[1], device=input_ids.device)
            forward_kwargs = {"logits_to_keep": all_tokens} | forward_kwargs
        return self.model(
            input_ids=input_ids,
            position_ids=position_ids.to(input_ids.device, non_blocking=True),
            attention_mask=attention_mask,
            use_cache=True,
            return_dict=True,
            **{CACHE_KEY: self.cache},
            **forward_kwargs,
        )

    def _pad_rows(self, reason: str) -> None:
        """Switches to padded rows, if a trial gives the right logits."""
        self.cache.pads = True
        name = type(self.model).__name__
        is_right = _right_when_padded.setdefault(self.model, {})
        if self._with_prompts not in is_right:
            is_right[self._with_prompts] = True  # For the trial itself, which calls this method too.
            is_right[self._with_prompts] = _is_right(self.model, len(self.cache.layers), self._with_prompts)
            if is_right[self._with_prompts]:
                logger.warning_once(
                    f"Rows of {name} are padded to the longest of each pass instead of packed, because {reason}. The output is "
                    "the same, at a higher cost."
                )
        if not is_right[self._with_prompts]:
            raise CannotShareRows(self.model, "a trial with two rows gave other logits than each row alone")


@torch.no_grad()
def _is_right(model: PreTrainedModel, num_layers: int, with_prompts: bool) -> bool:
    """Whether two short rows of different lengths in one pass get the logits that each gets alone."""
    ids = trial_ids(model, 2 * _TRIAL_LENGTH).reshape(2, -1)
    try:
        start, expected, cache = _fed_ordinarily(model, ids) if with_prompts else _fed_alone(model, ids, num_layers)
        target = RaggedTarget(model, cache, with_prompts)
        logits: list[list[torch.Tensor]] = [[], []]
        fed = [start, start]
        with target.attention_in_place():
            for counts in ([2, 3], [2, 1]):  # Each row gets four tokens, in two passes.
                new_ids = [ids[row, fed[row] : fed[row] + count] for row, count in enumerate(counts)]
                parts = target.feed(torch.cat(new_ids), counts).logits[0].float().split(counts)
                for row, part in enumerate(parts):
                    logits[row].append(part)
                    fed[row] += len(part)
                cache.lengths = list(fed)
    except Exception:  # Any error means that the model does not support rows in this form.
        return False
    together = torch.stack([torch.cat(parts) for parts in logits])
    return is_near(together, expected[:, : together.shape[1]], model)


def _fed_alone(model: PreTrainedModel, ids: torch.Tensor, num_layers: int) -> tuple[int, torch.Tensor, RaggedCache]:
    """The tokens that the cache holds of each row, the logits of the next ones, and the cache: an empty one."""
    positions = trial_positions(model, 0, ids.shape[1])
    alone = [model(input_ids=row, use_cache=False, **positions).logits.float() for row in ids.split(1)]
    return 0, torch.cat(alone), RaggedCache(num_layers, len(ids))


def _fed_ordinarily(model: PreTrainedModel, ids: torch.Tensor) -> tuple[int, torch.Tensor, RaggedCache]:
    """The same with the cache of prompts that were fed in the ordinary way."""
    start, end = ids.shape[1] - 4, ids.shape[1]
    positions = trial_positions(model, 0, start)
    cache, again = DynamicCache(config=model.config), DynamicCache(config=model.config)
    for own in (cache, again):
        model(input_ids=ids[:, :start], use_cache=True, **{CACHE_KEY: own}, **positions)
    rest = {CACHE_KEY: again, **trial_positions(model, start, end)}
    logits = model(input_ids=ids[:, start:], use_cache=True, **rest).logits.float()
    counted = torch.arange(start)[None].expand(len(ids), -1)
    return start, logits, RaggedCache.of_prompts(cache, None, counted)


def mask_rules(model: PreTrainedModel) -> dict[str, Callable[..., Any]]:
    """
    For each type of layer in the target, the mask function that says what a token attends to.

    Raises:
        CannotShareRows: for layer types that are not in [`LAYER_TYPES`].
    """
    config = model.config.get_text_config(decoder=True)
    window = optional_field(config, "sliding_window")
    chunk_size = optional_field(config, "attention_chunk_size")
    of_all = "full_attention" if window is None else "sliding_attention"
    types = layer_types(config) or {of_all}
    if unknown := sorted(types - set(LAYER_TYPES)):
        raise CannotShareRows(model, f"it has layers of the type {', '.join(unknown)}")
    rules: dict[str, Callable[[], Callable[..., Any]]] = {
        "full_attention": lambda: causal_mask_function,
        "sliding_attention": lambda: sliding_window_causal_mask_function(window),
        "chunked_attention": lambda: chunked_causal_mask_function(chunk_size, torch.zeros(1, dtype=torch.long)),
    }
    return {kind: rules[kind]() for kind in sorted(types)}
