"""The log of a training run: a line per entry on the terminal, all figures in a CSV file, and a plot at the end."""

from __future__ import annotations

import csv
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from ..storage.atomic import whole_file

CSV_FILE = "log.csv"

# Columns of the lines on the terminal: title, width, name of the figure, format.
COLUMNS = (
    ("epoch", 6, "epoch", ".2f"),
    ("loss", 8, "loss", ".4f"),
    ("tokens/pass", 13, "acceptance_length", ".2f"),
    ("greedy", 8, "greedy_acceptance_length", ".2f"),
    ("1st draft", 10, "acceptance_1", ".0%"),
    ("rate", 9, "learning_rate", ".1e"),
)
LINES_PER_HEADER = 30


def print_lines(trainer: Trainer) -> None:
    """
    Makes a trainer print a line with the most important figures, instead of a dictionary with all of them. In notebooks,
    transformers' table stays.
    """
    printed = trainer.pop_callback(PrinterCallback)
    bar = trainer.pop_callback(ProgressCallback)
    if bar is not None:
        trainer.add_callback(ProgressBar)
    if printed is not None or bar is not None:
        trainer.add_callback(LogLines)


class ProgressBar(ProgressCallback):
    """transformers' progress bar, which does not print the log dictionaries."""

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        pass


class LogLines(TrainerCallback):
    """
    Prints a table to standard error, with a line per log entry of training and of evaluation.

    `tokens/pass` is the expected number of tokens per target pass with sampled drafts, `greedy` the same with greedy drafts,
    `1st draft` the probability that the first draft is accepted, `rate` the learning rate. They are computed on the text of
    the data; `dspark-hf bench` measures generation.
    """

    def __init__(self) -> None:
        self._num_lines = 0
        self._began_at = (0, time.perf_counter())

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began_at = (state.global_step, time.perf_counter())

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not state.is_world_process_zero or not logs:
            return
        if "train_runtime" in logs:
            self._print(f"{state.global_step} steps in {duration(logs['train_runtime'])}.")
            return
        prefix = "eval_" if any(name.startswith("eval_") for name in logs) else ""
        if f"{prefix}loss" not in logs:
            return
        if self._num_lines % LINES_PER_HEADER == 0:
            titles = "".join(f"{title:>{width}}" for title, width, _, _ in COLUMNS)
            self._print(f"{'':8}{'step':>7}{titles}{'time left':>10}")
        self._num_lines += 1
        cells = [f"{'held out' if prefix else 'training':8}{state.global_step:7}"]
        for _, width, name, form in COLUMNS:
            value = logs.get(name if name in ("epoch", "learning_rate") else f"{prefix}{name}")
            cells.append(" " * width if value is None else f"{value:>{width}{form}}")
        self._print(f"{''.join(cells)}{self._time_left(state):>10}".rstrip())

    def _time_left(self, state: Any) -> str:
        step, second = self._began_at
        done = state.global_step - step
        if done <= 0 or state.max_steps <= 0:
            return ""
        return duration((time.perf_counter() - second) / done * (state.max_steps - state.global_step))

    @staticmethod
    def _print(line: str) -> None:
        tqdm.write(line, file=sys.stderr)  # above the progress bar, if there is one


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in `"1:02:03"`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


class CsvLog(TrainerCallback):
    """
    Writes everything the trainer logs to `log.csv` in the output folder: one row per entry, one column per figure, and a
    column with the hours of training so far.

    The whole table is rewritten each time, because later entries may have more columns. A resumed run continues the entries
    and the hours of the interrupted run. Only the first process writes.
    """

    def __init__(self) -> None:
        self._began: float | None = None
        self._hours_before = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()
        self._hours_before = hours_of(state.log_history)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.log_history:
            return
        hours = hours_of(state.log_history)  # a finished run is only evaluated again
        if self._began is not None:
            hours = self._hours_before + (time.perf_counter() - self._began) / 3600
        state.log_history[-1]["hours"] = hours
        if state.is_world_process_zero:
            write_csv(state.log_history, Path(args.output_dir) / CSV_FILE)


def hours_of(history: list[dict[str, float]]) -> float:
    """Hours of training when the last entry was logged."""
    return max((entry.get("hours", 0.0) for entry in history), default=0.0)


def write_csv(history: list[dict[str, float]], path: Path) -> None:
    """A trainer's log history as a table; `step` and `epoch` come first."""
    names = dict.fromkeys(["step", "epoch", "hours", *(name for entry in history for name in entry)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as part, part.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(names))
        writer.writeheader()
        writer.writerows(history)


def training_figure(history: list[dict[str, float]]) -> Any:
    """
    Plots the loss, the tokens per target pass, and the final acceptance by position.

    Returns:
        A matplotlib `Figure`; `.savefig(path)` writes it.

    Raises:
        ImportError: without matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("Figures need matplotlib: pip install 'dspark-hf[plot]'.") from error
    figure = Figure(figsize=(14, 4), layout="constrained")
    loss, length, position = figure.subplots(1, 3)
    for name, label in (("loss", "training"), ("eval_loss", "held out")):
        _line(loss, history, name, label)
    for prefix, kind in (("", "training"), ("eval_", "held out")):
        _line(length, history, f"{prefix}acceptance_length", f"{kind}, sampled")
        _line(length, history, f"{prefix}greedy_acceptance_length", f"{kind}, greedy")
    for prefix, kind in (("", "training"), ("eval_", "held out")):
        values = acceptance_by_position(history, prefix)
        if values:
            position.plot(range(1, len(values) + 1), values, "o-", label=kind)
    position.set_ylim(0, 1)
    titles = ("loss", "tokens per target pass (on the text of the data)", "acceptance by position, last logged")
    for axes, title, x in zip((loss, length, position), titles, ("optimiser step", "optimiser step", "draft")):
        axes.set(xlabel=x, title=title)
        axes.grid(alpha=0.3)
        if axes.has_data():
            axes.legend()
    return figure


def acceptance_by_position(history: list[dict[str, float]], prefix: str = "eval_") -> list[float]:
    """Acceptance of draft 1, 2, ... in the last entry that has it."""
    for entry in reversed(history):
        if f"{prefix}acceptance_1" in entry:
            count = sum(
                name.removeprefix(f"{prefix}acceptance_").isdigit() for name in entry if name.startswith(prefix)
            )
            return [entry[f"{prefix}acceptance_{k}"] for k in range(1, count + 1)]
    return []


def _line(axes: Any, history: list[dict[str, float]], name: str, label: str) -> None:
    points = [(entry["step"], entry[name]) for entry in history if name in entry]
    if points:
        axes.plot(*zip(*points), label=label, marker="o" if len(points) < 20 else None)
