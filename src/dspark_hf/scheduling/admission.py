"""Which drafts of which rows go to the target: the search of paper section 4 (Algorithm 1), as pure functions.

A candidate is a draft `(row, slot)`. Its value is its survival: the probability that it and all drafts before it in its row
are accepted. Survival never rises along a row, so the best `n` candidates always form prefixes of the rows, and only `n`
has to be decided. Every function works on all rows at once.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Ranking(NamedTuple):
    """
    Candidates, best first.

    Args:
        rows: The row of each candidate, `[M]`.
        survival: The survival of each candidate, above 0 and never rising, `[M]`.
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
    """Rows and values sorted by falling value; equal values keep their order."""
    order = (-values).argsort()
    ranked = values[order]
    # A stable sort takes four times as long and is only needed for equal values: without it, a slot could be admitted
    # before its predecessor when both have the same survival (confidence 1).
    if (ranked[1:] == ranked[:-1]).any():
        order = (-values).argsort(kind="stable")
        ranked = values[order]
    return rows[order], ranked


def throughputs(ranking: Ranking, num_rows: int, steps_per_second: np.ndarray) -> np.ndarray:
    """
    Expected tokens per second if the best `n` candidates are verified: `Theta_n = tau_n * SPS(R + n)`.

    Args:
        ranking: `M` candidates.
        num_rows: `R`. Each row sends its anchor and gets one token from the target, however many drafts are accepted.
        steps_per_second: `SPS(B)` at index `B`, at least `R + M + 1` entries.

    Returns:
        `[M + 1]` for `n = 0 .. M`.
    """
    # numpy's cumulative sum goes from left to right, so an entry does not depend on lower ranks, not even in its last bit.
    committed = np.concatenate(([float(num_rows)], ranking.survival)).cumsum()
    return committed * steps_per_second[num_rows : num_rows + len(committed)]


def count_until_no_gain(throughput: np.ndarray) -> int:
    """
    The number of candidates before the first one that does not raise the throughput: the early stop of Algorithm 1.

    Stopping there keeps the output distribution exact. Whether a draft is verified may only depend on candidates that rank
    above it. Those below may depend on the drafted token, so taking them into account would favour some tokens (appendix A).
    """
    no_gain = np.flatnonzero(throughput[1:] <= throughput[:-1])
    return int(no_gain[0]) if len(no_gain) else len(throughput) - 1


def count_of_best(throughput: np.ndarray) -> int:
    """
    The number of candidates with the highest throughput; the smallest such number if there are several.

    Only for candidates of past rounds, whose tokens are final. On the candidates of the current round it is NOT lossless.
    """
    return int(throughput.argmax())


def best_from(rates: np.ndarray) -> np.ndarray:
    """
    The highest rate at each index or any later one, `[N]`: what a round reaches that may be filled up to a cheaper pass.

    Args:
        rates: Rounds per second by tokens in the pass, `[N]`.
    """
    best: np.ndarray = np.maximum.accumulate(rates[::-1])[::-1]
    return best


def filled_up(count: int, num_rows: int, rates: np.ndarray, worth: float) -> int:
    """
    The number of candidates to verify instead of `count`: more, where a pass over more tokens is cheaper.

    Args:
        count: Candidates admitted.
        num_rows: `R`, whose anchors are in the pass too.
        rates: Rounds per second by tokens in the pass, `[N]`.
        worth: The part by which the time of a round has to be shorter.
    """
    later = rates[num_rows + count :]
    best = int(later.argmax())
    return count + best if later[best] * (1 - worth) > later[0] else count


def admitted_lengths(ranking: Ranking, count: int, num_rows: int) -> list[int]:
    """How many drafts each row sends when the best `count` candidates are admitted, `[R]`."""
    return np.bincount(ranking.rows[:count], minlength=num_rows).tolist()
