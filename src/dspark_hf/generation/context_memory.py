"""The drafter's context for tokens that are already in the target's cache (a second turn, a cached prefix).

The target's cache holds keys and values, but not the hidden states that the drafter needs. There are three cases: an earlier
call with this cache left the drafter's keys and values; or the hidden states can be recomputed from the prompt; or the prompt
contains only new tokens, and the drafter works without the old ones. The output is exact in all three.
"""

from __future__ import annotations

import weakref

import torch
from transformers import Cache

from ..draft_cache import DraftCache
from ..drafter import Drafter
from .draft_context import DraftContext
from .prompt_pass import cache_holds_prefix, recompute_features
from .target_model import TargetModel

# Keyed by the target's cache object and deleted with it: nothing is stored on either model.
_memories: weakref.WeakKeyDictionary[Cache, tuple[weakref.ref[Drafter], torch.Tensor, DraftCache]] = (
    weakref.WeakKeyDictionary()
)


def remember(cache: Cache, drafter: Drafter, token_ids: torch.Tensor, draft_cache: DraftCache) -> None:
    """Keeps the draft cache over `token_ids` `[1, T]` of a finished one-row call, for the next call with this target cache."""
    _memories[cache] = (weakref.ref(drafter), token_ids.clone(), draft_cache)


def recall(cache: Cache, drafter: Drafter, token_ids: torch.Tensor) -> DraftCache | None:
    """The draft cache over exactly `token_ids` `[1, T]`, if an earlier call with this target cache left one."""
    owner, known_ids, draft_cache = _memories.pop(cache, (None, None, None))
    if owner is None or owner() is not drafter or known_ids is None or draft_cache is None:
        return None
    length = token_ids.shape[1]
    if known_ids.shape[1] < length or not torch.equal(known_ids[:, :length], token_ids):
        return None
    # The target's cache may have been cropped since (to regenerate an answer). A prefix of the draft cache is still right.
    draft_cache.lengths = [n - (known_ids.shape[1] - length) for n in draft_cache.lengths]
    return draft_cache


def prepare_context(target: TargetModel, context: DraftContext, input_ids: torch.Tensor) -> None:
    """Gives the drafter the context of the tokens in the target's cache, as far as it is available."""
    past_length = target.past_length
    if past_length == 0:
        return
    attended = target.attended_columns(0, past_length)
    if input_ids.shape[1] < past_length or not cache_holds_prefix(target, input_ids):
        context.first_positions = [past_length] * len(input_ids) if attended is None else attended.sum(1).tolist()
        return
    prefix = input_ids[:, :past_length]
    recalled = recall(target.cache, context.drafter, prefix) if len(prefix) == 1 else None
    if recalled is not None:
        context.cache = recalled
    else:
        context.add_prompt(recompute_features(target, prefix), attended)
