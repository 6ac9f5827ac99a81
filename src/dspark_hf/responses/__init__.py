"""Responses of the target to prompts: the training data of a drafter."""

from .regeneration import Regenerator
from .self_prompting import self_prompt
from .server import ServerRegenerator
from .settings import RegenerationSettings

__all__ = ["RegenerationSettings", "Regenerator", "ServerRegenerator", "self_prompt"]
