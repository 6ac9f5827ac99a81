"""The training loss (paper section 4): cross-entropy, total variation, and the loss of the confidence head.

    L = ce_weight * CE + tv_weight * TV + confidence_weight * CONF

`TV = ||p_d - p_t||_1` is not halved; the confidence head learns `1 - TV / 2`, the probability that a draft is accepted. Each
term is a mean over the drafts that count, weighted by their position. Numerator and denominator are summed over the whole
optimiser step, so the loss does not depend on how the batch is divided into micro-batches and ranks.

[`eager_losses`] is the definition. [`chunked_losses`] computes the same, including gradients, for a few drafts at a time,
because the logits of all drafts would take gigabytes with 512 anchors and a vocabulary of 150,000.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..drafter import Drafter
from ..embeddings import SharedEmbeddings
from .target_logits import LogitRule

NUM_BINS = 20  # Bins of the confidence, as in `dspark_hf.scheduling.measure_reliability`.
_EPSILON = 1e-6  # Added to the denominator of every mean, so that a step without counted drafts has loss 0.


@dataclass(frozen=True)
class LossWeights:
    """Weights of the terms of the loss."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0


class DraftTargets(NamedTuple):
    """
    What drafts are compared with. `N` stands for any leading axes.

    Args:
        labels (`[N]`): The true token.
        hidden_states (`[N, D]`): The target's last hidden state (after its final norm) that predicts the token.
        weights (`[N]`): Position weight; 0 where a draft does not count.
        log_normalizers (`[N]`, *optional*): Log of the target's softmax denominator over the FULL vocabulary.
        greedy_ids (`[N]`, *optional*): The target's most likely token. Together with `log_normalizers`, it makes the logits
            of tokens outside a reduced draft vocabulary unnecessary.
    """

    labels: torch.Tensor
    hidden_states: torch.Tensor
    weights: torch.Tensor
    log_normalizers: torch.Tensor | None = None
    greedy_ids: torch.Tensor | None = None

    def select(self, index: Any) -> DraftTargets:
        """The targets of some of the drafts."""
        some: list[Any] = [None if values is None else values[index] for values in self]
        return DraftTargets(*some)


class DraftLosses(NamedTuple):
    """For each draft `[N]`: cross-entropy, total variation (in [0, 2]), and whether both argmaxes agree."""

    cross_entropy: torch.Tensor
    total_variation: torch.Tensor
    agrees: torch.Tensor


class TargetDistribution(NamedTuple):
    """
    The target's distribution over the draft vocabulary.

    Args:
        probs (`[N, V_draft]`): float32; the sum is less than 1 for a reduced draft vocabulary.
        outside (`[N]`): Total probability of the other tokens.
        greedy_ids (`[N]`): The most likely token of the full vocabulary.
    """

    probs: torch.Tensor
    outside: torch.Tensor
    greedy_ids: torch.Tensor


class TargetHead:
    """
    Computes the target's distribution from its last hidden states.

    Args:
        embeddings (`SharedEmbeddings`): The target's embedding and LM head, with the drafter's draft vocabulary.
        rule (`LogitRule`): The scaling and soft cap that the target applies to its head's output.
    """

    def __init__(self, embeddings: SharedEmbeddings, rule: LogitRule = LogitRule()):  # noqa: B008 (immutable)
        self.embeddings = embeddings
        self.rule = rule
        ids = embeddings.draft_token_ids
        self.draft_token_ids = ids

    @torch.no_grad()
    def distribution(self, targets: DraftTargets) -> TargetDistribution:
        """The distributions for hidden states `[N, D]`."""
        ids = self.draft_token_ids
        if ids is None or targets.log_normalizers is None or targets.greedy_ids is None:
            logits = self.rule(self.embeddings.target_logits(targets.hidden_states))  # [N, V]
            probs, greedy_ids = logits.softmax(dim=-1), logits.argmax(dim=-1)
            if ids is None:
                return TargetDistribution(probs, probs.new_zeros(probs.shape[:-1]), greedy_ids)
            probs = probs[..., ids.to(probs.device)]
        else:
            logits = self.rule(self.embeddings.logits(targets.hidden_states))  # [N, V_draft]
            probs, greedy_ids = logits.sub_(targets.log_normalizers[..., None]).exp_(), targets.greedy_ids
        outside = (1 - probs.sum(dim=-1)).clamp_min(0)
        return TargetDistribution(probs, outside, greedy_ids)

    def draft_indices(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Indices of tokens in the draft vocabulary; -1 for other tokens."""
        return draft_indices(self.draft_token_ids, token_ids)


def draft_indices(draft_token_ids: torch.Tensor | None, token_ids: torch.Tensor) -> torch.Tensor:
    """Indices of tokens in a draft vocabulary (ascending; `None` for the full one); -1 for other tokens."""
    if draft_token_ids is None:
        return token_ids
    ids = draft_token_ids.to(token_ids.device)
    index = torch.searchsorted(ids, token_ids).clamp_max(len(ids) - 1)
    return torch.where(ids[index] == token_ids, index, -1)


# ------------------------------------------------------------------------------------------------- the two computations


def eager_losses(
    draft_logits: torch.Tensor, distribution: TargetDistribution, label_index: torch.Tensor, greedy_index: torch.Tensor
) -> DraftLosses:
    """
    The definition, for logits that fit in memory.

    Args:
        draft_logits: Base logits plus transition bias, `[N, V_draft]`.
        distribution: The target's distribution.
        label_index, greedy_index: Index in the draft vocabulary of the true token and of the target's most likely token,
            `[N]`; -1 outside it. For a true token outside, the cross-entropy is 0, because the drafter cannot predict it.
    """
    log_probs = draft_logits.float().log_softmax(dim=-1)  # [N, V_draft]
    cross_entropy = -log_probs.gather(-1, label_index.clamp_min(0)[..., None]).squeeze(-1)
    cross_entropy = cross_entropy * (label_index >= 0)
    total_variation = (log_probs.exp() - distribution.probs).abs().sum(dim=-1) + distribution.outside
    return DraftLosses(cross_entropy, total_variation, draft_logits.argmax(dim=-1) == greedy_index)


def losses_and_gradient(
    draft_logits: torch.Tensor,
    distribution: TargetDistribution,
    label_index: torch.Tensor,
    greedy_index: torch.Tensor,
    ce_weights: torch.Tensor,
    tv_weights: torch.Tensor,
) -> tuple[DraftLosses, torch.Tensor]:
    """
    [`eager_losses`] together with the gradient of `sum(ce_weights * CE + tv_weights * TV)` with respect to the logits.

    With `s = sign(p_d - p_t)`, the gradient is `ce (p_d - onehot) + tv p_d (s - <p_d, s>)`. It overwrites the logits and the
    probabilities of the distribution.
    """
    inside = label_index >= 0
    label_index = label_index.clamp_min(0)[:, None]
    agrees = draft_logits.argmax(dim=-1) == greedy_index
    draft_logits -= draft_logits.amax(dim=-1, keepdim=True)
    label_logits = draft_logits.gather(-1, label_index).squeeze(-1)
    probs = draft_logits.exp_()  # [N, V_draft]
    normalizers = probs.sum(dim=-1, keepdim=True)
    probs /= normalizers
    cross_entropy = (normalizers.squeeze(-1).log() - label_logits) * inside
    signs = torch.sub(probs, distribution.probs, out=distribution.probs)
    total_variation = torch.linalg.vector_norm(signs, 1, dim=-1) + distribution.outside
    signs.sign_()
    ce_weights = (ce_weights * inside)[:, None]
    tv_weights = tv_weights[:, None]
    mean_sign = torch.linalg.vecdot(probs, signs).unsqueeze(-1)  # <p_d, s>
    gradient = signs.mul_(tv_weights).add_(ce_weights - tv_weights * mean_sign).mul_(probs)
    gradient.scatter_add_(-1, label_index, -ce_weights)
    return DraftLosses(cross_entropy, total_variation, agrees), gradient


class _ChunkedLoss(torch.autograd.Function):
    """
    Weighted sum of CE and TV over all drafts, with its gradient computed chunk by chunk in the forward pass.

    Unlike checkpointing, this computes every chunk only once, and keeps no logits between forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_states: torch.Tensor,
        features: torch.Tensor | None,
        compute: Callable[..., tuple[torch.Tensor, DraftLosses, torch.Tensor, torch.Tensor]],
        chunk_size: int,
        learns: bool,
        *parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        inputs = [hidden_states, *([] if features is None else [features])]
        gradients = [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        input_gradients = [torch.empty_like(t) for t in inputs]
        loss = hidden_states.new_zeros((), dtype=torch.float32)
        parts = []
        for start in range(0, len(hidden_states), chunk_size):
            chunk = slice(start, start + chunk_size)
            with torch.set_grad_enabled(learns):
                leaves = [t[chunk].detach().requires_grad_(learns) for t in inputs]
                logits, losses, gradient, chunk_loss = compute(chunk, *leaves)
            loss += chunk_loss
            parts.append(losses)
            if learns:
                wanted = [*leaves, *(p for p in parameters if p.requires_grad)]
                found = iter(torch.autograd.grad(logits, wanted, gradient, allow_unused=True))
                for total in input_gradients:
                    part = next(found)
                    total[chunk] = 0 if part is None else part
                for parameter, total in zip(parameters, gradients, strict=True):
                    if parameter.requires_grad and (part := next(found)) is not None:
                        total += part
        ctx.save_for_backward(*input_gradients, *gradients)
        ctx.has_features = features is not None
        losses = DraftLosses(*(torch.cat(values) for values in zip(*parts, strict=True))) if parts else _no_losses(loss)
        ctx.mark_non_differentiable(*losses)
        return loss, *losses

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *unused: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_gradient, *others = ctx.saved_tensors
        if not ctx.has_features:
            others = [None, *others]
        scaled = [None if g is None else g * grad_loss.to(g.dtype) for g in (hidden_gradient, *others)]
        return scaled[0], scaled[1], None, None, None, *scaled[2:]


def _no_losses(like: torch.Tensor) -> DraftLosses:
    return DraftLosses(like.new_zeros(0), like.new_zeros(0), like.new_zeros(0, dtype=torch.bool))


def chunked_losses(
    drafter: Drafter,
    embeddings: SharedEmbeddings,
    head: TargetHead,
    hidden_states: torch.Tensor,
    features: torch.Tensor | None,
    targets: DraftTargets,
    weights: LossWeights,
    chunk_size: int,
) -> tuple[torch.Tensor, DraftLosses]:
    """
    Returns `sum(w (ce_weight CE + tv_weight TV))` over all drafts, and the losses of each draft, which are not differentiable.

    Args:
        drafter, embeddings: Compute the draft logits.
        head: Computes the target's distribution.
        hidden_states: Hidden states of the backbone, `[N, D]`.
        features: From `drafter.sequential_features`, `[N, r]` or `None`.
        targets: What to compare with, `[N]`.
        weights: Weights of the terms.
        chunk_size: Number of drafts whose logits are in memory at a time.
    """
    label_index = head.draft_indices(targets.labels)

    def compute(
        chunk: slice, hidden: torch.Tensor, feature: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, DraftLosses, torch.Tensor, torch.Tensor]:
        logits = drafter.draft_logits(hidden, feature, embeddings)
        some = targets.select(chunk)
        with torch.no_grad():
            distribution = head.distribution(some)
            greedy_index = head.draft_indices(distribution.greedy_ids)
            ce_weights, tv_weights = some.weights * weights.ce, some.weights * weights.tv
            values = logits.detach() if feature is not None else logits.detach().clone()  # Overwritten below.
            losses, gradient = losses_and_gradient(
                values, distribution, label_index[chunk], greedy_index, ce_weights, tv_weights
            )
            loss = (ce_weights * losses.cross_entropy + tv_weights * losses.total_variation).sum()
        return logits, losses, gradient, loss

    parameters = drafter.sequential_parameters()
    loss, *losses = _ChunkedLoss.apply(
        hidden_states, features, compute, chunk_size, torch.is_grad_enabled(), *parameters
    )
    return loss, DraftLosses(*losses)


# ----------------------------------------------------------------------------------------------------------- objective


@dataclass
class DSparkObjective:
    """
    The loss of one micro-batch, for `drafter.forward(..., objective=...)`.

    Args:
        head (`TargetHead`): Computes the target's distribution.
        embeddings (`SharedEmbeddings`): The embedding and LM head that the drafter uses.
        targets (`DraftTargets`): What to compare with, `[B, A, J]`.
        previous_ids (`torch.Tensor`): The true token before each draft, `[B, A, J]` (teacher forcing).
        weights (`LossWeights`): Of the terms.
        normalizer (`torch.Tensor`, *optional*): Sum of the position weights in the whole optimiser step; by default that of
            this micro-batch.
        chunk_size (`int`): Number of drafts whose logits are in memory at a time; 0 uses [`eager_losses`] for all at once.
    """

    head: TargetHead
    embeddings: SharedEmbeddings
    targets: DraftTargets
    previous_ids: torch.Tensor
    weights: LossWeights
    normalizer: torch.Tensor | int | None = None
    chunk_size: int = 1024

    def __call__(self, drafter: Drafter, hidden_states: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and the sums of [`metric_sums`] for hidden states `[B, A * G, D]`."""
        batch, num_anchors, num_drafts = self.previous_ids.shape
        hidden = hidden_states.view(batch, num_anchors, -1, hidden_states.shape[-1])
        hidden = hidden[:, :, -num_drafts:]  # Leaves out the anchor's slot if it predicts nothing.
        counted = self.targets.weights > 0  # [B, A, J]
        # Before the selection, because a recurrent head has to go through all slots of a block.
        features = drafter.sequential_features(self.previous_ids, hidden)  # [B, A, J, r]
        features = None if features is None else features[counted]  # [N, r]
        hidden, targets = hidden[counted], self.targets.select(counted)  # [N, D]

        if self.chunk_size:
            loss, losses = chunked_losses(
                drafter, self.embeddings, self.head, hidden, features, targets, self.weights, self.chunk_size
            )
        else:
            loss, losses = self.eager(drafter, hidden, features, targets)

        confidence_loss, confidence = loss.new_zeros(()), None
        acceptance = (1 - losses.total_variation.detach() / 2).clamp(0, 1)  # [N]
        if drafter.config.gives_confidence:
            logits = drafter.confidence_logits(hidden, self.previous_ids[counted]).float()
            confidence = torch.sigmoid(logits.detach())
            terms = nn.functional.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")
            confidence_loss = (terms * targets.weights).sum()
        if self.weights.confidence:
            loss = loss + self.weights.confidence * confidence_loss

        total = targets.weights.sum()
        normalizer = total if self.normalizer is None else self.normalizer
        metrics = metric_sums(counted, targets.weights, losses, acceptance, confidence, confidence_loss.detach())
        return loss / (normalizer + _EPSILON), metrics

    def eager(
        self, drafter: Drafter, hidden: torch.Tensor, features: torch.Tensor | None, targets: DraftTargets
    ) -> tuple[torch.Tensor, DraftLosses]:
        """The loss as in [`chunked_losses`], computed with [`eager_losses`]."""
        distribution = self.head.distribution(targets)
        label_index, greedy_index = (
            self.head.draft_indices(targets.labels),
            self.head.draft_indices(distribution.greedy_ids),
        )
        losses = eager_losses(
            drafter.draft_logits(hidden, features, self.embeddings), distribution, label_index, greedy_index
        )
        terms = self.weights.ce * losses.cross_entropy + self.weights.tv * losses.total_variation
        return (terms * targets.weights).sum(), losses


# ------------------------------------------------------------------------------------------------------------- metrics


def metric_sums(
    counted: torch.Tensor,
    weights: torch.Tensor,
    losses: DraftLosses,
    acceptance: torch.Tensor,
    confidence: torch.Tensor | None,
    confidence_loss: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """
    Sums from which [`summed_metrics`] computes the logged figures. The sums of several batches can be added.

    Args:
        counted: `[B, A, J]`, bool.
        weights, losses, acceptance, confidence: Values for the `N` counted drafts.
        confidence_loss: Sum over these drafts.
    """

    def by_draft(values: torch.Tensor) -> torch.Tensor:
        spread = torch.zeros(counted.shape, dtype=torch.float32, device=counted.device)
        return spread.masked_scatter_(counted, values.float())  # [B, A, J], 0 where not counted

    def total(values: torch.Tensor) -> torch.Tensor:
        return values.sum(dim=(0, 1))  # [J]

    agrees, accepted = by_draft(losses.agrees), by_draft(acceptance)
    sums = {
        "weight": weights.sum(),
        "ce": (weights * losses.cross_entropy.detach()).sum(),
        "tv": (weights * losses.total_variation.detach()).sum(),
        "confidence_loss": confidence_loss,
        "counted": total(counted.float()),
        "acceptance": total(accepted),
        "agreement": total(agrees),
        # Counted drafts are a prefix of their block, so no uncounted draft is part of these products.
        "survival": total(accepted.cumprod(dim=-1)),
        "greedy_survival": total(agrees.cumprod(dim=-1)),
    }
    if confidence is not None:
        error = weights * (confidence - acceptance)
        sums["confidence_error"], sums["confidence_bias"] = error.abs().sum(), error.sum()
        bins = (confidence * NUM_BINS).long().clamp_max(NUM_BINS - 1)
        gaps = (confidence - acceptance).float()
        sums["calibration_gaps"] = gaps.new_zeros(NUM_BINS).index_add_(0, bins, gaps)
    return {name: value.detach() for name, value in sums.items()}


def summed_metrics(sums: dict[str, torch.Tensor], weights: LossWeights) -> dict[str, float]:
    """
    The logged figures.

    `acceptance_length` is the expected number of tokens per target pass, including the target's token, with sampled drafts
    after the text of the data; `greedy_acceptance_length` is the same with greedy drafts. `acceptance_k` is the probability
    that draft `k` (from 1) is accepted if those before it are. `confidence_error` and `confidence_bias` are the mean absolute
    and signed difference between confidence and that probability. `confidence_ece` is the expected calibration error: the
    absolute mean difference in each of 20 equal bins of confidence, averaged over drafts.
    """
    weight = float(sums["weight"]) + _EPSILON
    counted = sums["counted"].clamp_min(1)
    results = {name: float(sums[key]) / weight for name, key in (("ce_loss", "ce"), ("tv_loss", "tv"))}
    results["total_loss"] = weights.ce * results["ce_loss"] + weights.tv * results["tv_loss"]
    results["acceptance_length"] = 1 + float((sums["survival"] / counted).sum())
    results["greedy_acceptance_length"] = 1 + float((sums["greedy_survival"] / counted).sum())
    if "confidence_error" in sums:
        results["confidence_loss"] = float(sums["confidence_loss"]) / weight
        results["total_loss"] += weights.confidence * results["confidence_loss"]
        results["confidence_error"] = float(sums["confidence_error"]) / weight
        results["confidence_bias"] = float(sums["confidence_bias"]) / weight
        results["confidence_ece"] = float(sums["calibration_gaps"].abs().sum() / sums["counted"].sum().clamp_min(1))
    for index, value in enumerate((sums["acceptance"] / counted).tolist(), start=1):
        results[f"acceptance_{index}"] = value
    return results
