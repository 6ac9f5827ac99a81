"""Drafter checkpoints: one module a public format, and the reading they share.

A format module has `NAME`, `recognise(config, tensors)` and `read_config(config, tensors)`, where `tensors` are what the
files hold under the drafter's own names, and `write_config` where drafters are exported to it. Formats are tried in the
order of `reading.FORMATS`.
"""

from .inspection import Inspection, inspect_checkpoint
from .reading import Checkpoint, read_checkpoint
from .writing import EXPORT_FORMATS, Export, export

__all__ = [
    "EXPORT_FORMATS",
    "Checkpoint",
    "Export",
    "Inspection",
    "export",
    "inspect_checkpoint",
    "read_checkpoint",
]
