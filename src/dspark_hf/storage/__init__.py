"""Writing files safely: completely or not at all, by one process at a time, resumable after an interruption."""
