"""`generate(assistant_model=drafter)`: the decoding loop and what it is made of. Start with `loop.py`."""

from .attached import Attachment, attach, detach
from .entry import dspark_generate
from .registration import register, unregister
from .streamer import DraftStreamer, DraftTintStreamer
from .telemetry import Round, SpeculationStats, StageClock, record_speculation

__all__ = [
    "Attachment",
    "DraftStreamer",
    "DraftTintStreamer",
    "Round",
    "SpeculationStats",
    "StageClock",
    "attach",
    "detach",
    "dspark_generate",
    "record_speculation",
    "register",
    "unregister",
]
