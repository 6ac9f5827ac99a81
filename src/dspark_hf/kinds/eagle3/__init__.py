"""EAGLE-3 drafters."""
