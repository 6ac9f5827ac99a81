"""Muon for the drafter's matrices, AdamW for everything else.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal matrix before each step, so that all
directions learn at the same rate. For drafters of a few layers, it reaches the loss of AdamW in about half the steps, at the
cost of a few small matrix products per step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def has_muon() -> bool:
    """Whether this torch has the Muon optimiser."""
    return hasattr(torch.optim, "Muon")


class MuonAdamW(torch.optim.Optimizer):
    """
    Combines `torch.optim.Muon` and `torch.optim.AdamW` into one optimiser, because a `Trainer` handles only one.

    Args:
        matrices: Two-dimensional parameters that Muon trains.
        others: Parameters that AdamW trains.
        lr, weight_decay: For both. Muon's updates are scaled to the size of AdamW's (Liu et al., 2025), so the same learning
            rate works for both.
        betas, eps: For AdamW.

    Raises:
        ImportError: with a torch older than 2.9, which has no Muon.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        if not has_muon():
            raise ImportError(
                f"matrix_optimizer='muon' needs torch 2.9 or newer, and this is torch {torch.__version__}: "
                "pip install --upgrade torch, or use matrix_optimizer='adamw'."
            )
        self._parts: list[torch.optim.Optimizer] = []
        if matrices:
            self._parts.append(
                torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
            )
        if others:
            self._parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps))
        super().__init__([group for part in self._parts for group in part.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """Makes both optimisers use the groups and state of this one, so that schedules and checkpoints affect them."""
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups = [group]
            part.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss


def split_parameters(drafter: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """
    The parameters for Muon (the matrices of the draft layers and of the context projection) and those for AdamW (norms, biases,
    and the heads, whose rows belong to tokens).
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            hidden = parameter.ndim == 2 and ("layers." in name or name.endswith("fc.weight"))
            (matrices if hidden else others).append(parameter)
    return matrices, others
