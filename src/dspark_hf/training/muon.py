"""Muon for the drafter's matrices, AdamW for everything else.

Muon (Jordan et al., 2024) replaces a matrix's momentum by the nearest orthogonal one before it steps, so that all of its
directions learn at one pace. With drafters a few layers deep it reaches the loss of AdamW in about half the steps, at
the cost of a few small matrix products a step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

# Newton-Schulz coefficients of the original, tuned to bring all singular values near 1 in five steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
# Root mean square of an update at learning rate 1: about AdamW's, so both share one learning rate (Liu et al., 2025).
_UPDATE_RMS = 0.2


def orthogonalize(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """About the nearest matrix with orthonormal rows or columns, by Newton-Schulz iteration in bfloat16. `[m, n]`."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.mT if tall else matrix).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrix.dtype)


class MuonAdamW(torch.optim.Optimizer):
    """
    Muon and AdamW as one optimiser, so that schedulers, checkpoints and resuming see nothing unusual.

    Args:
        matrices: Two-dimensional parameters that Muon trains.
        others: Parameters that AdamW trains.
        lr, weight_decay: Of both.
        momentum: Muon's, in Nesterov's form.
        betas, eps: AdamW's.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        lr: float,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": betas, "eps": eps}
        groups = [{"params": matrices, "muon": True}, {"params": others, "muon": False}]
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                (self._muon if group["muon"] else self._adamw)(parameter, group, self.state[parameter])
        return loss

    @staticmethod
    def _muon(parameter: nn.Parameter, group: dict, state: dict) -> None:
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum, decay = state["momentum"], group["momentum"]
        momentum.lerp_(parameter.grad, 1 - decay)
        update = orthogonalize(parameter.grad.lerp(momentum, decay))
        parameter.add_(update, alpha=-group["lr"] * _UPDATE_RMS * max(parameter.shape) ** 0.5)

    @staticmethod
    def _adamw(parameter: nn.Parameter, group: dict, state: dict) -> None:
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        (beta1, beta2), step = group["betas"], float(state["step"])
        state["exp_avg"].lerp_(parameter.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
        scale = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        parameter.addcdiv_(state["exp_avg"], scale, value=-group["lr"] / (1 - beta1**step))


def split_parameters(drafter: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """
    What Muon trains, the matrices of the draft layers and of the context projection, and what AdamW trains: norms,
    biases, and the heads, whose rows stand for tokens.
    """
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in drafter.named_parameters():
        if parameter.requires_grad:
            hidden = parameter.ndim == 2 and ("layers." in name or name.endswith("fc.weight"))
            (matrices if hidden else others).append(parameter)
    return matrices, others
