"""Decoding for programs that do not import dspark_hf: `custom_generate/generate.py` in a drafter's repository calls this."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from ..checkpoints.reading import HUB_ARGUMENTS
from ..drafter import Drafter
from ..transformers_names import GenerativeModel, compute_device

# The drafters loaded for each target, by name; deleted with the target.
_drafters: WeakKeyDictionary[PreTrainedModel, dict[Any, Drafter]] = WeakKeyDictionary()


def generate_with(model: GenerativeModel, drafter: Any = None, **kwargs: Any) -> Any:
    """
    Runs `target.generate(**inputs, custom_generate="owner/drafter", trust_remote_code=True)`.

    The drafter is loaded once per target, in the target's dtype and onto its device.

    Args:
        model: The target, as transformers passes it.
        drafter: A drafter, or the folder or repository to load it from. The code in a repository passes the repository.
        kwargs: The other arguments of `generate`; `revision`, `token`, ... choose the files on the Hub.

    Raises:
        ValueError: when it is unknown which drafter to load.
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
    key = (name, hub.get("revision"), hub.get("subfolder"), model.dtype, compute_device(model))
    loaded = _drafters.setdefault(model, {})
    if key not in loaded:
        loaded[key] = Drafter.from_pretrained(name, dtype=model.dtype, **hub).to(compute_device(model)).eval()
    return loaded[key]
