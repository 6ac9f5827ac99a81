"""What a decoding loop asks of the device beside the target's passes: kernels, operations and reads, counted per round.

On an accelerator, transformers in eager mode waits for launches more than for arithmetic, so these numbers say what a loop
costs there, whatever the machine they were counted on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# Operations that start no kernel although they are not declared as views: they only make or reinterpret a tensor.
_NO_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "lift_fresh", "_unsafe_view"}
    | {"_reshape_alias", "resize_", "set_", "detach", "alias"}
)
# Operations that run others inside, which a dispatch mode does not see. On torch 2.13: the checks of its input and the race.
_KERNELS_INSIDE = {"multinomial": 17}
# Operations whose result has a size that the host has to read.
_READS = frozenset({"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique_dim", "_unique2", "is_nonzero"})


@dataclass
class OperationCounts:
    """
    Totals over the rounds of a call, from the end of the prompt's pass on.

    Args:
        rounds: Passes of the target after the prompt's.
        kernels, operations: Of everything but the target's passes. Views are operations that start no kernel.
        target_kernels, target_operations: Of the target's passes.
        reads: Times that the host waits for the device: values read from it, and lists copied to it by a call that waits.
        target_reads: The same in the target's passes. transformers 5.17, for instance, looks there for padding in the mask.
    """

    rounds: int = 0
    kernels: int = 0
    operations: int = 0
    target_kernels: int = 0
    target_operations: int = 0
    reads: int = 0
    target_reads: int = 0

    def count_reads(self, number: int, is_in_target: bool) -> None:
        """Adds reads, of the target's pass or of what surrounds it."""
        if is_in_target:
            self.target_reads += number
        else:
            self.reads += number

    def per_round(self) -> dict[str, float]:
        """The totals divided by the number of rounds, by their names."""
        rounds = max(self.rounds, 1)
        return {name: value / rounds for name, value in vars(self).items() if name != "rounds"}


@contextlib.contextmanager
def count_operations(target: nn.Module, *others: nn.Module) -> Iterator[OperationCounts]:
    """
    Counts what runs inside, of one `generate` call or another loop that calls `target`.

    Passes in inference mode would hide operations inside others, so the models get a hook, which keeps ours out of it.

    Args:
        target: The target, whose passes end a round.
        others: Further models, such as the drafter.
    """
    counts, state = OperationCounts(), _State()

    def begin(module: nn.Module, *args: Any) -> None:
        state.is_in_target = True

    def end(module: nn.Module, *args: Any) -> None:
        counts.rounds += state.is_counting
        state.is_in_target, state.is_counting = False, True  # The prompt's pass is the first.

    hooks = [target.register_forward_pre_hook(begin), target.register_forward_hook(end)]
    hooks += [module.register_forward_pre_hook(lambda *args: None) for module in others]
    try:
        with _Operations(counts, state), _Reads(counts, state):
            yield counts
    finally:
        for hook in hooks:
            hook.remove()


@dataclass
class _State:
    is_counting: bool = False
    is_in_target: bool = False


class _Operations(TorchDispatchMode):
    """Counts ATen operations."""

    def __init__(self, counts: OperationCounts, state: _State):
        super().__init__()
        self.counts, self.state = counts, state

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.state.is_counting:
            name = _name(function)
            kernels = 0 if _is_view(function) else _KERNELS_INSIDE.get(name, 1)
            if self.state.is_in_target:
                self.counts.target_operations += 1
                self.counts.target_kernels += kernels
            else:
                self.counts.operations += 1
                self.counts.kernels += kernels
            is_read = name in _READS or _has_unknown_size(name, args, kwargs or {})
            self.counts.count_reads(is_read, self.state.is_in_target)
        return function(*args, **(kwargs or {}))


class _Reads(TorchFunctionMode):
    """Counts the calls that wait for the device without an operation of their own."""

    def __init__(self, counts: OperationCounts, state: _State):
        super().__init__()
        self.counts, self.state = counts, state

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.state.is_counting:
            is_read = function in (torch.Tensor.tolist, torch.Tensor.cpu)
            is_read |= function is torch.Tensor.to and "cpu" in (kwargs.get("device"), *args[1:2])
            is_read |= function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None
            self.counts.count_reads(is_read, self.state.is_in_target)
        return function(*args, **kwargs)


def _name(function: Any) -> str:
    """`add_` for `aten::add_.Tensor`."""
    return str(function.name()).split("::")[1].split(".")[0]


def _is_view(function: Any) -> bool:
    return function.is_view or _name(function) in _NO_KERNEL


def _has_unknown_size(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the size of the result depends on values: indexing by masks, and repeats without a total."""
    if name == "repeat_interleave":
        return len(args) < 2 and not kwargs.get("output_size")
    if name in ("index", "index_put_", "_index_put_impl_"):
        return any(isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or ())
    return False
