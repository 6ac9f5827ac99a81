"""The target's responses to prompts: what a drafter learns from."""
