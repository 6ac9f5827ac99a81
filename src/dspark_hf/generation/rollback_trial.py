"""Whether a target decodes exactly after a rollback: tried once for each target that leaves a doubt.

Not every model computes several tokens on top of others as it computes them one at a time: the Mamba layers of some families
start over with an empty state, and some older models expect one token behind a prompt. A drafter cannot help there, because
verifying drafts is such a pass. Instead of a list of names that would have to follow every release of transformers, each target
with states, and each that does not use transformers' common attention code, is fed a few tokens in both ways.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from ..ragged.exchange import makes_window_masks
from ..transformers_names import CACHE_KEY, has_exchangeable_attention, hides_columns, is_stateful, takes_cache
from ..trials import is_near, trial_ids, trial_positions
from .requirements import refuse
from .rollback import Rollback, has_states, is_own_layer, is_own_window

_PROMPT, _ROUND = 5, 4  # Tokens of the trial.

# Whether its masks have windows.
_masks_windows: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()
# By the length of a static cache; 0 for dynamic ones.
_is_exact: weakref.WeakKeyDictionary[PreTrainedModel, dict[int, bool]] = weakref.WeakKeyDictionary()


def check_target(
    model: PreTrainedModel, cache: Cache, attention_mask: torch.Tensor | None, max_length: int | None = None
) -> None:
    """
    Refuses targets whose output after a rollback would not be theirs.

    Args:
        model: The target.
        cache: Its cache, which may be empty.
        attention_mask: False at padding, `[B, T]`; `None` without a mask.
        max_length: The longest that the text may become, in tokens.

    Raises:
        ValueError: for windows that the masks do not have, for states outside the cache, where the trial fails, and for padding
            that layers of the model's own count.
    """
    name = type(model).__name__
    _check_windows(model, cache, max_length)
    has_state = any(has_states(layer) for layer in cache.layers)
    if is_stateful(model) and not has_state:
        refuse(f"{name} keeps recurrent state outside its cache, which cannot be rolled back")
    own = next((type(layer).__name__ for layer in cache.layers if is_own_layer(layer) or is_own_window(layer)), None)
    if own is not None and hides_columns(attention_mask):
        # DeepSeek-V4 closes its compressed entries by column, padding included, and shows them by position. In a pass over one
        # token it shows them all. Unlimited-OCR looks the padding up in columns that have moved since.
        refuse(f"with left padding, {own} shows other entries to several tokens in one pass than to one at a time")
    if not has_state and (has_exchangeable_attention(model) or not takes_cache(model)):
        return
    exact_by_length = _is_exact.setdefault(model, {})
    if 0 not in exact_by_length:
        exact_by_length[0] = is_exact(model)
    if not exact_by_length[0]:
        refuse(
            f"in transformers {transformers.__version__}, {name} gives other logits for several tokens in one pass on top of "
            f"{'its recurrent state' if has_state else 'others'} than for one at a time, so drafts cannot be verified"
        )
    length = next((layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticLayer)), 0)
    if length and not has_state:
        if length not in exact_by_length:
            exact_by_length[length] = is_right_when_static(model, length)
        if not exact_by_length[length]:
            refuse(
                f"in transformers {transformers.__version__}, {name} gives other logits with a static cache than with a dynamic "
                "one"
            )


def _check_windows(model: PreTrainedModel, cache: Cache, max_length: int | None) -> None:
    """A pass over several tokens sees what the window of the cache is about to drop, unless a mask hides it."""
    if not has_exchangeable_attention(model):
        return
    windows = [layer.sliding_window for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]
    windows += [layer.max_cache_len for layer in cache.layers if isinstance(layer, StaticSlidingWindowLayer)]
    if not windows or (max_length is not None and max_length <= min(windows)):
        return
    if model not in _masks_windows:
        _masks_windows[model] = makes_window_masks(model)
    if not _masks_windows[model]:
        refuse(
            f"the cache of {type(model).__name__} keeps the last {min(windows)} tokens, but its masks hide no others, so that a "
            "pass over several tokens gives other logits than passes over one"
        )


@torch.no_grad()
def is_exact(model: PreTrainedModel) -> bool:
    """Whether tokens that are fed together, and again after a rejection, get the logits that each gets alone."""
    ids = trial_ids(model, _PROMPT + _ROUND)[None]
    try:
        alone = PromptedTarget(model, ids[:, :_PROMPT])
        on_modules = _tensors_on_modules(model)
        expected = torch.cat([alone.feed(token) for token in ids[:, _PROMPT:].split(1, dim=1)], dim=1)
        held = _tensors_on_modules(model)
        if len(held) != len(on_modules) or not all(map(torch.equal, held, on_modules)):
            return False  # State that no cache knows of cannot be taken back.
        drafted = PromptedTarget(model, ids[:, :_PROMPT])
        rollback = Rollback(drafted.cache)
        rollback.begin(drafted.cache)
        rollback.save()
        first = drafted.feed(ids[:, [_PROMPT, _PROMPT + 1, 0]])  # The last of them is wrong.
        drafted.length -= 1 + rollback.take_back(3, 1)
        again = drafted.feed(ids[:, drafted.length :])
    except Exception:  # Whatever the model objects to, it cannot be fed in this form.
        return False
    # Where the cache was cropped, the first two are not fed again.
    expected = torch.cat([expected[:, :2], expected[:, -again.shape[1] :]], dim=1)
    return is_near(torch.cat([first[:, :2], again], dim=1), expected, model)


@torch.no_grad()
def is_right_when_static(model: PreTrainedModel, length: int) -> bool:
    """Whether tokens get the same logits with a static cache of this length as with a dynamic one."""
    ids = trial_ids(model, min(_PROMPT + _ROUND, length))[None]
    try:
        static = PromptedTarget(model, ids[:, :-1], StaticCache(config=model.config, max_cache_len=length))
        logits = static.feed(ids[:, -1:])
    except Exception:  # Whatever the model objects to, it cannot be fed in this form.
        return False
    return is_near(logits, PromptedTarget(model, ids[:, :-1]).feed(ids[:, -1:]), model)


def _tensors_on_modules(model: PreTrainedModel) -> list[torch.Tensor]:
    """Copies of the tensors that modules hold besides weights and buffers."""
    held = [value for module in model.modules() for value in vars(module).values()]
    return [value.detach().clone() for value in held if isinstance(value, torch.Tensor)]


class PromptedTarget:
    """
    A target that is fed without `generate`.

    Args:
        model: The target.
        prompt: Its first tokens, `[1, P]`.
        cache: An empty cache; a dynamic one if it is `None`.

    Attributes:
        cache (`Cache`): Its cache, with the prompt.
        length (`int`): Tokens in the cache. Whoever takes tokens back lowers it.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor, cache: Cache | None = None):
        self._model = model
        self.cache: Any = DynamicCache(config=model.config) if cache is None else cache
        self.length = 0
        self.feed(prompt)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """The float32 logits `[1, T, V]` of the next tokens `[1, T]`."""
        end = self.length + ids.shape[1]
        kwargs = {CACHE_KEY: self.cache, "use_cache": True, **trial_positions(self._model, self.length, end)}
        self.length = end
        return self._model(input_ids=ids, return_dict=True, **kwargs).logits.float()
