"""Measures a drafter: tasks, methods side by side, statistics, figures and reports. Start with `runner.py`."""

from .methods import Method, dspark_method, plain_method
from .runner import BenchSettings, run_bench
from .statistics import Estimate, summarize
from .tasks import TASK_NAMES, Prompt, Task, load_task

__all__ = [
    "TASK_NAMES",
    "BenchSettings",
    "Estimate",
    "Method",
    "Prompt",
    "Task",
    "dspark_method",
    "load_task",
    "plain_method",
    "run_bench",
    "summarize",
]
