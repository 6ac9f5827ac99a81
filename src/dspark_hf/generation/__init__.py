"""`generate(assistant_model=drafter)`: the decoding loop and what it is made of. Start with `loop.py`."""

from .loop import dspark_generate
from .registration import register, unregister
from .telemetry import Round, SpeculationStats, record_speculation

__all__ = ["Round", "SpeculationStats", "dspark_generate", "record_speculation", "register", "unregister"]
