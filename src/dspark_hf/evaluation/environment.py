"""Versions, machine and devices, for measurements and bug reports."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    "dspark-hf",
    "torch",
    "transformers",
    "accelerate",
    "safetensors",
    "huggingface-hub",
    "peft",
    "datasets",
    "flash-attn",
    "bitsandbytes",
)


def environment() -> dict[str, Any]:
    """Versions, machine and devices, ready for JSON."""
    packages = {name: _package_version(name) for name in PACKAGES}
    # Also works in a checkout that is not installed.
    packages["dspark-hf"] = importlib.import_module(__name__.partition(".")[0]).__version__
    return {
        "packages": packages,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": _memory_gib(),
        "accelerators": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "load_average": list(os.getloadavg()) if os.name == "posix" else None,
    }


def _package_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
