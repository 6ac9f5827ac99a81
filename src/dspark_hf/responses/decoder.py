"""Continuous batched decoding with a transformers model, for many independent requests at high throughput.

Why it is faster than batched `generate`:

- There is a fixed number of rows. The row of a finished request is given to the next one immediately, so passes stay full.
- Keys and values are written into preallocated buffers ([`RaggedCache`]) and never concatenated. Padding and rows without a
  request do not go through the target's linear layers.
- A token is drawn by inverting the cumulative distribution at one uniform number. The uniform numbers of a request come from
  its seed, so its response does not depend on which other requests share its passes (up to floating-point rounding).

The steps of a request: `run` takes it when a row becomes free; its prompt except for the last token is prefilled; every
decoding pass runs over one token of each row and draws the next; at an end-of-sequence token or the limit, `run` yields a
`Completion`. The caller may then `submit` another request, for instance the next turn of the conversation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from transformers import PreTrainedModel

from ..ragged.cache import RaggedCache
from ..ragged.target import RaggedTarget
from ..transformers_names import compute_device
from .requests import Completion, Request
from .token_sampling import Sampling, draw_uniforms, sample_tokens


@dataclass
class Response:
    """A request that is being decoded, its response so far, and the uniform numbers for all its tokens."""

    request: Request
    uniforms: torch.Tensor | None
    token_ids: list[int] = field(default_factory=list)

    @property
    def current_id(self) -> int:
        """The token to run through the target next."""
        return self.token_ids[-1] if self.token_ids else self.request.input_ids[-1]

    @property
    def uniform(self) -> float:
        """The uniform number of the next token; not used in greedy decoding."""
        return 0.0 if self.uniforms is None else self.uniforms[len(self.token_ids)].item()


class SlotDecoder:
    """Decodes submitted requests in a fixed number of rows.

    Args:
        target: a decoder-only model for which `unsupported_reason` returns `None`, in eval mode.
        sampling: how tokens are drawn.
        eos_token_ids: tokens that end a response.
        slots: rows of a decoding pass.
        refill_fraction: a prefill waits until this share of the rows is free, because several prompts in one pass cost much
            less per token than single ones.
        prefill_tokens: most tokens in one prefill pass, including padding to the longest prompt.
        on_tokens: called after each decoding pass with its number of new tokens.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        sampling: Sampling,
        eos_token_ids: list[int],
        slots: int = 128,
        refill_fraction: float = 0.06,
        prefill_tokens: int = 2048,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.target = target
        self.device = compute_device(target)
        self.sampling = sampling
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_slots = slots
        self.refill_fraction = refill_fraction
        self.prefill_tokens = prefill_tokens
        self.on_tokens = on_tokens
        self.queue: deque[Request] = deque()
        self.reset(slots)

    def submit(self, request: Request) -> None:
        """Adds a request in front of all waiting ones."""
        self.queue.appendleft(request)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """Decodes these and all submitted requests and yields their completions in the order they finish.

        `requests` is read only as rows become free, so it may be a long generator.
        """
        source = iter(requests)
        with self.feeder.attention_in_place():
            while True:
                self.queue.extend(islice(source, max(0, self.max_slots - len(self.queue))))
                if not self.queue and not self.num_active:
                    return
                self.refill()
                yield from self.step()

    # -- state

    def reset(self, slots: int) -> None:
        self.rows: list[Response | None] = [None] * slots
        self.cache = RaggedCache(self.target.config.get_text_config().num_hidden_layers, slots)
        self.feeder = RaggedTarget(self.target, self.cache)

    @property
    def num_active(self) -> int:
        return sum(row is not None for row in self.rows)

    def shrink(self) -> None:
        """If no request waits and half of the rows are free, removes these, because attention costs time for them too."""
        busy = [slot for slot, row in enumerate(self.rows) if row is not None]
        if self.queue or not busy or 2 * len(busy) > len(self.rows):
            return
        self.rows = [self.rows[slot] for slot in busy]
        self.cache.select(busy)

    # -- prefill

    def refill(self) -> None:
        """Gives free rows to waiting requests and prefills their prompts."""
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
        uniforms = draw_uniforms(request.seed, request.max_new_tokens) if self.sampling.do_sample else None
        self.rows[slot] = Response(request, uniforms)
        self.cache.reserve(len(request.input_ids) + request.max_new_tokens)

    def prefill(self, group: list[tuple[int, list[int]]]) -> None:
        """Computes the keys and values for these pairs of row and token ids."""
        prompts = dict(group)
        if any(prompts.values()):
            self.feed([prompts.get(slot, []) for slot in range(len(self.rows))], wants_logits=False)

    # -- decoding

    def step(self) -> Iterator[Completion]:
        """One decoding pass over all rows that have a request; yields the requests it completed."""
        active = [(slot, row) for slot, row in enumerate(self.rows) if row is not None]
        logits = self.feed([[] if row is None else [row.current_id] for row in self.rows])  # [n, V]
        assert logits is not None
        uniforms = torch.tensor([row.uniform for _, row in active])
        token_ids = sample_tokens(logits, uniforms.to(self.device), self.sampling).tolist()
        self.on_tokens(len(active))
        for (slot, row), token_id in zip(active, token_ids, strict=True):
            finished = token_id in self.eos_token_ids
            if not finished:
                row.token_ids.append(token_id)
            if finished or len(row.token_ids) == row.request.max_new_tokens:
                self.rows[slot] = None
                self.cache.clear(slot)
                yield Completion(row.request.key, row.token_ids, token_id if finished else None)

    @torch.inference_mode()
    def feed(self, token_ids: list[list[int]], wants_logits: bool = True) -> torch.Tensor | None:
        """Runs the target over these tokens of each row and keeps them; returns their logits `[N, V]`, ordered by row."""
        counts = [len(ids) for ids in token_ids]
        flat = torch.tensor([token_id for ids in token_ids for token_id in ids], device=self.device)
        logits = self.feeder.feed(flat, counts, wants_logits).logits
        self.cache.lengths = [length + count for length, count in zip(self.cache.lengths, counts, strict=True)]
        return logits[0] if wants_logits else None


def group_by_tokens(admitted: list[tuple[int, list[int]]], max_tokens: int) -> Iterator[list[tuple[int, list[int]]]]:
    """Splits into groups of similar length whose padded size is at most `max_tokens` (or a single member)."""
    group: list[tuple[int, list[int]]] = []
    for member in sorted(admitted, key=lambda item: len(item[1])):
        if group and (len(group) + 1) * len(member[1]) > max_tokens:
            yield group
            group = []
        group.append(member)
    if group:
        yield group
