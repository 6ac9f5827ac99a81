"""Decodes with the DSpark drafter of this repository, its output unchanged: `target.generate(..., custom_generate=...)`."""

from dspark_hf.generation.from_repository import generate

__all__ = ["generate"]
