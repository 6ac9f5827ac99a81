"""Adapts a drafter to the prompts that its user has."""

from .adapt import Adaptation, adapt
from .comparison import Change
from .settings import AdaptSettings

__all__ = ["AdaptSettings", "Adaptation", "Change", "adapt"]
