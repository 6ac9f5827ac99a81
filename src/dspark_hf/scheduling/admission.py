"""Which drafts of which rows go to the target: the search of paper section 4 (Algorithm 1), as pure functions.

A candidate is a draft `(row, slot)`; its worth is its survival, the probability that it and all before it in its row
pass. Survival never rises along a row, so the best `n` candidates are always whole prefixes, and all there is to decide
is `n`. Every function works on all rows at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Ranking(NamedTuple):
    """
    Candidates, best first.

    Args:
        rows: The row of each, `[M]`.
        survival: Its survival, above 0 and never rising, `[M]`.
    """

    rows: np.ndarray
    survival: np.ndarray


def rank_candidates(confidence: np.ndarray, max_lengths: np.ndarray) -> Ranking:
    """
    Sorts the drafts by survival; equal ones by row, then by slot.

    Args:
        confidence: `c_k` of each draft, float64 `[R, G]`.
        max_lengths: Leading drafts of each row that may be used at all, `[R]`.

    Returns:
        The candidates whose survival is above 0 (NaN is not).
    """
    survival = confidence.cumprod(axis=1)  # [R, G]
    usable = (survival > 0) & (np.arange(confidence.shape[1]) < max_lengths[:, None])
    values, rows = survival[usable], usable.nonzero()[0]  # both by row, then by slot
    return Ranking(*_descending(values, rows))


def _descending(values: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and values by falling value; equal ones stay in the order they had."""
    order = (-values).argsort()
    ranked = values[order]
    # A stable sort takes four times as long and matters for ties alone. There it does: without it, a slot of survival equal
    # to its predecessor's (confidence 1) could be admitted in front of it.
    if (ranked[1:] == ranked[:-1]).any():
        order = (-values).argsort(kind="stable")
        ranked = values[order]
    return rows[order], ranked


def throughputs(ranking: Ranking, num_rows: int, steps_per_second: np.ndarray) -> np.ndarray:
    """
    Tokens a second, expected, if the best `n` candidates are verified: `Theta_n = tau_n * SPS(R + n)`.

    Args:
        ranking: `M` candidates.
        num_rows: `R`. Each row sends its anchor and gets one token of the target's own, whatever is accepted.
        steps_per_second: `SPS(B)` at index `B`, at least `R + M + 1` entries.

    Returns:
        `[M + 1]` for `n = 0 .. M`.
    """
    # numpy adds from left to right, so an entry does not depend, not even in its last bit, on what ranks below it.
    committed = np.concatenate(([float(num_rows)], ranking.survival)).cumsum()
    return committed * steps_per_second[num_rows : num_rows + len(committed)]


def count_until_no_gain(throughput: np.ndarray) -> int:
    """
    Candidates in front of the first that does not raise the throughput: the early stop of Algorithm 1.

    Stopping there keeps the output distribution exact. Whether a draft is verified may only depend on what ranks above
    it: what ranks below may depend on the drafted token, and looking at it would favour some tokens (appendix A).
    """
    no_gain = np.flatnonzero(throughput[1:] <= throughput[:-1])
    return int(no_gain[0]) if len(no_gain) else len(throughput) - 1


def count_of_best(throughput: np.ndarray) -> int:
    """
    The number of candidates with the highest throughput of all; the smallest one among equals.

    For candidates whose tokens are already final only: on those of the round at hand this search is NOT lossless.
    """
    return int(throughput.argmax())


def admitted_lengths(ranking: Ranking, count: int, num_rows: int) -> list[int]:
    """How many drafts each row sends when the best `count` candidates are admitted, `[R]`."""
    return np.bincount(ranking.rows[:count], minlength=num_rows).tolist()
