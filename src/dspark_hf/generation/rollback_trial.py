"""Whether a target with recurrent state decodes exactly after a rollback: tried once for each target.

Not every model computes several tokens on top of a state as it computes them one at a time: the Mamba layers of some families
start over with an empty state. A drafter cannot help there, because verifying drafts is such a pass. Instead of a list of names
that would have to follow every release of transformers, each target with states is fed a few tokens in both ways.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import torch
import transformers
from transformers import Cache, DynamicCache, PreTrainedModel

from ..transformers_names import CACHE_KEY, compute_device, hides_columns, is_stateful
from .requirements import refuse
from .rollback import Rollback, has_states, is_own_layer

_PROMPT, _ROUND = 5, 4  # Tokens of the trial.

# How far logits may be apart on average, in standard deviations. In float32, right targets stay below .0001 and wrong ones are
# above .1; in bfloat16, right ones stay below .025.
_TOLERANCE = {torch.float32: 0.01, torch.float64: 0.01}
_TOLERANCE_OF_HALF = 0.05

_is_exact: weakref.WeakKeyDictionary[PreTrainedModel, bool] = weakref.WeakKeyDictionary()


def check_target(model: PreTrainedModel, cache: Cache, attention_mask: torch.Tensor | None) -> None:
    """
    Refuses targets whose output after a rollback would not be theirs.

    Args:
        model: The target.
        cache: Its cache, which may be empty.
        attention_mask: False at padding, `[B, T]`; `None` without a mask.

    Raises:
        ValueError: for states outside the cache, where the trial fails, and for padding that layers of the model's own count.
    """
    name = type(model).__name__
    if not any(has_states(layer) for layer in cache.layers):
        if is_stateful(model):
            refuse(f"{name} keeps recurrent state outside its cache, which cannot be rolled back")
        return
    own = next((type(layer).__name__ for layer in cache.layers if is_own_layer(layer)), None)
    if own is not None and hides_columns(attention_mask):
        # DeepSeek-V4 closes its compressed entries by column, padding included, and shows them by position. In a pass over one
        # token it shows them all.
        refuse(f"with left padding, {own} shows other entries to several tokens in one pass than to one at a time")
    if model not in _is_exact:
        _is_exact[model] = is_exact(model)
    if not _is_exact[model]:
        refuse(
            f"in transformers {transformers.__version__}, {name} gives other logits for several tokens in one pass on top of its "
            "recurrent state than for one at a time, so drafts cannot be verified"
        )


@torch.no_grad()
def is_exact(model: PreTrainedModel) -> bool:
    """Whether tokens that are fed together, and again after a rejection, get the logits that each gets alone."""
    ids = torch.arange(1, _PROMPT + _ROUND + 1, device=compute_device(model))[None]
    ids = ids % model.config.get_text_config(decoder=True).vocab_size
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
    return is_near(torch.cat([first[:, :2], again], dim=1), expected, model.dtype)


def is_near(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether logits differ from those expected, of a target with this dtype, by no more than rounding."""
    return bool((logits - expected).abs().mean() < _TOLERANCE.get(dtype, _TOLERANCE_OF_HALF) * expected.std())


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

    Attributes:
        cache (`Cache`): Its cache, with the prompt.
        length (`int`): Tokens in the cache. Whoever takes tokens back lowers it.
    """

    def __init__(self, model: PreTrainedModel, prompt: torch.Tensor):
        self._model = model
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self.cache: Any = DynamicCache(config=model.config)
        self.length = 0
        self.feed(prompt)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """The float32 logits `[1, T, V]` of the next tokens `[1, T]`."""
        kwargs: dict[str, Any] = {CACHE_KEY: self.cache, "use_cache": True}
        if self._takes_positions:  # Else models with positions of several axes would remember those of the trial.
            kwargs["position_ids"] = torch.arange(self.length, self.length + ids.shape[1], device=ids.device)[None]
        self.length += ids.shape[1]
        return self._model(input_ids=ids, return_dict=True, **kwargs).logits.float()
