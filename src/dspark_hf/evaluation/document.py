"""All results of a run as one JSON-ready dictionary, from which the table, the figures and the HTML page are made."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from ..scheduling import Reliability
from .environment import environment
from .methods import PLAIN, Method
from .records import Record, RecordFile
from .runner import CHECK_TOKENS
from .statistics import conditional_acceptance, confidence_quality, summarize, threshold_sweep
from .tasks import DOMAINS, Task

SCHEMA = 1
THRESHOLDS = tuple(step / 20 for step in range(20))


def build_document(
    methods: list[Method],
    tasks: list[Task],
    settings: dict[str, Any],
    file: RecordFile,
    profile: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """
    The results of a run.

    Args:
        methods, tasks: The methods and tasks of the run.
        settings: Its settings, as [`~dspark_hf.evaluation.runner.run_settings`] gives them.
        file: The measurements.
        profile: Where a round's time goes, see [`~dspark_hf.evaluation.profiling.profile_methods`].

    Returns:
        `schema`, `environment`, `settings`, `results` (one entry per group and method; groups are tasks, domains and
        `"all"`), `identity` (greedy answers compared with plain `generate`), `identity_note` (which ones), `profile`.
        Undefined numbers are `None`.
    """
    results = []
    for kind, name, group_tasks in groups_of(tasks):
        names = {task.name for task in group_tasks}
        records = [r for r in file.records.values() if r.task in names]
        plain = [r for r in records if r.method == PLAIN]
        for method in methods:
            own = [r for r in records if r.method == method.name]
            if own:
                results.append({"kind": kind, "group": name} | result_of(method, own, plain))
    return without_nan(
        {
            "schema": SCHEMA,
            "environment": environment(),
            "settings": settings,
            "domains": {task.name: task.domain for task in tasks},
            "results": results,
            "identity": identity_of(methods, file),
            "identity_note": identity_note(settings, file),
            "profile": profile,
        }
    )


def groups_of(tasks: list[Task]) -> Iterable[tuple[str, str, list[Task]]]:
    """Each task, each domain with more than one task, and all tasks together."""
    for task in tasks:
        yield "task", task.name, [task]
    for domain in DOMAINS:
        members = [task for task in tasks if task.domain == domain]
        if len(members) > 1:
            yield "domain", domain, members
    if len(tasks) > 1:
        yield "all", "all", tasks


def result_of(method: Method, records: list[Record], plain: list[Record]) -> dict[str, Any]:
    """One method on one group of prompts."""
    rounds = [r for record in records for r in record.rounds]
    result = {
        "method": method.name,
        "fields": method.fields,
        "num_prompts": len(records),
        "num_tokens": sum(len(turn.output_ids) for record in records for turn in record.turns),
        "num_rounds": len(rounds),
        "estimates": {name: asdict(e) for name, e in summarize(records, plain).items()},
        "conditional_acceptance": [asdict(e) for e in conditional_acceptance(rounds)],
    }
    if method.drafter is None:
        return result
    quality = confidence_quality(rounds, method.drafter.config.confidence_temperatures)
    if quality is not None:
        result["confidence"] = quality.means()
        result["reliability"] = {
            "before": [reliability_of(r) for r in quality.before],
            "after": None if quality.after is None else [reliability_of(r) for r in quality.after],
        }
        if not method.arguments.get("assistant_confidence_threshold"):
            result["threshold_sweep"] = [asdict(point) for point in threshold_sweep(rounds, THRESHOLDS)]
    return result


def reliability_of(reliability: Reliability) -> dict[str, Any]:
    return asdict(reliability)


def identity_of(methods: list[Method], file: RecordFile) -> dict[str, Any]:
    """How many greedy answers were compared with those of plain `generate`, and every one that differs."""
    return {
        method.name: {
            "checked": sum(key[2] == method.name for key in file.checked),
            "different": sum(d.method == method.name for d in file.differences),
            "differences": [asdict(d) for d in file.differences if d.method == method.name],
        }
        for method in methods
        if method.name != PLAIN
    }


def identity_note(settings: dict[str, Any], file: RecordFile) -> str:
    """Which greedy answers were compared with those of plain `generate`."""
    if not file.checked:
        return "Not checked: no greedy answers were compared with those of plain generate."
    if settings.get("temperature") == 0:
        return "The answers are greedy, and each was compared with that of plain generate."
    num_prompts = len({(task, prompt) for task, prompt, _ in file.checked})
    return (
        f"{num_prompts} prompts were also answered greedily, with at most {CHECK_TOKENS} tokens, and the answers compared with "
        "those of plain generate."
    )


def without_nan(value: Any) -> Any:
    """`value` with `None` for every number that JSON cannot hold."""
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
