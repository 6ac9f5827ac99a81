"""Conversations: prompts as they are read, chats as token ids, and the rows of tokens that a drafter learns from."""

from .chat import Chat
from .prompts import read_prompts
from .rows import encode_rows

__all__ = ["Chat", "encode_rows", "read_prompts"]
