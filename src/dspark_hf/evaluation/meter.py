"""The cost of one call, measured the same way for every method: target passes, seconds, memory."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..transformers_names import compute_device


@dataclass
class Meter:
    """
    Args:
        seconds: Wall-clock time of the call.
        prefill_s: The part of it up to the end of the target's first pass.
        passes: Tokens fed to each pass of the target after the first.
        peak_bytes: Peak memory during the call: of tensors on an accelerator, of the process on a CPU. `None` where the
            system does not report it.
    """

    seconds: float = 0.0
    prefill_s: float = 0.0
    passes: list[int] = field(default_factory=list)
    peak_bytes: int | None = None


@contextlib.contextmanager
def measured(target: PreTrainedModel) -> Iterator[Meter]:
    """Measures what happens inside the `with` block. The meter is complete when the block ends."""
    meter, device = Meter(), compute_device(target)
    is_first = True

    def after_pass(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal is_first
        if is_first:
            synchronize(device)
            meter.prefill_s = time.perf_counter() - started
            is_first = False
            return
        fed = kwargs.get("input_ids", args[0] if args else None)
        meter.passes.append(fed.shape[1] if fed is not None else 1)

    hook = target.register_forward_hook(after_pass, with_kwargs=True)
    reset_peak_memory(device)
    synchronize(device)
    started = time.perf_counter()
    try:
        yield meter
        synchronize(device)
        meter.seconds = time.perf_counter() - started
        meter.peak_bytes = peak_memory(device)
    finally:
        hook.remove()


def synchronize(device: torch.device) -> None:
    """Waits until an accelerator has finished its work; a CPU needs no waiting."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def reset_peak_memory(device: torch.device) -> None:
    """Starts the measurement of peak memory over."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif device.type == "cpu":
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory(device: torch.device) -> int | None:
    """Peak memory in bytes since the last reset."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if device.type == "cpu" and status.exists():
        line = next((line for line in status.read_text().splitlines() if line.startswith("VmHWM:")), None)
        return int(line.split()[1]) * 1024 if line else None
    return None
