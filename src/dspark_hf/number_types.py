"""Floating-point dtypes by name."""

from __future__ import annotations

import torch


def floating_dtype(name: str, option: str) -> torch.dtype:
    """
    The dtype with the given name.

    Args:
        name: Such as `"bfloat16"`.
        option: The option's name in the error message.

    Raises:
        ValueError: when torch has no floating-point dtype of this name.
    """
    found = vars(torch).get(name)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(
            f"{option} is {name!r}, which is not a floating-point dtype: use float32, bfloat16 or float16."
        )
    return found
