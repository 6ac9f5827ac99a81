"""Keys and values of several rows that grow at different speeds, and attention over them.

Each layer holds one buffer `[B, H_kv, capacity, d]`. A pass writes its tokens at each row's own columns; taking rejected
tokens back is moving a row's length, so nothing is copied, cropped or concatenated in a round. Columns are those of
plain batched `generate` (left padding included), so the buffers turn back into an ordinary cache at the end.

The tokens of all rows go through the target's linear layers packed in one sequence; only the attention product itself
unpacks them, in an attention function that is put in the place of the target's own while a pass runs.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..transformers_names import attention_name, has_exchangeable_attention

_GROWTH = 128  # Buffers grow in steps of this many columns.
_PREFIX = "dspark_hf_rows_"

KeyValues = tuple[torch.Tensor, torch.Tensor]


@dataclass
class RowPlan:
    """
    Where the tokens of one pass belong; shared by all layers of a cache.

    Args:
        rows, slots: Row of each of the `N` tokens and its place among that row's tokens, `[N]`.
        columns: The column each is written to, `[N]`.
        num_slots: Most tokens that a row feeds.
        span: Columns that the pass reads: the longest row's length with its new tokens.
        key_mask: False at padding columns, `[B, span]`.
        query_columns: Column of each row's slots, `[B, num_slots]`; unused slots repeat the row's last.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    columns: torch.Tensor
    num_slots: int
    span: int
    key_mask: torch.Tensor
    query_columns: torch.Tensor
    _masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int | None = None, num_groups: int = 1) -> torch.Tensor:
        """
        What each slot sees: earlier columns and its own, no padding, `[B, 1, num_groups * num_slots, span]`.

        Args:
            window: Columns that a token sees at most, its own included.
            num_groups: How often the slots are repeated: query heads that share keys.
        """
        key = (window, num_groups)
        if key not in self._masks:  # Made by the first layer of a kind, for all of them.
            self._masks[key] = self._mask(window).repeat(1, 1, num_groups, 1)
        return self._masks[key]

    def _mask(self, window: int | None) -> torch.Tensor:
        columns = torch.arange(self.span, device=self.query_columns.device)
        distance = self.query_columns[:, :, None] - columns  # [B, num_slots, span]
        visible = (distance >= 0) & self.key_mask[:, None]
        if window is not None:
            visible &= distance < window
        return visible[:, None]


class RowLayer(CacheLayerMixin):
    """One layer's buffers. `update` takes packed states `[1, H_kv, N, d]` or padded ones `[B, H_kv, Q, d]`."""

    is_croppable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_columns: int):
        """Starts from the last columns of a prompt `[B, H_kv, T, d]`; earlier ones are out of every later window."""
        super().__init__()
        self.keys = _placed_last(keys, num_columns)
        self.values = _placed_last(values, num_columns)
        self.plan: RowPlan | None = None
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the prompt made the buffers."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        plan = self.plan
        assert plan is not None and self.keys is not None and self.values is not None
        self.keys[plan.rows, :, plan.columns] = _by_token(key_states, plan)
        self.values[plan.rows, :, plan.columns] = _by_token(value_states, plan)
        return self.keys[:, :, : plan.span], self.values[:, :, : plan.span]

    def reserve(self, num_columns: int) -> None:
        """Makes room for `num_columns` columns a row."""
        assert self.keys is not None and self.values is not None
        if num_columns > self.keys.shape[2]:
            extra = (0, 0, 0, num_columns + _GROWTH - self.keys.shape[2])
            self.keys = torch.nn.functional.pad(self.keys, extra)
            self.values = torch.nn.functional.pad(self.values, extra)

    def select(self, rows: torch.Tensor) -> None:
        """Keeps these rows `[n]`."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[rows], self.values[rows]

    def get_seq_length(self) -> int:
        return 0 if self.plan is None else self.plan.span - self.plan.num_slots

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return (query_length if self.plan is None else self.plan.span), 0

    def get_max_length(self) -> int:
        return -1


class RowCache(Cache):
    """
    A cache whose rows have lengths of their own.

    Args:
        prompt_cache: The cache after the prompt's pass, its rows in step.
        attended: False at padding, `[B, P]`; `None` for no padding.

    Attributes:
        lengths (`list[int]`): Columns in use of each row, padding counted.
    """

    def __init__(self, prompt_cache: Cache, attended: torch.Tensor | None):
        num_columns = int(prompt_cache.get_seq_length())
        layers = [
            RowLayer(layer.keys[:, :, :num_columns], layer.values[:, :, :num_columns], num_columns)
            for layer in prompt_cache.layers
        ]
        super().__init__(layers=layers)
        num_rows = layers[0].keys.shape[0]
        self.lengths = [num_columns] * num_rows
        device = layers[0].keys.device
        if attended is None:
            attended = torch.ones(num_rows, num_columns, dtype=torch.bool, device=device)
        self.key_mask = attended.to(device)

    def plan(self, counts: list[int]) -> RowPlan:
        """Makes room for `counts[r]` new tokens of each row and says where they go."""
        device = self.key_mask.device
        span = max(length + count for length, count in zip(self.lengths, counts, strict=True))
        if span > self.key_mask.shape[1]:
            self.key_mask = torch.nn.functional.pad(
                self.key_mask, (0, span + _GROWTH - self.key_mask.shape[1]), value=True
            )
        for layer in self.layers:
            layer.reserve(span)
        lengths = torch.tensor(self.lengths, device=device)
        sizes = torch.tensor(counts, device=device)
        rows = torch.arange(len(counts), device=device).repeat_interleave(sizes)
        slots = torch.arange(len(rows), device=device) - (sizes.cumsum(0) - sizes)[rows]
        num_slots = max(counts)
        place = torch.arange(num_slots, device=device).clamp(max=(sizes - 1)[:, None])
        plan = RowPlan(
            rows, slots, lengths[rows] + slots, num_slots, span, self.key_mask[:, :span], lengths[:, None] + place
        )
        for layer in self.layers:
            layer.plan = plan
        return plan

    def extract(self, row: int) -> list[KeyValues]:
        """A copy of one row's keys and values `[H_kv, length, d]` for each layer."""
        length = self.lengths[row]
        return [(layer.keys[row, :, :length].clone(), layer.values[row, :, :length].clone()) for layer in self.layers]

    def select(self, rows: list[int]) -> None:
        """Keeps only the given rows: finished ones cost nothing more."""
        for layer in self.layers:
            layer.select(torch.tensor(rows, dtype=torch.long, device=layer.keys.device))
        self.key_mask = self.key_mask[torch.tensor(rows, dtype=torch.long, device=self.key_mask.device)]
        self.lengths = [self.lengths[row] for row in rows]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers: rows x columns in use (rounded up by at most 128), whatever was rejected."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)


# ---------------------------------------------------------------------- attention

_plan: contextvars.ContextVar[RowPlan | None] = contextvars.ContextVar("dspark_hf_row_plan", default=None)
_switch_lock = threading.Lock()
_switched: dict[int, tuple[int, str]] = {}  # id of a model -> calls under way, its own implementation


def row_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """
    Attention of packed queries over their rows' buffers.

    Args:
        query: `[1, H, N, d]`.
        key, value: The buffers' columns in use, `[B, H_kv, S, d]`.
        sliding_window, softcap, s_aux: The target's own restrictions: window, soft cap and attention sinks `[H]`.

    Returns:
        `[1, N, H, d_v]`, and `None` for the weights.
    """
    plan = _plan.get()
    assert plan is not None
    num_rows, kv_heads = key.shape[:2]
    heads, groups = query.shape[1], query.shape[1] // kv_heads
    # Query groups join the slots, so keys and values are never repeated: [B, H_kv, groups * slots, d].
    padded = query.new_zeros(num_rows, plan.num_slots, heads, query.shape[-1])
    padded[plan.rows, plan.slots] = query[0].transpose(0, 1)
    folded = padded.view(num_rows, plan.num_slots, kv_heads, groups, -1).permute(0, 2, 3, 1, 4).flatten(2, 3)
    mask = plan.mask(sliding_window, groups)
    if softcap is None and s_aux is None:
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        output = _attention_with_extras(folded, key, value, mask, scaling, softcap, s_aux, groups)
    output = output.unflatten(2, (groups, plan.num_slots)).permute(0, 3, 1, 2, 4)  # [B, slots, H_kv, groups, d_v]
    return output[plan.rows, plan.slots].flatten(1, 2)[None], None


def _attention_with_extras(query, key, value, mask, scaling, softcap, sinks, groups: int) -> torch.Tensor:
    scores = query.float() @ key.float().transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:  # One more score that takes weight and gives no value.
        sink = sinks.float().view(1, key.shape[1], groups, 1).expand(len(scores), -1, -1, scores.shape[2] // groups)
        scores = torch.cat([scores, sink.flatten(2, 3)[..., None]], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return weights @ value


def can_pack(model: PreTrainedModel) -> bool:
    """Whether the target's attention goes through transformers' attention interface, where it can be put in place."""
    return has_exchangeable_attention(model) and _own_implementation(model) is not None


@contextlib.contextmanager
def row_attention_in_place(model: PreTrainedModel) -> Iterator[None]:
    """
    Within the context, passes of `model` that are [`following`] a plan attend by it. All others, in this thread or another,
    pass through to the model's own attention.

    Putting it in place takes a walk over all modules, so it stays for a whole call.
    """
    with _switch_lock:
        calls, own = _switched.get(id(model), (0, _own_implementation(model) or "sdpa"))
        if calls == 0:
            _register(own)
            model.set_attn_implementation(_PREFIX + own)
        _switched[id(model)] = (calls + 1, own)
    try:
        yield
    finally:
        with _switch_lock:
            calls, own = _switched.pop(id(model))
            if calls > 1:
                _switched[id(model)] = (calls - 1, own)
            else:
                model.set_attn_implementation(own)


@contextlib.contextmanager
def following(plan: RowPlan) -> Iterator[None]:
    """Within the context, this thread's passes attend by `plan`."""
    token = _plan.set(plan)
    try:
        yield
    finally:
        _plan.reset(token)


def _own_implementation(model: PreTrainedModel) -> str | None:
    name = attention_name(model.config)
    return name.removeprefix(_PREFIX) if isinstance(name, str) else None


def _register(own: str) -> None:
    """An attention function and mask function that act in a pass of rows and are `own` in any other."""
    name = _PREFIX + own

    def attention(module, query, key, value, attention_mask, **kwargs):
        if _plan.get() is not None:
            return row_attention(module, query, key, value, attention_mask, **kwargs)
        if own == "eager":
            own_function = sys.modules[type(module).__module__].eager_attention_forward
        else:
            own_function = ALL_ATTENTION_FUNCTIONS[own]
        return own_function(module, query, key, value, attention_mask, **kwargs)

    def mask(*args, **kwargs):
        return None if _plan.get() is not None else AttentionMaskInterface()[own](*args, **kwargs)

    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


# ---------------------------------------------------------------------- helpers


def refill(cache: Cache, rows: dict[int, list[KeyValues]]) -> None:
    """
    Puts rows that ended at different times back into an ordinary cache.

    Args:
        cache: The cache the prompt was fed with; its object stays the caller's.
        rows: For each batch index what [`RowCache.extract`] gave when the row ended. Behind a row that ended early there
            are zeros, where plain `generate` leaves what padding tokens gave.
    """
    num_columns = max(layers[0][0].shape[1] for layers in rows.values())
    cache.reset()
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):  # Older versions of transformers only fill it with zeros.
            layer.is_initialized = False
    for index in range(len(rows[0])):
        stacked = [
            torch.stack([_filled(rows[row][index][part], num_columns) for row in sorted(rows)]) for part in (0, 1)
        ]
        cache.update(*stacked, index)


def _filled(states: torch.Tensor, num_columns: int) -> torch.Tensor:
    """`[H_kv, T, d]` with zeros behind, or cut, to `[H_kv, num_columns, d]`."""
    return torch.nn.functional.pad(states, (0, 0, 0, num_columns - states.shape[1]))


def _by_token(states: torch.Tensor, plan: RowPlan) -> torch.Tensor:
    """`[N, H_kv, d]` from packed or padded states."""
    if states.shape[0] == 1 and states.shape[2] == len(plan.rows):
        return states[0].transpose(0, 1)
    return states[plan.rows, :, plan.slots]


def _placed_last(states: torch.Tensor, num_columns: int) -> torch.Tensor:
    """A buffer of `num_columns` and some columns that ends its used part with `states`."""
    rows, heads, length, size = states.shape
    buffer = states.new_zeros(rows, heads, num_columns + _GROWTH, size)
    buffer[:, :, num_columns - length : num_columns] = states
    return buffer
