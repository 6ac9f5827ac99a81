"""Continuous batched decoding with a plain transformers model: many independent requests, as many tokens a second as fit.

What makes it faster than batched `generate`:

- a fixed number of slots; a finished request's slot is refilled at once, so no pass runs half empty;
- keys and values live in one preallocated buffer a layer, written in place at each row's own position (rows are ragged
  and aligned left), never concatenated;
- grouped-query attention folds the query groups into the query axis, so keys and values are never repeated;
- a token is drawn by inverting the cumulative distribution with ONE uniform number a token. A request's uniform
  numbers come from its own seed, so its response does not depend on which other requests shared its passes
  (up to floating-point rounding).

The life of a request: `run` takes it from its source when slots come free; its prompt but the last token is prefilled;
every decoding pass feeds one token a row and draws the next; at an end-of-sequence token or its limit it leaves as a
`Completion`, and whoever iterates over `run` may `submit` a further request (the next turn of a conversation) in answer.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from ..rope_limit import rope_limit
from ..transformers_names import CACHE_KEY, attention_name, is_stateful, supports_sdpa

ATTENTION_NAME = "dspark_hf_slots"
LENGTH_STEP = 64  # buffers grow by multiples of this many positions


@dataclass(frozen=True)
class Sampling:
    """The law a token is drawn from, in the order `generate` applies it: temperature, top-k, top-p.

    Args:
        do_sample: False takes the most likely token and ignores the rest.
        temperature: divides the logits.
        top_k: keep this many tokens; 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability; 1.0 keeps all.
    """

    do_sample: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if self.do_sample and not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}, but sampling needs a positive one; for greedy set do_sample=False."
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; give a number of tokens, or 0 to keep all.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; give a probability in (0, 1], where 1.0 keeps all.")


@dataclass
class Request:
    """One prompt to continue.

    Args:
        key: the caller's name for it, handed back with the completion.
        input_ids: the prompt's token ids, at least one.
        max_new_tokens: the limit of the response.
        seed: seeds this request's uniform numbers.
    """

    key: int
    input_ids: list[int]
    max_new_tokens: int
    seed: int = 0


@dataclass
class Completion:
    """A request's response.

    Args:
        key: the request's.
        token_ids: the new tokens, without the end-of-sequence token.
        end_id: the end-of-sequence token that ended it; None where the limit cut it.
    """

    key: int
    token_ids: list[int]
    end_id: int | None

    @property
    def finished(self) -> bool:
        return self.end_id is not None

    @property
    def num_tokens(self) -> int:
        """Tokens the target produced, the end-of-sequence token counted."""
        return len(self.token_ids) + self.finished


# ---------------------------------------------------------------------------------------------------------- sampling


def sample_tokens(logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """One token a row.

    Args:
        logits: `[B, V]`, any float dtype.
        uniforms: `[B]` float32 in [0, 1), one number a row; not read for greedy.

    Returns:
        token ids `[B]`.
    """
    if not sampling.do_sample:
        return logits.argmax(-1)  # [B]
    candidates = None
    if 0 < sampling.top_k < logits.shape[-1]:
        logits, candidates = logits.topk(sampling.top_k, dim=-1)  # [B, K] each, most likely first
    logits = logits.to(torch.float32, copy=True).div_(sampling.temperature)  # a copy, so it may be written in place
    if sampling.top_p < 1:
        logits, order = keep_top_p(logits, sampling.top_p)  # [B, K] each
        candidates = order if candidates is None else candidates.gather(-1, order)
    weights = logits.sub_(logits.amax(-1, keepdim=True)).exp_()  # [B, K]
    index = invert_cumulative(weights, uniforms)  # [B]
    return index if candidates is None else candidates.gather(-1, index[:, None])[:, 0]


def keep_top_p(logits: torch.Tensor, top_p: float, first_try: int = 512) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask all but the most likely tokens that together reach `top_p`.

    Sorting a whole vocabulary is slow and rarely needed: the `first_try` most likely tokens are sorted, and all of them
    only where some row needs more.

    Args:
        logits: `[B, V]`.

    Returns:
        logits `[B, K]`, most likely first and -inf where dropped, and the ids `[B, K]` of these tokens.
    """
    total = logits.logsumexp(-1, keepdim=True)  # [B, 1]
    size = min(first_try, logits.shape[-1])
    while True:
        kept, order = logits.topk(size, dim=-1)  # [B, K] each
        probs = torch.exp(kept - total)  # [B, K]
        before = probs.cumsum(-1) - probs  # [B, K] mass of all more likely tokens
        if size == logits.shape[-1] or bool((before[:, -1] + probs[:, -1] >= top_p).all()):
            break
        size = logits.shape[-1]
    dropped = before >= top_p
    dropped[:, 0] = False
    return kept.masked_fill(dropped, float("-inf")), order


def invert_cumulative(weights: torch.Tensor, uniforms: torch.Tensor, block: int = 256) -> torch.Tensor:
    """Draw an index a row with probability proportional to `weights`, in two levels: a block first, then inside it.

    The cumulative sum then runs over `V / block` numbers instead of `V`, which is faster and loses less precision.

    Args:
        weights: `[B, V]` float32, not negative, positive sum.
        uniforms: `[B]` in [0, 1).

    Returns:
        indices `[B]`; never one of weight zero.
    """
    rows, size = weights.shape
    padding = -size % block
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(rows, -1, block)  # [B, N, block]
    block_mass = blocks.sum(-1)  # [B, N]
    chosen, rest = pick(block_mass, uniforms[:, None] * block_mass.sum(-1, keepdim=True))  # [B, 1] each
    inside = blocks.gather(1, chosen[:, :, None].expand(-1, -1, block))[:, 0]  # [B, block]
    index, _ = pick(inside, rest)  # [B, 1]
    return (chosen * block + index)[:, 0]


def pick(weights: torch.Tensor, threshold: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulative weight exceeds `threshold`, and what is left of the threshold there.

    Rounding can push the threshold to the total or beyond it; the last index of positive weight is taken then.

    Args:
        weights: `[B, N]`; threshold: `[B, 1]`.

    Returns:
        index `[B, 1]`, rest `[B, 1]`.
    """
    cumulative = weights.cumsum(-1)  # [B, N]
    index = torch.searchsorted(cumulative, threshold, right=True)  # [B, 1]
    positions = torch.arange(weights.shape[-1], device=weights.device)
    last = torch.where(weights > 0, positions, -1).amax(-1, keepdim=True)  # [B, 1]
    index = torch.minimum(index, last)
    rest = threshold - (cumulative.gather(-1, index) - weights.gather(-1, index))
    return index, rest.clamp_min(0)


def draw_uniforms(seed: int, count: int) -> torch.Tensor:
    """A request's `count` uniform numbers in [0, 1), from its own seed."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------------------------------------ attention and cache


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """Attention for the two passes below, without repeated keys and values for one-token decoding.

    Args:
        query: `[B, H, Q, d]`; key, value: `[B, H_kv, L, d]`.
        attention_mask: additive `[B, 1, 1, L]` for decoding (Q = 1), None for prefill (causal, L = Q).

    Returns:
        `[B, Q, H, d]`, and None for the attention weights.
    """
    rows, heads, length, size = query.shape
    kv_heads = key.shape[1]
    if length == 1 and attention_mask is not None:
        folded = query.reshape(rows, kv_heads, heads // kv_heads, size)  # groups on the query axis
        output = scaled_dot_product_attention(folded, key, value, attn_mask=attention_mask, scale=scaling)
        return output.reshape(rows, 1, heads, value.shape[-1]), None
    if kv_heads != heads:
        key = key.repeat_interleave(heads // kv_heads, dim=1)
        value = value.repeat_interleave(heads // kv_heads, dim=1)
    output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, slot_attention)


@dataclass
class SlotPlan:
    """What the cache layers have to know about the current pass; shared by all of them.

    Args:
        rows: slots `[n]` that the pass's rows belong to.
        lengths: positions `[n]` where a decoding pass writes; None says that the pass is a prefill from position 0.
        span: positions that a decoding pass reads, the longest row's length and one.
    """

    rows: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    span: int = 0


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values, `[slots, H_kv, capacity, d]`, written in place."""

    def __init__(self, plan: SlotPlan, slots: int) -> None:
        super().__init__()
        self.plan = plan
        self.slots = slots
        self.capacity = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.keys = key_states.new_zeros(self.slots, key_states.shape[1], self.capacity, key_states.shape[3])
        self.values = value_states.new_zeros(self.slots, value_states.shape[1], self.capacity, value_states.shape[3])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        plan = self.plan
        if plan.lengths is None:
            # Prefill: nothing precedes the prompt, so attention needs these keys and values alone.
            self.keys[plan.rows, :, : key_states.shape[2]] = key_states
            self.values[plan.rows, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        self.keys[plan.rows, :, plan.lengths] = key_states[:, :, 0]
        self.values[plan.rows, :, plan.lengths] = value_states[:, :, 0]
        return self.keys[:, :, : plan.span], self.values[:, :, : plan.span]

    def grow(self, capacity: int) -> None:
        """Make room for `capacity` positions a row."""
        if self.is_initialized:
            extra = (0, 0, 0, capacity - self.capacity)
            self.keys = torch.nn.functional.pad(self.keys, extra)
            self.values = torch.nn.functional.pad(self.values, extra)
        self.capacity = capacity

    def select(self, rows: torch.Tensor) -> None:
        """Keep only these slots `[n]`, in this order."""
        self.slots = len(rows)
        if self.is_initialized:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def get_seq_length(self) -> int:
        return 0 if self.plan.lengths is None else self.plan.span - 1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


# ------------------------------------------------------------------------------------------------------------ decoder


@dataclass
class Row:
    """What a slot holds: its request and the response so far."""

    request: Request
    token_ids: list[int] = field(default_factory=list)


class SlotDecoder:
    """Decodes submitted requests in a fixed number of slots.

    Args:
        target: a decoder-only model that `unsupported_reason` has no objection to, in eval mode.
        sampling: how tokens are drawn.
        eos_token_ids: tokens that end a response.
        slots: rows a decoding pass.
        refill_fraction: a prefill waits until this share of the slots is free, since packed prompts are much cheaper a
            token than single ones.
        prefill_tokens: most tokens, padding counted, in one prefill pass.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        sampling: Sampling,
        eos_token_ids: list[int],
        slots: int = 128,
        refill_fraction: float = 0.06,
        prefill_tokens: int = 2048,
    ) -> None:
        self.target = target
        self.device = target.device
        self.sampling = sampling
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_slots = slots
        self.refill_fraction = refill_fraction
        self.prefill_tokens = prefill_tokens
        self.queue: deque[Request] = deque()
        self.reset(slots)

    def submit(self, request: Request) -> None:
        """Put a request before all that wait."""
        self.queue.appendleft(request)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decode these and all submitted requests, yielding completions as they come.

        `requests` is read as slots come free, so it may be long and lazy.
        """
        source = iter(requests)
        with slot_attention_of(self.target):
            while True:
                self.queue.extend(islice(source, max(0, self.max_slots - len(self.queue))))
                if not self.queue and not self.num_active:
                    return
                self.refill()
                yield from self.step()

    # -- state

    def reset(self, slots: int) -> None:
        self.plan = SlotPlan()
        self.rows: list[Row | None] = [None] * slots
        self.lengths = torch.zeros(slots, dtype=torch.long)  # [S] positions in the cache
        self.current_ids = torch.zeros(slots, dtype=torch.long)  # [S] next token to feed
        self.uniforms: list[torch.Tensor | None] = [None] * slots
        self.layers = [
            SlotLayer(self.plan, slots) for _ in range(self.target.config.get_text_config().num_hidden_layers)
        ]
        self.cache = Cache(layers=self.layers)

    @property
    def num_active(self) -> int:
        return sum(row is not None for row in self.rows)

    def shrink(self) -> None:
        """With an empty queue, drop the free slots once they are half of all: a pass costs by the slot."""
        busy = [slot for slot, row in enumerate(self.rows) if row is not None]
        if self.queue or not busy or 2 * len(busy) > len(self.rows):
            return
        index = torch.tensor(busy)
        self.rows = [self.rows[slot] for slot in busy]
        self.uniforms = [self.uniforms[slot] for slot in busy]
        self.lengths, self.current_ids = self.lengths[index], self.current_ids[index]
        for layer in self.layers:
            layer.select(index.to(self.device))

    # -- prefill

    def refill(self) -> None:
        """Give free slots to waiting requests and prefill their prompts."""
        if not self.queue:
            self.shrink()
            return
        if len(self.rows) < self.max_slots and not self.num_active:
            self.reset(self.max_slots)
        free = [slot for slot, row in enumerate(self.rows) if row is None]
        wanted = max(1, int(self.refill_fraction * len(self.rows)))
        if self.num_active and len(free) < min(wanted, len(self.queue)):
            return
        admitted = []
        while free and self.queue:
            slot, request = free.pop(), self.queue.popleft()
            self.occupy(slot, request)
            admitted.append((slot, request.input_ids[:-1]))
        for group in group_by_tokens(admitted, self.prefill_tokens):
            self.prefill(group)

    def occupy(self, slot: int, request: Request) -> None:
        if not request.input_ids or request.max_new_tokens < 1:
            raise ValueError(
                f"Request {request.key!r} has {len(request.input_ids)} prompt tokens and "
                f"max_new_tokens={request.max_new_tokens}; both must be at least 1."
            )
        self.rows[slot] = Row(request)
        self.lengths[slot] = len(request.input_ids) - 1
        self.current_ids[slot] = request.input_ids[-1]
        if self.sampling.do_sample:
            self.uniforms[slot] = draw_uniforms(request.seed, request.max_new_tokens)
        self.reserve(len(request.input_ids) + request.max_new_tokens)

    def reserve(self, length: int) -> None:
        if length <= self.layers[0].capacity:
            return
        for layer in self.layers:
            layer.grow(-(-length // LENGTH_STEP) * LENGTH_STEP)

    def prefill(self, group: list[tuple[int, list[int]]]) -> None:
        """Write the keys and values of these (slot, token ids).

        Prompts are padded on the right: under a causal mask padding cannot reach the tokens before it, and what it leaves
        in the cache lies beyond the row's length, where no later pass reads before it is overwritten.
        """
        length = max(len(ids) for _, ids in group)
        if not length:
            return
        padded = torch.tensor([ids + [0] * (length - len(ids)) for _, ids in group])  # [n, T]
        self.plan.rows = torch.tensor([slot for slot, _ in group], device=self.device)
        self.plan.lengths = None
        positions = torch.arange(length)[None].expand_as(padded)  # [n, T]
        self.forward(padded, positions, None)

    # -- decoding

    def step(self) -> Iterator[Completion]:
        """One decoding pass over all slots, then the completions it made."""
        self.plan.rows = torch.arange(len(self.rows), device=self.device)
        self.plan.lengths = self.lengths.to(self.device)
        self.plan.span = int(self.lengths.max()) + 1
        logits = self.forward(self.current_ids[:, None], self.lengths[:, None], self.decoding_mask())[:, -1]  # [S, V]
        token_ids = sample_tokens(logits, self.current_uniforms().to(self.device), self.sampling).tolist()
        for slot, (row, token_id) in enumerate(zip(self.rows, token_ids)):
            if row is None:
                continue
            finished = token_id in self.eos_token_ids
            if not finished:
                row.token_ids.append(token_id)
                self.current_ids[slot] = token_id
                self.lengths[slot] += 1
            if finished or len(row.token_ids) == row.request.max_new_tokens:
                self.release(slot)
                yield Completion(row.request.key, row.token_ids, token_id if finished else None)

    def release(self, slot: int) -> None:
        self.rows[slot] = None
        self.uniforms[slot] = None
        self.lengths[slot] = 0

    def decoding_mask(self) -> torch.Tensor:
        """Additive mask `[S, 1, 1, span]`: a row sees its own positions and the one it writes now."""
        hidden = torch.arange(self.plan.span)[None] > self.lengths[:, None]  # [S, span]
        mask = torch.zeros(hidden.shape, dtype=self.target.dtype).masked_fill_(hidden, float("-inf"))
        return mask[:, None, None].to(self.device)

    def current_uniforms(self) -> torch.Tensor:
        """The uniform number `[S]` of each row's next token; zero for free slots and for greedy."""
        numbers = [
            0.0 if row is None or uniforms is None else uniforms[len(row.token_ids)].item()
            for row, uniforms in zip(self.rows, self.uniforms)
        ]
        return torch.tensor(numbers)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Logits `[n, 1, V]` of the last position."""
        outputs = self.target(
            input_ids=input_ids.to(self.device),
            position_ids=position_ids.to(self.device),
            attention_mask=mask,
            use_cache=True,
            logits_to_keep=1,
            **{CACHE_KEY: self.cache},
        )
        return outputs.logits


def group_by_tokens(admitted: list[tuple[int, list[int]]], max_tokens: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Split into groups of like length whose padded size stays within `max_tokens` (or of one member)."""
    group: list[tuple[int, list[int]]] = []
    for member in sorted(admitted, key=lambda item: len(item[1])):
        if group and (len(group) + 1) * len(member[1]) > max_tokens:
            yield group
            group = []
        group.append(member)
    if group:
        yield group


@contextmanager
def slot_attention_of(target: PreTrainedModel) -> Iterator[None]:
    """Within the context, `target` attends through `slot_attention`."""
    previous = attention_name(target.config)
    target.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        target.set_attn_implementation(previous)


def attention_window(target: PreTrainedModel) -> int | None:
    """The sliding window of any of the target's layers, in tokens; None where all layers attend to everything."""
    config = target.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["sliding_attention"])
    if layer_types == {"full_attention"} or not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None)


def length_limits(target: PreTrainedModel) -> dict[str, int]:
    """What a target's rows must not outgrow, in tokens, by its name; empty for most targets."""
    rope = rope_limit(target)
    limits = {"attention window": attention_window(target), "original RoPE length": rope.length if rope else None}
    return {name: limit for name, limit in limits.items() if limit is not None}


def unsupported_reason(target: PreTrainedModel, max_length: int = 0) -> str | None:
    """Why `SlotDecoder` cannot serve `target` for rows of up to `max_length` tokens; None where it can.

    What it needs: attention that can be exchanged, plain softmax over keys and values of every layer's own, positions
    that come from rotary or learned embeddings, and rows within `length_limits`.
    """
    config = target.config.get_text_config()
    if target.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if not supports_sdpa(target):
        return "its attention cannot be exchanged"
    if is_stateful(target):
        return "its cache holds a recurrent state"
    layer_types = set(getattr(config, "layer_types", None) or ())
    if layer_types - {"full_attention", "sliding_attention"}:
        return f"its layers are of the types {', '.join(sorted(layer_types))}"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share keys and values"
    if getattr(config, "attn_logit_softcapping", None):
        return "its attention logits are capped"
    if getattr(config, "alibi", False):
        return "its positions are biases of the attention logits (ALiBi)"
    for name, limit in length_limits(target).items():
        if limit < max_length:
            return f"its {name} of {limit} tokens is shorter than the longest row, {max_length} tokens"
    missing = {"position_ids", "logits_to_keep", "use_cache", CACHE_KEY} - set(
        inspect.signature(target.forward).parameters
    )
    if missing:
        return f"its forward takes no {', '.join(sorted(missing))}"
    return None
