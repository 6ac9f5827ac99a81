"""
Speed under load: batches of rising size decoded plainly and with each schedule (the shape of the paper's Figures 7 and 8).

Every row of a batch decodes the same number of tokens; the pass over the prompts does not count. Within a repeat the methods
take turns, in an order that changes from repeat to repeat. Measurements are written as they are made, so an interrupted run
resumes. `serving_report.py` turns them into tables and figures; `dspark-hf serve-bench` runs both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..drafter import Drafter
from ..generation.telemetry import record_speculation
from ..scheduling import (
    AsyncThroughputScheduler,
    ConfidenceThreshold,
    FixedLength,
    ThroughputCurve,
    ThroughputScheduler,
)
from ..storage.json_lines import ResumableLines
from ..transformers_names import GenerativeModel, compute_device
from .costs import measure_costs
from .meter import measured
from .methods import Method, plain_method
from .runner import rotated

FIXED, THROUGHPUT, ASYNC = "fixed block", "throughput", "async throughput"
# Tokens per pass that a new cost curve is measured at, as far as the largest batch needs them.
TOKEN_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Load:
    """
    One batch decoded by one method.

    Args:
        batch: Number of rows.
        method: Name of the method.
        repeat: Which measurement of this batch and method this is, from 0.
        seconds: Time of decoding, without the pass over the prompts.
        tokens: Tokens decoded in that time, in all rows together.
        passes: Passes of the target.
        verify_length: Drafts sent to the target per row and round; 0 without drafts.
        acceptance_rate: The accepted share of those drafts; `None` without drafts.
        drafted_share: Share of the rounds of all rows in which drafts were made; 0 for plain decoding.
    """

    batch: int
    method: str
    repeat: int
    seconds: float
    tokens: int
    passes: int
    verify_length: float = 0.0
    acceptance_rate: float | None = None
    drafted_share: float = 0.0

    @property
    def key(self) -> tuple[int, str, int]:
        return self.batch, self.method, self.repeat


class LoadFile:
    """The measurements of a run on the disk, from which an interrupted run resumes; arguments as for `RecordFile`."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._lines = ResumableLines(path, settings, kinds=("batch",))
        found = [Load(**line) for line in self._lines.written]
        self.loads = {load.key: load for load in found}

    def close(self) -> None:
        self._lines.close()

    def add(self, load: Load) -> None:
        """Keeps a finished measurement."""
        self.loads[load.key] = load
        self._lines.append(asdict(load))


def serving_methods(drafter: Drafter, curve: ThroughputCurve, threshold: float = 0.5) -> list[Method]:
    """
    Plain batched `generate`, whole blocks, a static threshold, and both throughput schedulers with back-off.

    Args:
        drafter: The drafter; without a confidence head only the first two methods apply.
        curve: The cost of rounds.
        threshold: Confidence below which the static schedule stops.
    """
    static = {"assistant_model": drafter, "drafting_backoff": False}
    methods = [plain_method(), Method(FIXED, static | {"verify_scheduler": FixedLength()}, drafter)]
    if drafter.config.gives_confidence:
        by_threshold = static | {"verify_scheduler": ConfidenceThreshold(threshold)}
        methods.append(Method(f"threshold {threshold:g}", by_threshold, drafter))
        for name, scheduler in ((THROUGHPUT, ThroughputScheduler(curve)), (ASYNC, AsyncThroughputScheduler(curve))):
            by_cost = {"assistant_model": drafter, "verify_scheduler": scheduler, "drafting_backoff": True}
            methods.append(Method(name, by_cost, drafter))
    return methods


def run_serving(
    target: GenerativeModel,
    prompt_ids: Sequence[torch.Tensor],
    methods: list[Method],
    batches: Sequence[int],
    file: LoadFile,
    *,
    num_new_tokens: int = 128,
    num_repeats: int = 3,
    temperature: float = 0.0,
    on_load: Callable[[Load, int, int], None] = lambda load, done, total: None,
) -> None:
    """
    Makes the measurements that `file` does not contain yet.

    Args:
        target: The target.
        prompt_ids: Prompts, `[1, L]` each; batches take them in turn.
        methods: The methods, as [`serving_methods`] makes them.
        batches: Numbers of rows decoded together.
        file: The file of measurements.
        num_new_tokens: New tokens of each row.
        num_repeats: Measurements of each batch and method.
        temperature: 0 decodes greedily.
        on_load: Called after each measurement, with how many there are and their total.
    """
    total = len(batches) * len(methods) * num_repeats
    for batch in batches:
        inputs = batch_of(prompt_ids, batch, compute_device(target))
        wanted = [key for method in methods for key in [(batch, method.name, r) for r in range(num_repeats)]]
        if all(key in file.loads for key in wanted):
            continue
        for method in methods:  # Warm-up: kernels are chosen and buffers grow.
            measure_load(target, inputs, method, min(8, num_new_tokens), temperature, 0)
        for repeat in range(num_repeats):
            for method in rotated(methods, repeat):
                if (batch, method.name, repeat) not in file.loads:
                    file.add(measure_load(target, inputs, method, num_new_tokens, temperature, repeat))
                    on_load(file.loads[batch, method.name, repeat], len(file.loads), total)


@torch.no_grad()
def measure_load(
    target: GenerativeModel,
    inputs: dict[str, torch.Tensor],
    method: Method,
    num_new_tokens: int,
    temperature: float,
    repeat: int,
) -> Load:
    """One batch decoded by one method, every row to its full length."""
    torch.manual_seed(repeat)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    settings = {"max_new_tokens": num_new_tokens, "eos_token_id": None, "pad_token_id": 0} | sampling
    with record_speculation() as stats, measured(target) as meter:
        target.generate(**inputs, **settings, **method.arguments)
    batch, rounds = len(inputs["input_ids"]), stats.rounds
    verified = sum(r.verified for r in rounds)
    return Load(
        batch,
        method.name,
        repeat,
        meter.seconds - meter.prefill_s,
        batch * (num_new_tokens - 1),  # The first token of each row comes from the pass over the prompts.
        len(meter.passes),
        verified / len(rounds) if rounds else 0.0,
        stats.acceptance_rate if verified else None,
        sum(not r.skipped for r in rounds) / len(rounds) if rounds else 0.0,
    )


def batch_of(prompt_ids: Sequence[torch.Tensor], num_rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`num_rows` prompts in turn, padded on the left."""
    rows = [prompt_ids[row % len(prompt_ids)][0] for row in range(num_rows)]
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def serving_curve(
    path: Path,
    target: GenerativeModel,
    drafter: Drafter,
    batches: Sequence[int],
    context_length: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ThroughputCurve:
    """
    The cost curve that an earlier run left at `path`, or a new one, written there.

    Args:
        path: The JSON file of the curve.
        target, drafter: In evaluation mode.
        batches: Numbers of rows decoded together; a new curve reaches to whole blocks of the largest batch.
        context_length: Tokens of each row in the cache while the curve is measured.
        on_progress: Called with the measurements done and their total.
    """
    if path.exists():
        return ThroughputCurve.load(path, target)
    most = max(batches) * (drafter.config.num_draft_tokens + 1)
    counts = [count for count in TOKEN_COUNTS if count <= most]
    curve = measure_costs(
        target, drafter, counts, batches, context_length=context_length, num_repeats=11, on_progress=on_progress
    )
    curve.save(path)
    return curve
