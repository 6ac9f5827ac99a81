"""The common part of the measuring commands: making measurements with a progress bar, then reporting."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dspark_hf.evaluation import BenchSettings, Method, Task
    from dspark_hf.evaluation.records import RecordFile
    from dspark_hf.evaluation.runner import Progress


def run(
    target: Any,
    tokenizer: Any,
    methods: list[Method],
    tasks: list[Task],
    settings: BenchSettings,
    output: Path,
    others: dict[str, Any],
    num_checks: int = 0,
    profile: bool = False,
) -> dict[str, Any]:
    """
    Makes the missing measurements of a run, with progress on standard error.

    Args:
        target, tokenizer, methods, tasks, settings: As for [`~dspark_hf.evaluation.run_bench`].
        output: Folder of the run.
        others: Other settings that the measurements depend on, for the note next to the file.
        num_checks: Prompts whose greedy answers are compared with those of plain `generate`, in a run that measures sampling.
        profile: Also measure where the time of a round goes.

    Returns:
        The document of the run.
    """
    from dspark_hf.evaluation.document import build_document
    from dspark_hf.evaluation.profiling import profile_methods

    from .loading import say

    with measured_run(target, tokenizer, methods, tasks, settings, output, others, num_checks) as (described, file):
        if profile:
            say("Measuring where the time of a round goes ...")
        profiles = profile_methods(target, tokenizer, methods, tasks, settings) if profile else None
        return build_document(methods, tasks, described, file, profiles)


@contextlib.contextmanager
def measured_run(
    target: Any,
    tokenizer: Any,
    methods: list[Method],
    tasks: list[Task],
    settings: BenchSettings,
    output: Path,
    others: dict[str, Any],
    num_checks: int = 0,
) -> Iterator[tuple[dict[str, Any], RecordFile]]:
    """
    Makes the missing measurements of a run, with progress on standard error; arguments as in `run`.

    Yields:
        The settings, and the file of the run with all measurements, open.
    """
    from dspark_hf.evaluation.records import RecordFile
    from dspark_hf.evaluation.runner import check_greedily, default_file, run_bench

    names = {"methods": [method.name for method in methods]}
    described = describe(tasks, settings, others) | names | machine_of(target)
    file = RecordFile(default_file(output), described)
    try:
        if num_checks and not settings.is_greedy:
            with counting("checking greedy answers") as on_progress:
                check_greedily(target, tokenizer, methods, tasks, settings, file, num_checks, on_progress)
        with ShownProgress() as shown:
            run_bench(target, tokenizer, methods, tasks, settings, file, shown.update)
        yield described, file
    finally:
        file.close()


def describe(tasks: list[Task], settings: BenchSettings, others: dict[str, Any]) -> dict[str, Any]:
    """The settings that measurements depend on, as far as they are known before models are loaded."""
    from dspark_hf.evaluation.runner import run_settings

    names = {"target_name" if name == "target" else name: value for name, value in others.items()}
    return run_settings(tasks=tasks, settings=settings, **names)


def check_resumable(
    output: Path, tasks: list[Task], settings: BenchSettings, dtype: str, device: str | None, others: dict[str, Any]
) -> None:
    """
    Checks, before models are loaded, whether an earlier run in the same folder had the same settings.

    Raises:
        ValueError: when settings differ; the message lists them.
    """
    from dspark_hf.evaluation.runner import default_file
    from dspark_hf.storage.json_lines import check_origin

    check_origin(default_file(output), describe(tasks, settings, others) | known_machine(dtype, device))


def machine_of(target: Any) -> dict[str, str]:
    """The dtype, device, ... that measurements depend on besides models and prompts."""
    return {"dtype": str(target.dtype).removeprefix("torch."), "device": target.device.type}


def known_machine(dtype: str, device: str | None) -> dict[str, str]:
    """
    The part of [`machine_of`] that follows from the options.

    Raises:
        typer.BadParameter: for a dtype or device that does not exist.
    """
    import torch

    from .loading import check_dtype_and_device

    check_dtype_and_device(dtype, device or "cpu")
    known = {} if dtype == "auto" else {"dtype": dtype}
    return known if device is None else known | {"device": torch.device(device).type}


def finish(document: dict[str, Any], output: Path, as_json: bool, more_figures: dict[str, Any] | None = None) -> None:
    """
    Writes `results.json`, the figures and `report.html`, and prints the results.

    Args:
        document: The result of `run`.
        output: Folder of the run.
        as_json: Print the document instead of tables.
        more_figures: Figures in addition to those of every run.
    """
    from rich.console import Console

    from dspark_hf.evaluation.figures import as_png, figures_of
    from dspark_hf.evaluation.report import print_report, write_html
    from dspark_hf.storage.atomic import write_bytes, write_text

    write_text(output / "results.json", json.dumps(document, indent=1) + "\n")
    pngs = {}
    try:
        pngs = {name: as_png(figure) for name, figure in ((more_figures or {}) | figures_of(document)).items()}
    except ImportError as error:
        print(f"{error} The report has no figures.", file=sys.stderr)
    for name, png in pngs.items():
        write_bytes(output / f"{name}.png", png)
    write_html(document, output / "report.html", pngs)
    if as_json:
        print(json.dumps(document))
        return
    # Piped output has no width, and rich would assume 80 columns and cut the table.
    console = Console(width=None if sys.stdout.isatty() else 180)
    print_report(document, console)
    print(f"Report: {output / 'report.html'}")


class ShownProgress:
    """A progress bar on a terminal; otherwise a line from time to time."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self.console = Console(stderr=True)
        self._num_lines = 0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("measuring", total=None, left="")

    def __enter__(self) -> ShownProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, progress: Progress) -> None:
        """Shows the progress, and every answer that differs."""
        from dataclasses import asdict

        from dspark_hf.evaluation.report import difference_text
        from dspark_hf.training.history import duration

        if progress.difference is not None:
            self.console.print(f"different: {difference_text(asdict(progress.difference))}", highlight=False)
            return
        left = f"{duration(progress.left_s)} left" if progress.left_s is not None else ""
        record = progress.record
        tokens = sum(len(turn.output_ids) for turn in record.turns)
        seconds = sum(turn.seconds for turn in record.turns)
        what = f"{record.task} {record.prompt} {record.method}: {tokens / seconds:.1f} tokens/s"
        self._bar.update(self._task, total=progress.total, completed=progress.done, left=left, description=what)
        step = max(progress.total // 20, 1)
        if not self.console.is_terminal and (
            progress.done // step > self._num_lines or progress.done == progress.total
        ):
            self._num_lines = progress.done // step
            self.console.print(f"{progress.done}/{progress.total} {what}, {left}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def counting(what: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal. Call the result with the number of finished items and the total."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def save_figure(draw: Callable[[], Any], path: Path) -> None:
    """Writes the figure that `draw` makes, or a message to standard error if matplotlib is missing."""
    from dspark_hf.evaluation.figures import as_png
    from dspark_hf.storage.atomic import write_bytes

    try:
        write_bytes(path, as_png(draw()))
    except ImportError as error:
        print(f"{error} There is no {path.name}.", file=sys.stderr)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Prints a table to standard output, unless it is empty."""
    from rich.console import Console
    from rich.table import Table

    if not rows:
        return
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in header:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 180).print(table)
