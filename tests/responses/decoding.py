"""What the tests of decoding share: prompts of different lengths, plain `generate` as the reference, a chi-squared test."""

from __future__ import annotations

from typing import Any

import torch
from scipy.stats import chisquare
from transformers import PreTrainedModel

import tiny
from dspark_hf.responses.requests import Completion, Request


def ragged_prompts(count: int = 11) -> list[list[int]]:
    """Prompts of 1 to 40 tokens, out of order."""
    lengths = [1 + (7 * i * i + 3 * i) % 40 for i in range(count)]
    return [tiny.prompt(length, seed=i)["input_ids"][0].tolist() for i, length in enumerate(lengths)]


def greedy_by_generate(target: PreTrainedModel, prompt: list[int], limit: int, end_ids: list[int]) -> list[int]:
    """The new tokens of plain `generate` for one row, the end token included."""
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": limit, "pad_token_id": tiny.PAD_ID}
    output = target.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=end_ids or None, **settings)
    return output[0, len(prompt) :].tolist()


def completed(decoder: Any, requests: list[Request]) -> dict[int, Completion]:
    completions = list(decoder.run(requests))
    assert len({c.key for c in completions}) == len(completions) == len(requests)
    return {c.key: c for c in completions}


def p_value_of(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value of a chi-squared test; tokens expected fewer than five times are merged. An impossible token gives 0."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs.double() / probs.double().sum() * counts.sum()
    common = expected >= 5
    pairs = [(counts[common], expected[common]), (counts[~common].sum()[None], expected[~common].sum()[None])]
    observed, hoped = (torch.cat(part).double() for part in zip(*pairs, strict=True))
    kept = hoped > 1e-9
    return float(chisquare(observed[kept], hoped[kept] * (observed[kept].sum() / hoped[kept].sum())).pvalue)
