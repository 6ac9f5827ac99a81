"""The target's responses to prompts: what a drafter learns from."""

from .regeneration import Regenerator
from .self_prompting import self_prompt
from .server import ServerRegenerator
from .settings import RegenerationSettings

__all__ = ["RegenerationSettings", "Regenerator", "ServerRegenerator", "self_prompt"]
