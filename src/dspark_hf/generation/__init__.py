"""`generate(assistant_model=drafter)`: the decoding loop and what it is made of. Start with `loop.py`."""

from .entry import dspark_generate
from .registration import register, unregister
from .streamer import DraftStreamer, DraftTintStreamer
from .telemetry import Round, SpeculationStats, StageClock, record_speculation

__all__ = [
    "DraftStreamer",
    "DraftTintStreamer",
    "Round",
    "SpeculationStats",
    "StageClock",
    "dspark_generate",
    "record_speculation",
    "register",
    "unregister",
]
