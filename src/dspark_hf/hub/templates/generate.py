"""Decodes with a DSpark drafter, its output unchanged: `target.generate(..., custom_generate=...)`."""

from functools import partial

from dspark_hf.generation.from_repository import generate_with

# Where the drafter is loaded from. `drafter=` in the call has precedence.
REPOSITORY = None

generate = partial(generate_with, drafter=REPOSITORY)

__all__ = ["generate"]
