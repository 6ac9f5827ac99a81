"""The time of a target pass by the number of its tokens: `SPS(B)` of paper section 4, measured once on the machine in use.

A curve is only valid where it was measured, so it stores what that was: the model, its dtype and the device.
"""

from __future__ import annotations

import copy
import hashlib
import json
import platform
import statistics
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..storage.atomic import write_text
from ..transformers_names import CACHE_KEY, attention_name, compute_device, is_stateful

DEFAULT_TOKEN_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)

# A curve is refused if one of these differs from the target's. If one of those below differs, there is a warning.
MUST_AGREE = ("config_hash", "dtype", "device")
SHOULD_AGREE = ("attention", "num_threads", "versions")

# Fields of a configuration that do not affect the computation.
_NOT_COMPUTATION = ("_name_or_path", "name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype")


class ThroughputCurve:
    """
    Seconds of a target pass as a function of the tokens in it.

    Noise is removed such that a pass over more tokens is never faster: where neighbouring measurements contradict that, each
    is replaced by their mean (isotonic regression). Schedulers get the seconds as measured ([`~ThroughputCurve.table`]), because
    a pass over 12 tokens may really take longer than one over 16. Between measured numbers of tokens the seconds are interpolated
    linearly; below the smallest they are constant; above the largest they grow with the slope between the last two.

    ```python
    >>> curve = ThroughputCurve([1, 2, 4], [0.010, 0.011, 0.013])
    >>> round(float(curve.steps_per_second(3)), 1)
    83.3

    ```

    Args:
        token_counts: Tokens per pass, strictly rising, `[N]`.
        pass_s: Seconds as measured, `[N]`.
        measured_on: The model, dtype, device, ... of the measurement.
        drafting: Seconds that drafting adds to a round, by the number of rows with drafts. Without it, drafting counts as
            free.
        rows: By number of rows, the additional seconds of a pass whose tokens are spread over these rows instead of being in
        one: each row attends to a different context.

    Raises:
        ValueError: for counts that do not rise, or times that are not positive.
    """

    def __init__(
        self,
        token_counts: Sequence[int],
        pass_s: Sequence[float],
        measured_on: dict[str, Any] | None = None,
        drafting: Mapping[int, float] | None = None,
        rows: Mapping[int, float] | None = None,
    ):
        counts, seconds = np.asarray(token_counts, dtype=np.int64), np.asarray(pass_s, dtype=np.float64)
        if not len(counts) or len(counts) != len(seconds) or counts[0] < 1 or (np.diff(counts) <= 0).any():
            raise ValueError(
                f"A curve needs strictly rising numbers of tokens, from 1 up, and one time for each; got {list(token_counts)} "
                f"and {len(seconds)} times."
            )
        if not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ValueError(f"Seconds of a pass must be positive, got {list(pass_s)}.")
        self.token_counts = counts
        self.measured_s = seconds
        self.pass_s = never_falling(seconds)
        self.measured_on = measured_on or {}
        self.drafting = _by_count(drafting)
        self.rows = _by_count(rows)
        self._checked: weakref.ref[Any] | None = None  # The last target that passed `check`.
        self._tables: dict[int, np.ndarray] = {}

    @classmethod
    def assumed(cls, drafting: float, is_accelerated: bool) -> ThroughputCurve:
        """
        A guess, for when nothing was measured; the unit of time is a pass over one token.

        Args:
            drafting: Time of drafting, as in [`~ThroughputCurve.with_assumed_drafting`].
            is_accelerated: Whether the device is an accelerator, where most of a pass is spent on reading weights and more
                tokens are nearly free. On a CPU they are not.
        """
        curve = cls([1, 2], [1.0, 1.005 if is_accelerated else 1.07], {"assumed": True})
        return curve.with_assumed_drafting(drafting)

    @classmethod
    def from_steps_per_second(cls, steps_per_second: Mapping[int, float]) -> ThroughputCurve:
        """Makes a curve from passes per second by number of tokens."""
        counts = sorted(steps_per_second)
        return cls(counts, [1 / steps_per_second[count] for count in counts])

    # ------------------------------------------------------------------ reading

    def seconds(self, num_tokens: Any) -> np.ndarray:
        """Seconds of a pass over each of `num_tokens` tokens, of the same shape."""
        return self._on_curve(num_tokens, self.pass_s)

    def _on_curve(self, num_tokens: Any, pass_s: np.ndarray) -> np.ndarray:
        tokens = np.asarray(num_tokens, dtype=np.float64)
        beyond = np.maximum(tokens - self.token_counts[-1], 0)
        return np.interp(tokens, self.token_counts, pass_s) + beyond * self._last_slope()

    def steps_per_second(self, num_tokens: Any) -> np.ndarray:
        """`SPS(B)`: passes per second over each of `num_tokens` tokens, of the same shape."""
        return 1 / self.seconds(num_tokens)

    def drafting_seconds(self, num_rows: int) -> float:
        """Seconds that drafting adds to a round of `num_rows` rows: interpolated, and proportional beyond the measured rows."""
        return _interpolated(self.drafting, num_rows)

    def pass_seconds(self, num_rows: int, num_drafts: int) -> float:
        """Seconds of a pass over one token of each of `num_rows` rows and `num_drafts` drafts in all."""
        return float(self.seconds(num_rows + num_drafts)) + _interpolated(self.rows, num_rows)

    def round_cost(self, num_rows: int, num_drafts: int) -> float:
        """
        Extra time of a drafted round over a plain one, in plain passes. It is also the number of drafts per row that have to be
        accepted on average for the round to pay.

        Args:
            num_rows: Rows decoded together.
            num_drafts: Drafts that all rows together send to the target.
        """
        return self.pass_cost(num_rows, num_drafts) + self.drafting_seconds(num_rows) / self.pass_seconds(num_rows, 0)

    def pass_cost(self, num_rows: int, num_drafts: int) -> float:
        """The part of [`~ThroughputCurve.round_cost`] that is spent in the target."""
        return self.pass_seconds(num_rows, num_drafts) / self.pass_seconds(num_rows, 0) - 1

    def table(self, max_tokens: int, num_rows: int = 0) -> np.ndarray:
        """
        Rounds per second, by the number of tokens `B` in the target's pass as index, at least up to `max_tokens`. Do not modify
        the result.

        Args:
            max_tokens: The highest index needed.
            num_rows: Rows with drafts. The time of a round includes drafting for them, which is spent however many drafts are
                verified, so verifying one more is relatively cheaper. With 0 the result is `SPS(B)`.
        """
        table = self._tables.get(num_rows)
        if table is None or len(table) <= max_tokens:
            extra = self.drafting_seconds(num_rows) + _interpolated(self.rows, num_rows) if num_rows else 0.0
            # As measured: where more tokens are cheaper, schedulers fill a round up to them.
            measured = self._on_curve(np.arange(2 * max_tokens + 1), self.measured_s)
            table = self._tables[num_rows] = 1 / (measured + extra)
        return table

    def with_overhead(self, seconds: float) -> ThroughputCurve:
        """
        A curve in which each pass takes `seconds` longer, for everything else in a round (above all drafting).

        With it, a scheduler compares drafts with the time of the whole round instead of that of the target alone.
        """
        measured_on = self.measured_on | {"overhead_s": self.measured_on.get("overhead_s", 0.0) + seconds}
        return type(self)(
            self.token_counts.tolist(), (self.measured_s + seconds).tolist(), measured_on, self.drafting, self.rows
        )

    def with_assumed_drafting(self, relative_s: float) -> ThroughputCurve:
        """A curve in which drafting takes `relative_s` times as long as a pass over one token of each row."""
        drafting = {rows: relative_s * self.pass_seconds(rows, 0) for rows in (1, 1024)}
        return type(self)(self.token_counts.tolist(), self.measured_s.tolist(), self.measured_on, drafting, self.rows)

    def _last_slope(self) -> float:
        if len(self.token_counts) < 2:
            return 0.0
        return float((self.pass_s[-1] - self.pass_s[-2]) / (self.token_counts[-1] - self.token_counts[-2]))

    # ------------------------------------------------------------------ files

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the measurements to a JSON file."""
        write_text(path, json.dumps(self.to_dict(), indent=2) + "\n")

    def to_dict(self) -> dict[str, Any]:
        return {
            "token_counts": self.token_counts.tolist(),
            "pass_s": self.measured_s.tolist(),
            "drafting": {str(rows): seconds for rows, seconds in self.drafting.items()},
            "rows": {str(rows): seconds for rows, seconds in self.rows.items()},
            "measured_on": self.measured_on,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ThroughputCurve:
        """
        Raises:
            ValueError: for a dictionary that does not come from [`~ThroughputCurve.to_dict`].
        """
        try:
            measured_on = dict(fields.get("measured_on") or {})
            return cls(
                fields["token_counts"], fields["pass_s"], measured_on, fields.get("drafting"), fields.get("rows")
            )
        except (KeyError, TypeError) as error:
            raise ValueError(
                f"This is not a throughput curve ({type(error).__name__}: {error}). Measure one with `dspark-hf profile`."
            ) from error

    @classmethod
    def load(cls, path: str | PathLike[str], target: Any = None) -> ThroughputCurve:
        """
        Reads a curve.

        Args:
            path: A file from [`~ThroughputCurve.save`].
            target: If given, the curve is checked with [`~ThroughputCurve.check`].
        """
        curve = cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        if target is not None:
            curve.check(target)
        return curve

    def check(self, target: Any) -> None:
        """
        Checks that the curve was measured with this target on this machine. Warns if library versions, the number of threads
        or the attention implementation differ.

        Raises:
            ValueError: when it was measured on another model, dtype or device.
        """
        if self._checked is not None and self._checked() is target:
            return
        here = describe(target)
        wrong = _differences(self.measured_on, here, MUST_AGREE)
        if wrong:
            raise ValueError(
                f"This throughput curve was measured on {self.measured_on.get('model', 'an unnamed model')!r} and cannot be used "
                f"for {here['model']!r}: {'; '.join(wrong)}. Measure one with ThroughputCurve.measure(target)."
            )
        self._checked = weakref.ref(target)
        doubtful = _differences(self.measured_on, here, SHOULD_AGREE)
        if doubtful:
            warnings.warn(
                f"This throughput curve may be off: {'; '.join(doubtful)}. Measure it again to be sure.", stacklevel=2
            )

    # ------------------------------------------------------------------ measuring

    @classmethod
    def measure(
        cls,
        target: Any,
        token_counts: Sequence[int] = DEFAULT_TOKEN_COUNTS,
        *,
        context_length: int = 512,
        num_rows: int = 1,
        compile: bool = False,
        num_warmup: int = 3,
        num_repeats: int = 15,
        forward_kwargs: dict[str, Any] | None = None,
        on_pass: Callable[[int], None] = lambda done: None,
    ) -> ThroughputCurve:
        """
        Measures the time of the target's verification pass: new tokens after a cached context.

        The numbers of tokens are timed in turn, several times, so that a slow phase of the machine affects all of them
        equally. The result for each is the median.

        Args:
            target: A causal language model of transformers, in evaluation mode.
            token_counts: Tokens per pass, all rows together; multiples of `num_rows`.
            context_length: Tokens in the cache of each row.
            num_rows: Rows that the tokens are spread over.
            compile: Whether to time `torch.compile(target, dynamic=True)`.
            num_warmup, num_repeats: Passes for each number of tokens, before and during the measurement.
            forward_kwargs: Additional arguments of the target's `forward`, such as `output_hidden_states`.
            on_pass: Called after each pass with the number of passes so far.

        Raises:
            ValueError: for a number of tokens that the rows cannot share equally.
        """
        counts = sorted(set(token_counts))
        if not counts or any(count % num_rows or count < 1 for count in counts):
            raise ValueError(f"token_counts={list(token_counts)} must be positive multiples of num_rows={num_rows}.")
        forward = torch.compile(target, dynamic=True) if compile else target
        timer = _PassTimer(target, forward, num_rows, context_length, forward_kwargs or {})
        times: dict[int, list[float]] = {count: [] for count in counts}
        with torch.no_grad():
            for turn in range(num_warmup + num_repeats):
                for place, count in enumerate(counts):
                    elapsed = timer.time_pass(count // num_rows)
                    on_pass(turn * len(counts) + place + 1)
                    if turn >= num_warmup:
                        times[count].append(elapsed)
        measured_on = describe(target) | {
            "context_length": context_length,
            "num_rows": num_rows,
            "compiled": compile,
            "num_repeats": num_repeats,
        }
        return cls(counts, [statistics.median(times[count]) for count in counts], measured_on)


class _PassTimer:
    """Times passes of `num_tokens` tokens per row after a cached context."""

    def __init__(self, target: Any, forward: Any, num_rows: int, context_length: int, forward_kwargs: dict[str, Any]):
        self._forward = forward
        self._device = compute_device(target)
        self._num_rows = num_rows
        self._vocab_size = target.config.get_text_config(decoder=True).vocab_size
        self._kwargs = {"use_cache": True} | forward_kwargs
        with torch.no_grad():
            output = target(input_ids=self._tokens(max(context_length, 1)), **self._kwargs)
        self._cache = output[CACHE_KEY]
        # A cache may claim to be croppable and keep more than it crops, such as that of DeepSeek-V4.
        self._is_croppable = not is_stateful(target) and bool(getattr(self._cache, "is_croppable", False))
        if self._is_croppable:
            self._cache.activate_past_recording()

    def time_pass(self, num_tokens: int) -> float:
        """Seconds of one pass. The cache is restored afterwards."""
        cache = self._cache if self._is_croppable else copy.deepcopy(self._cache)
        kwargs = self._kwargs | {"input_ids": self._tokens(num_tokens), CACHE_KEY: cache}
        self._synchronize()
        started = time.perf_counter()
        self._forward(**kwargs)
        self._synchronize()
        elapsed = time.perf_counter() - started
        if self._is_croppable:
            self._cache.crop(-num_tokens)
        return elapsed

    def _tokens(self, num_tokens: int) -> torch.Tensor:
        return torch.randint(self._vocab_size, (self._num_rows, num_tokens), device=self._device)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


# ---------------------------------------------------------------------- pure parts


def _by_count(seconds: Mapping[Any, float] | None) -> dict[int, float]:
    """Sorted, with keys as integers, because JSON stores keys as text."""
    return {int(count): float(seconds[count]) for count in sorted(seconds, key=int)} if seconds else {}


def _interpolated(seconds: Mapping[int, float], count: int) -> float:
    """Linear interpolation; proportional beyond the largest count; 0 without measurements."""
    if not seconds:
        return 0.0
    return float(np.interp(count, list(seconds), list(seconds.values()))) * max(1.0, count / max(seconds))


def never_falling(values: np.ndarray) -> np.ndarray:
    """The closest never-falling sequence in the least-squares sense (isotonic regression, equal weights), `[N]`."""
    blocks: list[tuple[float, int]] = []  # mean and length of each run of equal results
    for value in values.tolist():
        mean, length = value, 1
        while blocks and blocks[-1][0] > mean:
            previous_mean, previous_length = blocks.pop()
            mean = (previous_mean * previous_length + mean * length) / (previous_length + length)
            length += previous_length
        blocks.append((mean, length))
    return np.repeat([mean for mean, _ in blocks], [length for _, length in blocks])


def describe(target: Any) -> dict[str, Any]:
    """Describes the target and the machine for which a curve measured now is valid."""
    import transformers

    device = compute_device(target)
    return {
        "model": target.config.name_or_path or type(target).__name__,
        "config_hash": config_hash(target.config),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": f"{device.type}: {_device_name(device)}",
        "attention": attention_name(target.config),
        "num_threads": torch.get_num_threads() if device.type == "cpu" else None,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def config_hash(config: Any) -> str:
    """A hash of the fields of a configuration that affect the computation, so the time of a pass."""
    fields = {name: value for name, value in config.to_dict().items() if name not in _NOT_COMPUTATION}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu" and Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _differences(there: Mapping[str, Any], here: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{n} was {there[n]!r} and is {here[n]!r}" for n in names if n in there and there[n] != here[n]]
