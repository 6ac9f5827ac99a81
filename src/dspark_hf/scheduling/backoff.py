"""When drafting does not pay, it is left out for a while: low acceptance must not cost.

The verify schedulers decide after a round has been drafted, so its drafting cost is spent whatever they say. This
decides before, from earlier rounds only, which keeps the output distribution exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DraftingBackoff:
    """
    Skips drafting while it loses time, and tries again ever more rarely.

    It keeps an account in units of one plain pass of the target. A drafted round earns the tokens it brings beyond the one
    of a plain round, and costs the time it takes beyond a plain round. When the account is empty, drafting pauses; after
    a pause it gets half the first credit to prove itself, and if that is lost the next pause is twice as long. So a hopeless
    drafter costs `patience`, and half of that for each doubling of the number of tokens. What a good one
    has earned carries it over bad stretches.

    ```python
    >>> backoff = DraftingBackoff(break_even=0.6, patience=1.0)
    >>> for _ in range(2):
    ...     backoff.observe(num_accepted=0, num_drafted=7)
    >>> backoff.should_draft()
    False

    ```

    Args:
        break_even: Accepted drafts that pay for a drafted round: its time over that of a plain round, minus 1.
        patience: What the account holds at the start, in plain passes.
        savings: The most it holds.
        first_pause, longest_pause: Rounds without drafting. The next pause is a first one again once the account is back
            where it started.

    Raises:
        ValueError: for settings that make no sense.
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
        """Whether the coming round should be drafted."""
        return self._rounds_to_skip == 0

    def observe(self, num_accepted: float, num_drafted: int, cost: float | None = None) -> None:
        """
        Takes in one round; to be called after each, drafted or not.

        Args:
            num_accepted: Drafts that passed; for a batch that drafts together, the mean of its rows.
            num_drafted: Drafts made; 0 for a round without drafting.
            cost: Time of the round beyond that of a plain one, in plain passes; `break_even` by default. Clock readings are
                allowed here, but with them two runs of one seed may draft in different rounds.
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
    """What [`RowsBackoff`] asks of a [`ThroughputCurve`]."""

    def round_cost(self, num_rows: int, num_drafts: int) -> float:
        """Time of a round beyond that of a plain one, in plain passes, when `num_rows` rows send `num_drafts` in all."""

    def pass_cost(self, num_rows: int, num_drafts: int) -> float:
        """The same without the time of drafting."""


class RowsBackoff:
    """
    Back-off for rows that are decoded together.

    Drafting costs the same however many rows use it, so one account over all rows decides whether there is any in a round.
    Its mean acceptance is known the sooner the more rows there are, and so it is the less patient. An account for each
    row, of its own drafts and their share of the target's pass, decides whether the row sends any.

    Args:
        costs: Such as a [`ThroughputCurve`].
        num_rows: Rows at the start.
    """

    def __init__(self, costs: RoundCosts, num_rows: int):
        self._costs = costs
        self._together = DraftingBackoff(patience=2.0 / num_rows**0.5)
        # With one row, the account over all is its own.
        self._rows = [DraftingBackoff() for _ in range(num_rows)] if num_rows > 1 else []

    def wants_drafts(self, rows: Sequence[int]) -> list[bool]:
        """Which of these rows should draft in the coming round, `[R]`; none is a round without drafting."""
        if not self._together.should_draft():
            return [False] * len(rows)
        return [not self._rows or self._rows[row].should_draft() for row in rows]

    def observe(self, rows: Sequence[int], num_verified: Sequence[int], num_accepted: Sequence[int]) -> None:
        """
        Takes in one round; to be called after each, drafted or not.

        Args:
            rows: The rows decoded in it, `[R]`.
            num_verified, num_accepted: Drafts that each sent to the target, and of those the ones that passed, `[R]`.
        """
        wanted, total = self.wants_drafts(rows), sum(num_verified)
        if any(wanted):
            cost = self._costs.round_cost(len(rows), total)
            self._together.observe(sum(num_accepted) / len(rows), 1, cost)
        else:
            self._together.observe(0, 0)
        if not self._rows:
            return
        draft_cost = self._costs.pass_cost(len(rows), total) * len(rows) / max(total, 1)
        for row, drafted, verified, accepted in zip(rows, wanted, num_verified, num_accepted, strict=True):
            self._rows[row].observe(accepted, int(drafted), verified * draft_cost)


class NoBackoff:
    """Every row drafts in every round."""

    def wants_drafts(self, rows: Sequence[int]) -> list[bool]:
        return [True] * len(rows)

    def observe(self, rows: Sequence[int], num_verified: Sequence[int], num_accepted: Sequence[int]) -> None:
        """Nothing to learn."""
