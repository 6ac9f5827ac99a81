"""Conversations: reading prompts, chats as token ids, and tokenized rows for training."""

from .chat import Chat
from .prompts import read_prompts
from .rows import encode_rows

__all__ = ["Chat", "encode_rows", "read_prompts"]
