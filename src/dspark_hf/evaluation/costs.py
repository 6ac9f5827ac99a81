"""Costs of rounds on this machine: target passes by number of tokens, and drafting by number of rows."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel

from ..drafter import Drafter
from ..generation.draft_settings import curve_of
from ..generation.generators import generator_of
from ..scheduling import ThroughputCurve
from ..scheduling.throughput_curve import DEFAULT_TOKEN_COUNTS
from ..tapping import Tap
from ..transformers_names import compute_device
from .meter import synchronize

DEFAULT_ROW_COUNTS = (1, 2, 4, 8, 16, 32)
_COMMITTED = 2  # Tokens of each row whose features are projected after a round.


def measure_costs(
    target: PreTrainedModel,
    drafter: Drafter | None = None,
    token_counts: Sequence[int] = DEFAULT_TOKEN_COUNTS,
    row_counts: Sequence[int] = DEFAULT_ROW_COUNTS,
    *,
    context_length: int = 512,
    num_repeats: int = 15,
    compile: bool = False,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ThroughputCurve:
    """
    The target's throughput curve, with the extra cost of several rows and, if a drafter is given, the time of drafting.

    Args:
        target, drafter: In evaluation mode, on their device.
        token_counts: Tokens per pass of the target.
        row_counts: Numbers of rows decoded together.
        context_length: Tokens of each row in the cache.
        num_repeats: Measurements of each point, of which the median counts; warm-up is added.
        compile: Whether to compile the target. The drafter is used as it is, so compile it beforehand if wanted.
        on_progress: Called with the measurements done and their total.
    """
    forward_kwargs: dict[str, Any] = {}
    if drafter is not None:
        drafter.bind(target)
        forward_kwargs["output_hidden_states"] = Tap(target, drafter.config.hidden_state_indices).argument
    num_warmup = 3
    num_passes = len(set(token_counts)) * (num_warmup + num_repeats)
    total = num_passes + len(set(row_counts)) * num_repeats
    curve = ThroughputCurve.measure(
        target,
        token_counts,
        context_length=context_length,
        compile=compile,
        num_warmup=num_warmup,
        num_repeats=num_repeats,
        forward_kwargs=forward_kwargs,
        on_pass=lambda done: on_progress(done, total),
    )
    for place, num_rows in enumerate(sorted(set(row_counts))):
        spread = ThroughputCurve.measure(
            target,
            [num_rows],
            context_length=context_length,
            num_rows=num_rows,
            num_warmup=1,
            num_repeats=num_repeats,
            forward_kwargs=forward_kwargs,
        )
        curve.rows[num_rows] = max(0.0, float(spread.measured_s[0] - curve.seconds(num_rows))) if num_rows > 1 else 0.0
        if drafter is not None:
            curve.drafting[num_rows] = drafting_seconds(target, drafter, num_rows, context_length, num_repeats)
        on_progress(num_passes + (place + 1) * num_repeats, total)
    return curve


def curve_here(target: PreTrainedModel, drafter: Drafter) -> ThroughputCurve:
    """The drafter's curve, if it was measured on this target and machine; otherwise a new one."""
    known = curve_of(drafter, target)
    if known is not None:
        return known
    counts = range(1, drafter.config.num_draft_tokens + 2)
    return measure_costs(target, drafter, counts, (1,), context_length=256, num_repeats=9)


@torch.no_grad()
def drafting_seconds(
    target: PreTrainedModel, drafter: Drafter, num_rows: int, context_length: int = 512, num_repeats: int = 15
) -> float:
    """
    Median seconds of drafting whole greedy blocks for `num_rows` rows and of projecting the features of committed tokens.

    Args:
        target, drafter: In evaluation mode.
        num_rows: Rows drafted for together.
        context_length: Context tokens of each row.
        num_repeats: Rounds measured, after two for warm-up.
    """
    processors = [LogitsProcessorList()] * num_rows
    generator = generator_of(drafter)(drafter, target, processors, want_confidence=True)
    width = drafter.config.target_hidden_size * drafter.config.num_taps
    features = torch.randn(num_rows, context_length, width, dtype=target.dtype, device=compute_device(target))
    ids = [
        torch.randint(drafter.config.vocab_size, (1, context_length + 1), device=compute_device(target))
        for _ in range(num_rows)
    ]
    generator.context.add_prompt(features, None)
    times = []
    for _ in range(2 + num_repeats):
        synchronize(compute_device(target))
        started = time.perf_counter()
        generator.draft(ids, [drafter.config.num_draft_tokens] * num_rows)
        generator.context.add(list(features[:, :_COMMITTED]), [_COMMITTED] * num_rows)
        synchronize(compute_device(target))
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])
