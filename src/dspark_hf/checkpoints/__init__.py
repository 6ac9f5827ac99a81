"""Drafter checkpoints: one module per public format, and the code they share.

A format module has `NAME`, `recognise(config, tensors)` and `read_config(config, tensors)`, where `tensors` are the tensors
in the files by the drafter's parameter names; and `write_config` if drafters can be exported to the format. Formats are
tried in the order of `reading.FORMATS`.

A format whose files hold more than a drafter, or other tensors than the drafter has, also has `is_own(name)`, which tensors are
the drafter's, `open_tensors(path, config, tensors)`, what they are when read, and `UNSUPPORTED`, what of it is not loaded.
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
