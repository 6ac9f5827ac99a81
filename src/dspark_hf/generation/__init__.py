"""`generate(assistant_model=drafter)`: the decoding loop and what it is made of. Start with `loop.py`."""

from .loop import dspark_generate
from .registration import register, unregister
from .streamer import DraftTintStreamer
from .telemetry import Round, SpeculationStats, record_speculation

__all__ = [
    "DraftTintStreamer",
    "Round",
    "SpeculationStats",
    "dspark_generate",
    "record_speculation",
    "register",
    "unregister",
]
