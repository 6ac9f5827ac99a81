"""Conversations: prompts as they are read, and the rows of tokens that a drafter learns from."""
