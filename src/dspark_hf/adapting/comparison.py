"""A drafter before and after, along the same answers of the target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..drafter import Drafter
from ..evaluation.replay import Replay, replay
from ..evaluation.statistics import Estimate, bootstrap, ratio_of_sums
from ..training.features import target_features
from ..training.target_logits import logit_rule
from ..transformers_names import compute_device

TOLERATED_LOSS = 0.02  # On general prompts.


@dataclass(frozen=True)
class Change:
    """
    What a drafter gained on one set of answers.

    Args:
        answers: Number of answers.
        before, after: Tokens per target pass, the bonus token included.
        gain: After over before, less 1; answers are resampled in pairs.
    """

    answers: int
    before: Estimate
    after: Estimate
    gain: Estimate

    def __str__(self) -> str:
        return (
            f"{self.before.value:.2f} to {self.after.value:.2f} tokens per target pass, {100 * self.gain.value:+.1f} % "
            f"({100 * self.gain.low:+.1f} to {100 * self.gain.high:+.1f})"
        )


@torch.no_grad()
def compare(
    before: Drafter,
    after: Drafter,
    target: PreTrainedModel,
    answers: Sequence[dict[str, torch.Tensor]],
    temperature: float = 0.0,
    seed: int = 0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Change:
    """
    Replays two drafters along answers of the target (see `dspark_hf.evaluation.replay`).

    Args:
        before, after: Drafters of the target that tap the same layers.
        target: The target.
        answers: Rows with `input_ids` and `loss_mask` of one answer each; at least two.
        temperature: The temperature that the answers were sampled with; 0 for the drafts that are most likely.
        seed: Seed of the intervals.
        on_progress: Called with the number of finished answers and their total.
    """
    rule = logit_rule(target)
    found: list[tuple[Replay, Replay]] = []
    for done, row in enumerate(answers, start=1):
        ids = torch.as_tensor(row["input_ids"], device=compute_device(target)).long()[None]
        features = target_features(target, before.config.hidden_state_indices, ids)
        pair = [replay(drafter, target, row, temperature, features, rule) for drafter in (before, after)]
        if pair[0].tokens:
            found.append((pair[0], pair[1]))
        on_progress(done, len(answers))
    tokens = np.array([old.tokens for old, _ in found], dtype=np.float64)
    old, new = (np.array([pair[side].rounds for pair in found], dtype=np.float64) for side in (0, 1))
    return Change(
        len(found), ratio_of_sums(tokens, old, seed=seed), ratio_of_sums(tokens, new, seed=seed), _gain(old, new, seed)
    )


def _gain(old: np.ndarray, new: np.ndarray, seed: int) -> Estimate:
    """Rounds before over rounds after, less 1: the tokens are the same."""

    def statistic(before: np.ndarray, after: np.ndarray, axis: int = -1) -> Any:
        return before.sum(axis) / after.sum(axis) - 1

    return bootstrap((old, new), statistic, seed)


def verdict(prompts: Change, general: Change | None, folder: str) -> str:
    """What was gained, and whether to use the adapted drafter, in one line."""
    text = f"On your prompts: {prompts}."
    if general is not None:
        text += f" On general prompts: {general}."
    if not prompts.gain.low > 0:
        return (
            f"{text} A gain could not be shown: keep the drafter that you have, or give more prompts or more minutes."
        )
    if general is not None and general.gain.high < -TOLERATED_LOSS:
        return f"{text} Use {folder} for prompts like yours only: it has become worse for others."
    return f"{text} Use {folder}."


def comparison_figure(changes: dict[str, Change]) -> Any:
    """
    Tokens per target pass before and after, with 95 % intervals.

    Raises:
        ImportError: without matplotlib.
    """
    from ..evaluation.figures import new_figure

    figure = new_figure(4.8, 3.2)
    axes = figure.add_subplot()
    for offset, (label, side) in ((-0.2, ("before", "before")), (0.2, ("after", "after"))):
        estimates = [vars(change)[side] for change in changes.values()]
        heights = [estimate.value for estimate in estimates]
        errors = [[e.value - e.low for e in estimates], [e.high - e.value for e in estimates]]
        axes.bar([place + offset for place in range(len(changes))], heights, 0.38, yerr=errors, capsize=3, label=label)
    axes.set_xticks(range(len(changes)), list(changes))
    axes.set_ylabel("tokens per target pass")
    axes.legend()
    return figure
