"""Drafter checkpoints: one module per public format, and the code they share.

A format module has `NAME`, `recognise(config, tensors)` and `read_config(config, tensors)`, where `tensors` are the tensors
in the files by the drafter's parameter names; and `write_config` if drafters can be exported to the format. Formats are
tried in the order of `reading.FORMATS`.
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
