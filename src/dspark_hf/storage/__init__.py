"""Files that survive an interruption: one writer at a time, whole lines, whole files."""
