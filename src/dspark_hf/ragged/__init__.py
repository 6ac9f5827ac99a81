"""Rows of different lengths in one pass of a target: for batched drafting, and for generating many responses at once."""
