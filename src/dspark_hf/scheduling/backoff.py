"""Pauses drafting while it costs more time than it saves, so that low acceptance does not slow decoding down.

Verify schedulers decide after a round has been drafted, when the time for drafting is already spent. Back-off decides
before, from earlier rounds only, which keeps the output distribution exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DraftingBackoff:
    """
    Skips drafting while it loses time, and tries again after longer and longer pauses.

    It keeps an account in units of one plain pass of the target. A drafted round adds the number of accepted drafts, and
    subtracts the time it takes beyond a plain round. When the account is empty, drafting pauses. After a pause, the account
    starts with half of the initial credit; if that is lost too, the next pause is twice as long. So a drafter that never pays
    costs `patience` plain passes, plus half of that for each doubling of the number of tokens. A good drafter collects credit
    that lasts through bad stretches.

    ```python
    >>> backoff = DraftingBackoff(break_even=0.6, patience=1.0)
    >>> for _ in range(2):
    ...     backoff.observe(num_accepted=0, num_drafted=7)
    >>> backoff.should_draft()
    False

    ```

    Args:
        break_even: Accepted drafts at which a drafted round pays: its time divided by that of a plain round, minus 1.
        patience: Initial credit of the account, in plain passes.
        savings: Largest credit of the account.
        first_pause, longest_pause: Rounds without drafting. Once the account is back at its initial credit, the next pause
            is `first_pause` again.

    Raises:
        ValueError: for settings out of range; the message gives the ranges.
    """

    def __init__(
        self,
        break_even: float = 0.5,
        *,
        patience: float = 2.0,
        savings: float = 12.0,
        first_pause: int = 16,
        longest_pause: int = 512,
    ):
        if break_even < 0 or not 0 < patience <= savings or not 1 <= first_pause <= longest_pause:
            raise ValueError(
                f"break_even={break_even} must not be negative, and these must hold: 0 < patience={patience} <= "
                f"savings={savings}, 1 <= first_pause={first_pause} <= longest_pause={longest_pause}."
            )
        self.break_even = break_even
        self.patience = patience
        self.savings = savings
        self.first_pause = first_pause
        self.longest_pause = longest_pause
        self.start()

    def start(self) -> None:
        """Forgets all rounds."""
        self._account = self.patience
        self._rounds_to_skip = 0
        self._next_pause = self.first_pause

    def should_draft(self) -> bool:
        """Whether to draft in the coming round."""
        return self._rounds_to_skip == 0

    def observe(self, num_accepted: float, num_drafted: int, cost: float | None = None) -> None:
        """
        Accounts for one round. Call it after each, drafted or not.

        Args:
            num_accepted: Accepted drafts; for a batch that drafts together, the mean of its rows.
            num_drafted: Drafts made; 0 for a round without drafting.
            cost: Time of the round beyond that of a plain one, in plain passes; `break_even` by default. Measured times are
                possible, but then two runs with the same seed may draft in different rounds.
        """
        if num_drafted == 0:
            self._rounds_to_skip = max(0, self._rounds_to_skip - 1)
            return
        gain = num_accepted - (self.break_even if cost is None else cost)
        self._account = min(self.savings, self._account + gain)
        if self._account <= 0 and gain < 0:
            self._pause()
        elif self._account >= self.patience:
            self._next_pause = self.first_pause

    def _pause(self) -> None:
        self._account = self.patience / 2
        self._rounds_to_skip = self._next_pause
        self._next_pause = min(2 * self._next_pause, self.longest_pause)


class RoundCosts(Protocol):
    """The methods of a [`ThroughputCurve`] that [`RowsBackoff`] uses."""

    def round_cost(self, num_rows: int, num_drafts: int) -> float:
        """Extra time of a round over a plain one, in plain passes, when `num_rows` rows send `num_drafts` drafts in all."""

    def pass_cost(self, num_rows: int, num_drafts: int) -> float:
        """The same without the time of drafting."""


class RowsBackoff:
    """
    Back-off for rows that are decoded together.

    Drafting costs about the same however many rows use it, so one account over all rows decides whether a round drafts at all.
    With more rows, the mean acceptance is known sooner, so the initial credit of that account is smaller. One more account per
    row, with the row's drafts and their share of the target's pass, decides whether the row sends drafts.

    Args:
        costs: The cost of a round, for instance a [`ThroughputCurve`].
        num_rows: Rows at the start.
    """

    def __init__(self, costs: RoundCosts, num_rows: int):
        self._costs = costs
        self._together = DraftingBackoff(patience=2.0 / num_rows**0.5)
        # With one row, the account over all rows is enough.
        self._rows = [DraftingBackoff() for _ in range(num_rows)] if num_rows > 1 else []

    def begin_row(self, row: int) -> None:
        """Forgets a row whose place is given to another."""
        if self._rows:
            self._rows[row].start()

    def wants_drafts(self, rows: Sequence[int]) -> list[bool]:
        """Which of these rows should draft in the coming round, `[R]`. If none should, the round has no drafting."""
        if not self._together.should_draft():
            return [False] * len(rows)
        return [not self._rows or self._rows[row].should_draft() for row in rows]

    def observe(
        self,
        rows: Sequence[int],
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
        num_fed_again: Sequence[int] | None = None,
        has_drafted: bool = True,
    ) -> None:
        """
        Accounts for one round. Call it after each, drafted or not.

        Args:
            rows: The rows decoded in it, `[R]`.
            num_verified, num_accepted: Drafts that each row sent to the target, and how many were accepted, `[R]`.
            num_fed_again: Tokens that each row fed again because drafts were rejected before, `[R]`. They cost as much as drafts.
            has_drafted: Whether the drafter ran, in a round for which drafts were wanted.
        """
        again = [0] * len(rows) if num_fed_again is None else num_fed_again
        wanted, total = self.wants_drafts(rows), sum(num_verified) + sum(again)
        if any(wanted):
            cost_of = self._costs.round_cost if has_drafted else self._costs.pass_cost
            cost = cost_of(len(rows), total)
            self._together.observe(sum(num_accepted) / len(rows), 1, cost)
        else:
            self._together.observe(0, 0)
        if not self._rows:
            return
        draft_cost = self._costs.pass_cost(len(rows), total) * len(rows) / max(total, 1)
        parts = zip(rows, wanted, num_verified, num_accepted, again, strict=True)
        for row, drafted, verified, accepted, fed_again in parts:
            self._rows[row].observe(accepted, int(drafted), (verified + fed_again) * draft_cost)


class NoBackoff:
    """Every row drafts in every round."""

    def begin_row(self, row: int) -> None:
        """Does nothing."""

    def wants_drafts(self, rows: Sequence[int]) -> list[bool]:
        return [True] * len(rows)

    def observe(
        self,
        rows: Sequence[int],
        num_verified: Sequence[int],
        num_accepted: Sequence[int],
        num_fed_again: Sequence[int] | None = None,
        has_drafted: bool = True,
    ) -> None:
        """Does nothing."""
