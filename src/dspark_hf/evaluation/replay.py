"""Acceptance without decoding: computes from a given answer of the target how many drafts would have been accepted.

The target's answer does not depend on the drafter, so one answer serves all drafters. With the answer `y` known, draft `j` of
a block is accepted, given that all before it were, with probability

- greedily: 1 or 0, whether the drafter's most likely token is `y_j`;
- sampling: `min(1, q(y_j) / p(y_j))`, the probability that the token which came out, `y_j ~ p`, came out as the draft
  (drafted and accepted: `min(p, q)`) rather than as a correction.

All blocks of an answer go through the drafter in one pass. The expected number of rounds follows exactly, by summing over
all ways in which rounds can divide the answer: there is no noise from sampled drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ..drafter import Drafter
from ..embeddings import target_embeddings
from ..training.anchors import Anchors, anchor_candidates, draft_positions, gather_positions
from ..training.features import TargetFeatures, target_features
from ..training.losses import draft_indices
from ..training.target_logits import LogitRule, logit_rule
from ..transformers_names import compute_device


@dataclass(frozen=True)
class Replay:
    """
    The result for one answer. Counts are expected values, so they are not integers when drafts are sampled.

    Args:
        tokens: Tokens committed by rounds: all of the answer except the first, which the pass over the prompt gives.
        rounds: Rounds, that is target passes.
        tried, passed: For each slot, how often its draft was reached (all before it were accepted), and how often accepted.
    """

    tokens: int
    rounds: float
    tried: list[float]
    passed: list[float]

    @property
    def acceptance_length(self) -> float:
        """Tokens per target pass, bonus token included."""
        return self.tokens / self.rounds if self.rounds else float("nan")


def acceptance_length(replays: Iterable[Replay]) -> float:
    """Tokens per target pass over several answers."""
    replays = list(replays)
    return sum(replay.tokens for replay in replays) / sum(replay.rounds for replay in replays)


def acceptance_by_slot(replays: Iterable[Replay]) -> list[float]:
    """Acceptance at each slot, given that all before it were accepted (paper Fig. 2)."""
    slots = zip(*((replay.tried, replay.passed) for replay in replays), strict=True)
    tried, passed = (torch.tensor(values).sum(0) for values in slots)
    return (passed / tried).tolist()


@torch.no_grad()
def replay(
    drafter: Drafter,
    target: PreTrainedModel,
    row: Mapping[str, Any],
    temperature: float = 0.0,
    features: TargetFeatures | None = None,
    rule: LogitRule | None = None,
) -> Replay:
    """
    Computes the expected rounds of one answer.

    Args:
        drafter: The drafter.
        target: The target that gave the answer.
        row: `input_ids` `[T]` and `loss_mask` `[T]`, True on the answer's tokens; see `dspark_hf.conversations.rows`.
        temperature: The temperature that the answer was sampled with, without top-k or top-p; 0 for greedy answers.
        features: The target's features of the row, `[1, T, ...]`, if they are known already.
        rule: How the target turns its LM head's output into logits, `logit_rule(target)`, if it is known already.

    Raises:
        ValueError: when the answer was not sampled from the target alone (several turns with gaps are refused).
    """
    input_ids = torch.as_tensor(row["input_ids"], device=compute_device(target)).long()[None]  # [1, T]
    loss_mask = torch.as_tensor(row["loss_mask"], device=compute_device(target)).bool()[None]
    positions = anchor_candidates(loss_mask)[0].nonzero().squeeze(-1)  # [A]
    if len(positions) > 1 and bool((positions.diff() != 1).any()):
        raise ValueError(
            "The row holds several answers: make one row per answer, with only that answer's tokens in loss_mask."
        )
    num_drafts = drafter.config.num_draft_tokens
    if not len(positions):
        return Replay(0, 0.0, [0.0] * num_drafts, [0.0] * num_drafts)
    drafter.bind(target)
    features = features or target_features(target, drafter.config.hidden_state_indices, input_ids)
    anchors = Anchors(positions[None], torch.ones_like(positions, dtype=torch.bool)[None])
    logits = teacher_forced_logits(drafter, target, input_ids, features.context_features, anchors)  # [1, A, J, V_draft]
    at = draft_positions(anchors, num_drafts)  # [1, A, J]
    labels = gather_positions(input_ids, at + 1)
    states = gather_positions(features.last_hidden_states, at)
    passing = _passing(drafter, target, logits, labels, states, temperature, rule)
    inside = at + 1 <= positions[-1] + 1
    return _walk((passing * inside)[0].double().cpu())


def teacher_forced_logits(
    drafter: Drafter,
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    context_features: torch.Tensor,
    anchors: Anchors,
) -> torch.Tensor:
    """The drafter's logits `[B, A, J, V_draft]` when the tokens before each draft are those of the text."""
    embeddings = drafter.bind(target)
    output = drafter(
        **drafter.training_inputs(input_ids, torch.ones_like(input_ids), *anchors),
        context_features=context_features,
        embeddings=embeddings,
    )
    num_drafts = drafter.config.num_draft_tokens
    hidden = output.last_hidden_state.view(*anchors.positions.shape, -1, output.last_hidden_state.shape[-1])
    hidden = hidden[:, :, -num_drafts:]  # Leaves out the anchor's slot if it predicts nothing.
    previous_ids = gather_positions(input_ids, draft_positions(anchors, num_drafts))
    return drafter.draft_logits(hidden, drafter.sequential_features(previous_ids, hidden), embeddings)


def _passing(
    drafter: Drafter,
    target: PreTrainedModel,
    logits: torch.Tensor,
    labels: torch.Tensor,
    hidden_states: torch.Tensor,
    temperature: float,
    rule: LogitRule | None,
) -> torch.Tensor:
    """Probability that each draft is accepted given that all before it were, `[1, A, J]`."""
    index = draft_indices(drafter.draft_token_ids, labels)
    if not temperature:
        return logits.argmax(-1) == index
    q = (logits.float() / temperature).log_softmax(-1).gather(-1, index.clamp_min(0)[..., None])[..., 0]
    p = _label_logprobs(target, rule or logit_rule(target), labels, hidden_states, temperature)
    return (q - p).clamp(max=0).exp() * (index >= 0)


def _label_logprobs(
    target: PreTrainedModel, rule: LogitRule, labels: torch.Tensor, hidden_states: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Log-probability that the target gives each label, `[1, A, J]`."""
    # Blocks overlap, so each position is computed only once: as slot 0 of a block, or in the last block.
    head = target_embeddings(target)[1]
    first, last = (torch.cat([v[0, :, 0], v[0, -1, 1:]]) for v in (labels, hidden_states))
    logits = rule(head(last))  # [A + J - 1, V]
    logprobs = (logits / temperature).log_softmax(-1).gather(-1, first[:, None])[:, 0]
    return logprobs.unfold(0, labels.shape[2], 1)[None]


def _walk(passing: torch.Tensor) -> Replay:
    """
    Sums over all ways in which rounds can divide the answer.

    Args:
        passing: `[A, J]`; draft `j` of anchor `a` predicts token `a + 1 + j` of an answer of `A + 1` tokens.
    """
    num_anchors, num_drafts = passing.shape
    certain = passing.new_ones(num_anchors, 1)
    reached = torch.cat([certain, passing.cumprod(1)], dim=1)  # [A, J + 1]: l or more pass
    exactly = reached.clone()
    exactly[:, :-1] -= reached[:, 1:]  # [A, J + 1]: exactly l pass
    visits = torch.zeros(num_anchors + num_drafts + 1, dtype=passing.dtype)  # Probability that a round starts at a.
    visits[0] = 1
    for anchor in range(num_anchors):
        visits[anchor + 1 : anchor + num_drafts + 2] += visits[anchor] * exactly[anchor]
    visits = visits[:num_anchors]
    # A slot past the end of the answer is never reached; where it would be the answer is already complete.
    slots = torch.arange(num_drafts)
    inside = slots < (num_anchors - torch.arange(num_anchors))[:, None]
    tried = (visits[:, None] * reached[:, :-1] * inside).sum(0)
    passed = (visits[:, None] * reached[:, 1:] * inside).sum(0)
    return Replay(num_anchors, float(visits.sum()), tried.tolist(), passed.tolist())
