"""Decodes with a DSpark drafter, with the same output: `target.generate(..., custom_generate=...)`."""

from functools import partial

from dspark_hf.generation.from_repository import generate_with

# The repository to load the drafter from, unless the call has `drafter=`.
REPOSITORY = None

generate = partial(generate_with, drafter=REPOSITORY)

__all__ = ["generate"]
