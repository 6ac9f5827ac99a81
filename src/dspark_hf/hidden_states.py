"""Tapping the target's hidden states."""

from __future__ import annotations

from typing import Any

import torch
from transformers.utils import output_capturing

# Newer transformers keep only the entries of `hidden_states` named in a list. Before that a list meant decoder layers,
# numbered differently and without the embedding output, so there all entries are asked for.
_TAKES_INDICES = hasattr(output_capturing, "selected_hidden_states")


def output_hidden_states(indices: list[int]) -> list[int] | bool:
    """What to pass as `output_hidden_states=` to get the given entries of `hidden_states`, and others where it must be."""
    return indices if _TAKES_INDICES else True


def context_features(model_output: Any, indices: list[int]) -> torch.Tensor:
    """The given entries of a target output's `hidden_states`, each `[B, T, D]`, concatenated to `[B, T, m * D]`."""
    states = [model_output.hidden_states[index] for index in indices]
    # The layers of a target spread over devices leave their outputs there.
    return torch.cat([state.to(states[0].device) for state in states], dim=-1)
