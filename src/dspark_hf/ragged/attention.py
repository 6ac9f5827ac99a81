"""Attention of packed tokens over the rows they belong to.

What a token may attend to is decided by the target: the mask function that the model passes to transformers' mask interface
(causal, sliding window, chunks) is evaluated at the columns of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.nn.functional import scaled_dot_product_attention

from .plan import Group, RaggedPlan

# Up to this many queries per row, query heads that share keys are treated as more queries, so that keys are not repeated.
_FEW_QUERIES = 16

# Tensor arguments of attention functions that can be ignored, because the model has already used them.
_WITHOUT_EFFECT = frozenset({"position_ids", "position_embeddings"})


class NotPackable(AttributeError):
    """
    Raised when a model's attention does something that is not supported here, so that its rows cannot be packed.

    An `AttributeError`, so that code which asks whether the mask has an attribute gets the answer no instead of an error.
    """


class RaggedMask:
    """
    What the tokens of a pass attend to in the layers of one kind.

    Models pass it to their attention function like a mask. It is not a tensor, because no tensor shape would fit: a model that
    computes with its mask raises [`NotPackable`].

    Args:
        plan: The plan of the pass.
        rule: A mask function of transformers: whether the token at a column attends to another column of its row, called as
            `rule(batch_index, head_index, query_column, key_column)`. All rows share it.
        reach: In rows of at most so many columns the rule is plain causal attention; `None` for rows of any length.
            0 where the rule is not known to be causal.
        by_index: Whether the rule can be called with tensors of indices instead of single indices.
    """

    def __init__(
        self,
        plan: RaggedPlan,
        rule: Callable[..., torch.Tensor],
        reach: int | None = None,
        by_index: bool = True,
    ) -> None:
        self.plan, self.rule, self.reach, self.by_index = plan, rule, reach, by_index
        self._visible: dict[Any, torch.Tensor] = {}
        self._additive: dict[Any, torch.Tensor] = {}

    def __getattr__(self, name: str) -> NoReturn:
        raise NotPackable(f"it reads `{name}` of its attention mask")

    def __getitem__(self, index: Any) -> NoReturn:
        raise NotPackable("it takes parts of its attention mask")

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise NotPackable("it computes with its attention mask")

    def is_causal(self, group: Group) -> bool:
        """Whether plain causal attention is right for the group: its rows are new, have no masked columns, and fit `reach`."""
        return group.is_new and self.plan.key_mask is None and (self.reach is None or group.span <= self.reach)

    def visible(self, index: int, device: torch.device) -> torch.Tensor:
        """True where a query of the group at `index` attends to a column, `[R, 1, Q, S]`."""
        key = (index, device)
        if key not in self._visible:
            self._visible[key] = self._evaluated(self.plan.on(device).groups[index], device)
        return self._visible[key]

    def additive(self, index: int, num_repeats: int, like: torch.Tensor) -> torch.Tensor:
        """The same as an additive mask in the dtype of `like`, each query `num_repeats` times, `[R, 1, repeats * Q, S]`."""
        key = (index, num_repeats, like.dtype, like.device)
        if key not in self._additive:  # Computed by the first layer of a kind for all of them.
            visible = self.visible(index, like.device).repeat(1, 1, num_repeats, 1)
            zeros = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
            self._additive[key] = zeros.masked_fill(~visible, torch.finfo(like.dtype).min)
        return self._additive[key]

    def _evaluated(self, group: Group, device: torch.device) -> torch.Tensor:
        queries, keys = group.query_columns, torch.arange(group.span, device=device)
        zero = torch.zeros((), dtype=torch.long, device=device)
        if self.by_index:
            visible = self.rule(zero, zero, queries[:, None, :, None], keys)
        else:
            rule = torch.vmap(torch.vmap(self.rule, (None, None, None, 0)), (None, None, 0, None))
            visible = rule(zero, zero, queries.flatten(), keys).view(len(queries), 1, -1, group.span)
        if self.plan.key_mask is None:
            return visible
        known = self.plan.key_mask.to(device)[group.rows, : group.span]  # [R, C]
        return visible & torch.nn.functional.pad(known, (0, group.span - known.shape[1]), value=True)[:, None, None]


def ragged_attention(
    plan: RaggedPlan,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: RaggedMask,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """
    Attention of packed queries over the columns of their rows.

    Args:
        plan: The plan of the pass.
        module: The attention layer.
        query: `[1, H, N, d]`.
        key, value: What [`RaggedLayer.update`] returned, `[B, H_kv, S, d]`.
        attention_mask: The [`RaggedMask`] of the layer.
        scaling: Factor on the scores; `d ** -0.5` by default.
        softcap, s_aux: The target's soft cap on the scores and its attention sinks `[H]`.

    Returns:
        `[1, N, H, d_v]`, and `None` for the weights.

    Raises:
        NotPackable: when the model's attention has parts that are not supported here.
    """
    _check_known(attention_mask, kwargs)
    plan = plan.on(query.device)
    packed = query[0].transpose(0, 1)  # [N, H, d]
    if len(plan.groups) == 1:
        output = _attended(packed, key, value, plan.groups[0], 0, attention_mask, scaling, softcap, s_aux)
        return output[None].contiguous(), None  # As transformers' functions return it, for models that view it (AFMoE).
    output = value.new_empty(packed.shape[0], packed.shape[1], value.shape[-1])
    for index, group in enumerate(plan.groups):
        own = packed[group.tokens]
        output[group.tokens] = _attended(own, key, value, group, index, attention_mask, scaling, softcap, s_aux)
    return output[None], None


def _attended(
    queries: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    group: Group,
    index: int,
    mask: RaggedMask,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention output `[n, H, d_v]` for the queries `[n, H, d]` of one group."""
    keys, values = group.columns_of(key), group.columns_of(value)  # [R, H_kv, S, d]
    is_plain = softcap is None and sinks is None
    is_causal = is_plain and mask.is_causal(group)
    repeats = queries.shape[1] // keys.shape[1]
    if repeats > 1 and (is_causal or group.num_queries > _FEW_QUERIES):
        keys, values = keys.repeat_interleave(repeats, dim=1), values.repeat_interleave(repeats, dim=1)
        repeats = 1
    # Query heads that share keys are treated as more queries, so that keys are not repeated: [R, H_kv, repeats * Q, d].
    padded = group.pad(queries).unflatten(2, (keys.shape[1], repeats)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if is_causal:
        output = scaled_dot_product_attention(padded, keys, values, is_causal=True, scale=scaling)
    elif is_plain:
        added = mask.additive(index, repeats, padded)
        output = scaled_dot_product_attention(padded, keys, values, attn_mask=added, scale=scaling)
    else:
        output = _attention_with_extras(
            padded, keys, values, mask.additive(index, repeats, padded.float()), scaling, softcap, sinks
        )
    output = output.unflatten(2, (repeats, group.num_queries)).permute(0, 3, 1, 2, 4)  # [R, Q, H_kv, repeats, d_v]
    return group.unpad(output).flatten(1, 2)


def _attention_with_extras(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with soft-capped scores or attention sinks, which torch's function does not support; shapes as above."""
    scores = query.float() @ key.float().transpose(2, 3) * (scaling or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    if sinks is not None:  # One more score per query, whose share of the weight goes to no token.
        sink = sinks.float().view(1, key.shape[1], -1, 1)  # [1, H_kv, repeats, 1]
        sink = sink.repeat_interleave(scores.shape[2] // sink.shape[2], dim=2).expand(len(scores), -1, -1, -1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[2]].to(value.dtype)
    return weights @ value


def _check_known(mask: Any, kwargs: dict[str, Any]) -> None:
    if not isinstance(mask, RaggedMask):
        raise NotPackable("it makes its attention mask itself")
    unknown = [n for n, v in kwargs.items() if isinstance(v, torch.Tensor) and n not in _WITHOUT_EFFECT]
    if unknown:
        raise NotPackable(f"its attention takes {', '.join(unknown)}")
