"""What a run logged: as a table while it runs, and as a picture at its end."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ..storage.atomic import whole_file

CSV_FILE = "log.csv"


class CsvLog(TrainerCallback):
    """
    Keeps everything the trainer logs in `log.csv` of the output folder: a row an entry, a column a number. A further
    column counts the hours of training so far.

    The whole table is written anew each time, since later entries bring further columns; a resumed run goes on with
    the entries, and the hours, of the run before. Only the first process writes.
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
        hours = hours_of(state.log_history)  # Of a finished run, which is only looked at again.
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
    Loss, tokens a target pass, and acceptance by position at the end.

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
    titles = ("loss", "tokens a target pass (teacher forced)", "acceptance by position, last logged")
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
