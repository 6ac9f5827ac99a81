"""What can be found out about a drafter of each kind by drafting with its target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .dspark.layout_probe import probe_layout
from .dspark.modeling_dspark import DSparkDrafter
from .eagle3.modeling_eagle3 import Eagle3Drafter
from .eagle3.tap_probe import probe_taps

# Each takes the drafter, its target, prompts and the tokens to continue each prompt by. What it returns prints as a sentence and
# has `to_dict`.
PROBES: dict[type[Any], Callable[..., Any]] = {DSparkDrafter: probe_layout, Eagle3Drafter: probe_taps}


def probe_of(kind: type[Any]) -> Callable[..., Any] | None:
    """The probe for drafters of a class, or of the kind that it is derived from; `None` where nothing is left to find out."""
    return next((PROBES[part] for part in kind.__mro__ if part in PROBES), None)
