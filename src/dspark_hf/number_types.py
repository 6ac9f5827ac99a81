"""Number types by the names that options give them."""

from __future__ import annotations

import torch


def floating_dtype(name: str, option: str) -> torch.dtype:
    """
    A number type for weights, by name.

    Raises:
        ValueError: naming `option`, when torch has none of this name.
    """
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"{option} is {name!r}, which is no number type for weights; give float32, bfloat16 or float16."
        )
    return found
