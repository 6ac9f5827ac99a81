"""Decoding for programs that import nothing of ours: what the `custom_generate/generate.py` of a drafter's repository runs."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..checkpoints.reading import HUB_ARGUMENTS
from ..drafter import Drafter
from ..transformers_names import GenerativeModel

# Drafters by where they came from, for as long as their target lives.
_drafters: WeakKeyDictionary[PreTrainedModel, dict[Any, Drafter]] = WeakKeyDictionary()


def generate_with(model: GenerativeModel, drafter: Any = None, **kwargs: Any) -> Any:
    """
    What `target.generate(**inputs, custom_generate="owner/drafter", trust_remote_code=True)` runs.

    The drafter is loaded once for a target, in its dtype and onto its device.

    Args:
        model: The target, as transformers passes it.
        drafter: Folder or repository to load the drafter from, or the drafter. The code in a repository fills in the repository.
        kwargs: Everything else that was given to `generate`; `revision`, `token`, ... choose the files on the Hub.

    Raises:
        ValueError: when nothing says which drafter to load.
    """
    if drafter is None:
        raise ValueError(
            "This code was saved to a folder and does not know where the folder is now: pass it as drafter= as well, "
            "generate(custom_generate=folder, drafter=folder)."
        )
    hub = {name: kwargs.pop(name) for name in HUB_ARGUMENTS if name in kwargs}
    if not isinstance(drafter, Drafter):
        drafter = _load(model, str(drafter), hub)
    return model.generate(**(kwargs | {"assistant_model": drafter}))


def _load(model: GenerativeModel, name: str, hub: dict[str, Any]) -> Drafter:
    key = (name, hub.get("revision"), hub.get("subfolder"), model.dtype, model.device)
    loaded = _drafters.setdefault(model, {})
    if key not in loaded:
        loaded[key] = Drafter.from_pretrained(name, dtype=model.dtype, **hub).to(model.device).eval()
    return loaded[key]
