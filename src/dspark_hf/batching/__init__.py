"""Continuous batching: many independent requests in a fixed number of rows."""

from .entry import generate_many
from .requests import GenerationRequest, GenerationResult

__all__ = ["GenerationRequest", "GenerationResult", "generate_many"]
