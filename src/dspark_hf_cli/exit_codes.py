"""The exit codes of commands."""

ERROR = 1
USAGE = 2
DIFFERENT_ANSWERS = 3  # `bench` found greedy answers that differ from those of plain `generate`.
INTERRUPTED = 130
