"""Responses by batched `generate`, for targets that the fast decoder does not support."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList

from ..transformers_names import GenerativeModel, compute_device
from .requests import Completion, Request
from .token_sampling import Sampling


class PlainDecoder:
    """Batched `generate` with the interface of `SlotDecoder`, for targets that it does not support.

    Each batch draws from torch's global random generator, seeded with the seed of its first request.

    Args:
        target, sampling, eos_token_ids, slots: As for `SlotDecoder`.
        on_tokens: Called after each pass with its number of new tokens.
    """

    def __init__(
        self,
        target: GenerativeModel,
        sampling: Sampling,
        eos_token_ids: list[int],
        slots: int,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> None:
        self.target = target
        self.sampling = sampling
        self.eos_token_ids = eos_token_ids
        self.slots = slots
        self.on_tokens = on_tokens
        self.queue: list[Request] = []

    def submit(self, request: Request) -> None:
        self.queue.append(request)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        source = iter(requests)
        while True:
            batch, self.queue = self.queue[: self.slots], self.queue[self.slots :]
            batch += islice(source, self.slots - len(batch))
            if not batch:
                return
            yield from self.complete(batch)

    @torch.inference_mode()
    def complete(self, batch: list[Request]) -> Iterator[Completion]:
        length = max(len(request.input_ids) for request in batch)
        pad_id = self.eos_token_ids[0] if self.eos_token_ids else 0
        padding = [length - len(request.input_ids) for request in batch]
        input_ids = torch.tensor([[pad_id] * pad + request.input_ids for pad, request in zip(padding, batch)])  # [B, T]
        mask = (torch.arange(length)[None] >= torch.tensor(padding)[:, None]).long()  # [B, T]
        torch.manual_seed(batch[0].seed)
        sampling = asdict(self.sampling) if self.sampling.do_sample else {"do_sample": False}
        output = self.target.generate(
            input_ids=input_ids.to(compute_device(self.target)),
            attention_mask=mask.to(compute_device(self.target)),
            max_new_tokens=max(request.max_new_tokens for request in batch),
            eos_token_id=self.eos_token_ids or None,
            pad_token_id=pad_id,
            stopping_criteria=StoppingCriteriaList([_TokenCounter(length, self.eos_token_ids, self.on_tokens)]),
            **sampling,
        )
        for request, tokens in zip(batch, output[:, length:].tolist()):
            tokens = tokens[: request.max_new_tokens]
            end = next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)
            yield Completion(request.key, tokens[:end], None if end is None else tokens[end])


class _TokenCounter(StoppingCriteria):
    """Reports the number of new tokens of every pass, without rows that have ended. It never stops generation."""

    def __init__(self, prompt_length: int, eos_token_ids: list[int], on_tokens: Callable[[int], None]) -> None:
        self.prompt_length = prompt_length
        self.eos_token_ids = torch.tensor(eos_token_ids, dtype=torch.long)
        self.on_tokens = on_tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        before = input_ids[:, self.prompt_length : -1]
        ended = torch.isin(before, self.eos_token_ids.to(before.device)).any(dim=1)  # [B]
        self.on_tokens(int((~ended).sum()))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
