"""The target's pass over the part of the prompts that its cache does not hold yet, whole or in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..transformers_names import CACHE_KEY, TOKEN_TYPE_KEYS, prompt_mask_length
from .requirements import refuse
from .target_model import TargetModel, TargetOutput
from .target_pass import TargetPass


def feed_prompt(target: TargetPass, input_ids: torch.Tensor) -> Iterator[TargetOutput]:
    """
    Runs the target over the tokens that the cache does not hold yet, in one pass or in chunks of `prefill_chunk_size`.

    Args:
        target: The target with its cache.
        input_ids: The prompt, `[B, P]`; empty when the prompt is given as `inputs_embeds`.
    """
    embeds, past_length = target.model_kwargs.get("inputs_embeds"), target.past_length
    offset, length = prompt_lengths(target, input_ids)
    total = offset + length
    chunk_size = target.generation_config.prefill_chunk_size or length
    for start in range(past_length, total, chunk_size):
        end = min(start + chunk_size, total)
        kwargs = _kwargs_of_first(target, end, total)
        ids = input_ids if embeds is not None else input_ids[:, : end - offset]
        output = target.forward(ids, end - start, 1, kwargs, is_first_iteration=True)
        yield output._replace(attended=target.attended_columns(start, end))
    target.begin_rounds()


def check_prompt(target: TargetPass, input_ids: torch.Tensor) -> None:
    """
    Args: as in [`feed_prompt`].

    Raises:
        ValueError: when the cache already holds the whole prompt, or chunks are asked for with `inputs_embeds`.
    """
    offset, length = prompt_lengths(target, input_ids)
    num_new = offset + length - target.past_length
    if num_new <= 0:
        refuse(f"the cache already holds all {length} tokens of the prompt, so there is no token to continue from")
    chunk_size = target.generation_config.prefill_chunk_size or length
    if chunk_size < num_new and target.model_kwargs.get("inputs_embeds") is not None:
        refuse("prefill_chunk_size does not work with inputs_embeds")


def prompt_lengths(target: TargetPass, input_ids: torch.Tensor) -> tuple[int, int]:
    """
    Tokens in the cache that are not part of the prompt as given, and tokens of the prompt as given.

    Masks and positions start with the first token in the cache, but `input_ids` may contain the new tokens only.
    """
    embeds = target.model_kwargs.get("inputs_embeds")
    length = input_ids.shape[1] if embeds is None else embeds.shape[1]
    return 0 if cache_holds_prefix(target, input_ids) else target.past_length, length


def recompute_features(target: TargetModel, input_ids: torch.Tensor) -> torch.Tensor:
    """
    Features `[B, T, m * D_target]` of a prefix that is already in the cache, by another pass over it.

    Args:
        target: The target.
        input_ids: The prefix, `[B, T]`.
    """
    length, total = input_ids.shape[1], prompt_mask_length(target.model_kwargs, target.generation_config)
    kwargs = _kwargs_of_first(target, length, total or length) | {"use_cache": False, CACHE_KEY: None}
    return target.forward(input_ids, length, 1, kwargs, is_first_iteration=True).context_features


def cache_holds_prefix(target: TargetModel, input_ids: torch.Tensor) -> bool:
    """Whether `input_ids` starts with the tokens in the cache; otherwise it contains new tokens only."""
    if target.past_length == 0 or target.model_kwargs.get("inputs_embeds") is not None:
        return True
    return prompt_mask_length(target.model_kwargs, target.generation_config) == input_ids.shape[1]


def _kwargs_of_first(target: TargetModel, length: int, total: int) -> dict[str, Any]:
    """`model_kwargs` cut to the first `length` of `total` prompt tokens."""
    kwargs = dict(target.model_kwargs)
    for name in ("attention_mask", "position_ids", *TOKEN_TYPE_KEYS):
        value = kwargs.get(name)
        if value is not None and value.shape[-1] == total:
            kwargs[name] = value[..., :length]
    return kwargs
