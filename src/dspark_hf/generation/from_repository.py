"""Decoding for those who imported nothing: what the `custom_generate/generate.py` of a drafter's repository runs."""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..checkpoints.reading import HUB_ARGUMENTS
from ..drafter import Drafter

# Drafters by where they came from, for as long as their target lives.
_drafters: WeakKeyDictionary[PreTrainedModel, dict[Any, Drafter]] = WeakKeyDictionary()


def generate(model: PreTrainedModel, drafter: Any = None, **kwargs: Any) -> Any:
    """
    What `target.generate(**inputs, custom_generate="owner/drafter", trust_remote_code=True)` comes to.

    The drafter is loaded once for a target, in its number type and onto its device.

    Args:
        model: The target, as transformers passes it.
        drafter: Folder or repository to load the drafter from, or the drafter; by default `custom_generate=` itself.
        kwargs: Everything else that was given to `generate`; `revision`, `token`, ... choose the files on the Hub.

    Raises:
        ValueError: when it is not called through `custom_generate=` and `drafter=` is not given.
    """
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    if drafter is None:
        drafter = _asked_for()
    if not isinstance(drafter, Drafter):
        drafter = _load(model, str(drafter), hub)
    return model.generate(**(kwargs | {"assistant_model": drafter}))


def _asked_for() -> str:
    """
    The `custom_generate=` of the `generate` that called: transformers tells the code of a repository everything but where
    it came from.
    """
    frame = inspect.currentframe()
    while frame is not None:
        asked = frame.f_locals.get("custom_generate")
        if frame.f_code.co_name == "generate" and isinstance(asked, str):
            return asked
        frame = frame.f_back
    raise ValueError("It cannot be told which repository this code came from: pass drafter='owner/drafter' as well.")


def _load(model: PreTrainedModel, name: str, hub: dict[str, Any]) -> Drafter:
    key = (name, hub.get("revision"), hub.get("subfolder"), model.dtype, model.device)
    loaded = _drafters.setdefault(model, {})
    if key not in loaded:
        loaded[key] = Drafter.from_pretrained(name, dtype=model.dtype, **hub).to(model.device).eval()
    return loaded[key]
