"""Sequential Temperature Scaling (paper section 3.3): calibrates the survival probability of each prefix of a draft.

From left to right, each slot gets the temperature with which the survival of the prefix ending there agrees best with
what was accepted, while the temperatures of earlier slots stay fixed. Dividing logits by a positive number keeps the order
of the confidences of a slot: the ranking by the head does not change, only how confident it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from .reliability import NUM_BINS, Reliability, clamped, expected_calibration_error, measure_reliability
from .survival import calibrated_confidence, prefix_survival

# Temperatures to try: 1/10 to 10 in steps of 2.3 %, including 1.
TEMPERATURE_GRID = tuple(10.0 ** (step / 100) for step in range(-100, 101))
# Twenty bins of ten rounds. With fewer rounds, the ECE is mostly noise, and so is the temperature that minimises it.
MIN_ROUNDS = 200
MIN_OUTCOMES = 10  # Accepted drafts that a slot needs, and rejected ones: the rarer outcome limits the fit.


class ConfidenceRounds(NamedTuple):
    """
    Confidences and outcomes of real rounds.

    Args:
        confidence_logits: Before any temperature, float32 `[N, G]`. Slots from `counts` on are not used.
        accepted_prefix: Whether the draft of the slot and all before it were accepted, bool `[N, G]`.
        counts: How many leading slots of each round have a known outcome: drafts sent to the target, up to the end of
            the output, `[N]`.
    """

    confidence_logits: torch.Tensor
    accepted_prefix: torch.Tensor
    counts: torch.Tensor

    @classmethod
    def from_records(
        cls, records: Iterable[Any], num_slots: int, temperatures: Sequence[float] | None = None
    ) -> ConfidenceRounds:
        """
        From recorded rounds.

        Slots that were not sent to the target are left out, even if an earlier rejection determines their outcome:
        including them for rejected rounds only would be biased. Rounds that verified all drafts are the most informative.

        Args:
            records: Objects with `confidence` (probabilities of the slots), `verified` and `accepted` (counts of drafts),
                such as the rounds of `SpeculationStats`.
            num_slots: `G`.
            temperatures: The temperatures in use when the confidences were recorded; all 1 by default.
        """
        rounds = [record for record in records if len(record.confidence)]
        confidence = torch.full((len(rounds), num_slots), 0.5)
        for row, record in zip(confidence, rounds, strict=True):
            row[: len(record.confidence)] = torch.tensor(record.confidence[:num_slots])
        scale = torch.ones(num_slots) if temperatures is None else torch.tensor(temperatures)
        accepted = torch.tensor([record.accepted for record in rounds], dtype=torch.long)
        counts = [min(record.verified, len(record.confidence), num_slots) for record in rounds]
        # Float32 rounds confidences close to 1 to exactly 1, whose logit would be infinite.
        return cls(
            torch.logit(confidence, eps=2**-24) * scale,
            accepted[:, None] > torch.arange(num_slots),
            torch.tensor(counts, dtype=torch.long),
        )


@dataclass(frozen=True)
class Calibration:
    """
    Fitted temperatures and their effect.

    ```python
    >>> drafter.config.confidence_temperatures = calibration.temperatures  # doctest: +SKIP
    >>> drafter.save_pretrained("drafter")  # doctest: +SKIP
    ```

    Args:
        temperatures: `T_k` of each slot.
        notes: A remark on a slot's temperature, if there is one; otherwise `""`.
        before, after: Reliability of the survival at each slot, without and with the temperatures.
    """

    temperatures: list[float]
    notes: list[str]
    before: list[Reliability]
    after: list[Reliability]

    def __str__(self) -> str:
        lines = [
            "slot  rounds      T     ECE before/after  AUC before/after  Brier before/after  predicted before/after  observed"
        ]
        for slot, (t, b, a) in enumerate(zip(self.temperatures, self.before, self.after, strict=True)):
            lines.append(
                f"{slot + 1:4} {b.weight:7} {t:6.3f}      {b.ece:.4f}, {a.ece:.4f}        {b.auc:.3f}, {a.auc:.3f}"
                f"        {b.brier:.4f}, {a.brier:.4f}    {b.predicted:.3f}, {a.predicted:.3f}        {b.observed:.3f}"
            )
        lines += [f"slot {slot + 1}: {note}" for slot, note in enumerate(self.notes) if note]
        return "\n".join(lines)


def fit_temperatures(
    rounds: ConfidenceRounds,
    *,
    grid: Sequence[float] = TEMPERATURE_GRID,
    min_rounds: int = MIN_ROUNDS,
    num_bins: int = NUM_BINS,
) -> Calibration:
    """
    Sequential Temperature Scaling.

    Args:
        rounds: Held-out rounds.
        grid: Temperatures to try.
        min_rounds: A slot with outcomes in fewer rounds than this keeps `T = 1`, and its note says so. The same holds for a
            slot whose drafts were accepted, or rejected, fewer than ten times (or `min_rounds` times, if that is less).
        num_bins: Bins of the ECE.

    Raises:
        ValueError: when the shapes of `rounds` disagree, or the grid has a temperature that is not positive.
    """
    _check(rounds, grid)
    num_slots = rounds.confidence_logits.shape[1]
    temperatures: list[float] = []
    notes: list[str] = []
    survival = np.ones(len(rounds.counts))  # of the prefix before the slot, [N]
    for slot in range(num_slots):
        known = (rounds.counts > slot).numpy()
        logits = rounds.confidence_logits[:, slot]
        outcome = rounds.accepted_prefix[:, slot].numpy()[known]
        temperature, note = _fit_slot(
            survival[known], logits[torch.from_numpy(known)], outcome, grid, min_rounds, num_bins
        )
        survival = survival * _confidence(logits, temperature)
        temperatures.append(temperature)
        notes.append(note)
    return Calibration(
        temperatures,
        notes,
        before=measure_calibration(rounds, num_bins=num_bins),
        after=measure_calibration(rounds, temperatures, num_bins=num_bins),
    )


def measure_calibration(
    rounds: ConfidenceRounds, temperatures: Sequence[float] | None = None, num_bins: int = NUM_BINS
) -> list[Reliability]:
    """
    Reliability of the survival at each slot, `[G]`.

    Args:
        rounds: `N` rounds of `G` slots.
        temperatures: `T_k` of each slot; all 1 by default.
        num_bins: Bins of the ECE.
    """
    survival = prefix_survival(calibrated_confidence(rounds.confidence_logits, temperatures)).numpy()
    accepted, counts = rounds.accepted_prefix.numpy(), rounds.counts.numpy()
    return [
        measure_reliability(survival[counts > slot, slot], accepted[counts > slot, slot], num_bins)
        for slot in range(survival.shape[1])
    ]


def weighted_mean(reliabilities: Sequence[Reliability], name: str) -> float:
    """
    The mean of a figure over all slots, weighted by how often each was observed; slots where it is NaN do not count.

    Args:
        reliabilities: One per slot.
        name: `"ece"`, `"auc"`, `"brier"`, `"predicted"` or `"observed"`.
    """
    pairs = [(r.weight, vars(r)[name]) for r in reliabilities]
    pairs = [(weight, value) for weight, value in pairs if not np.isnan(value)]
    total = sum(weight for weight, _ in pairs)
    return sum(weight * value for weight, value in pairs) / total if total else float("nan")


# ---------------------------------------------------------------------- one slot


def _fit_slot(
    survival_before: np.ndarray,
    logits: torch.Tensor,
    outcome: np.ndarray,
    grid: Sequence[float],
    min_rounds: int,
    num_bins: int,
) -> tuple[float, str]:
    """The best temperature of one slot and its note, from the `[N]` rounds that reached it."""
    if len(outcome) < min_rounds:
        return 1.0, f"T = 1: seen in {len(outcome)} rounds, {min_rounds} are needed."
    passed = int(outcome.sum())
    if min(passed, len(outcome) - passed) < min(MIN_OUTCOMES, min_rounds):
        return 1.0, f"T = 1: {passed} of {len(outcome)} drafts passed, too few of one outcome to fit anything to."
    errors = [_error(survival_before, logits, outcome, temperature, num_bins) for temperature in grid]
    # If several are equally good, the one nearest to 1.
    best = min(range(len(grid)), key=lambda i: (errors[i], abs(np.log(grid[i]))))
    at_the_end = len(grid) > 1 and grid[best] in (min(grid), max(grid))
    return float(grid[best]), "T is at the end of the grid: a value outside may fit better." if at_the_end else ""


def _error(
    survival_before: np.ndarray, logits: torch.Tensor, outcome: np.ndarray, temperature: float, num_bins: int
) -> float:
    predicted = clamped(survival_before * _confidence(logits, temperature))
    return expected_calibration_error(predicted, outcome.astype(np.float64), num_bins)


def _confidence(logits: torch.Tensor, temperature: float) -> np.ndarray:
    return calibrated_confidence(logits[:, None], [temperature])[:, 0].double().numpy()


def _check(rounds: ConfidenceRounds, grid: Sequence[float]) -> None:
    shape = tuple(rounds.confidence_logits.shape)
    if len(shape) != 2 or tuple(rounds.accepted_prefix.shape) != shape or tuple(rounds.counts.shape) != shape[:1]:
        raise ValueError(
            f"confidence_logits {list(shape)}, accepted_prefix {list(rounds.accepted_prefix.shape)} and counts "
            f"{list(rounds.counts.shape)} must be [rounds, slots], the same, and [rounds]."
        )
    if not grid or min(grid) <= 0:
        raise ValueError(f"Temperatures must be positive, got a grid of {len(grid)} from {min(grid, default=None)}.")
