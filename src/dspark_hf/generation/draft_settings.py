"""The settings of drafting in a call: drafts per round, the scheduler, and the back-off."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafter import Drafter
from ..embeddings import weight_of
from ..scheduling import (
    ConfidenceThreshold,
    FixedLength,
    NoBackoff,
    RowsBackoff,
    ThroughputCurve,
    VerifyScheduler,
    build_scheduler,
)
from ..target_config import optional_field
from ..transformers_names import compute_device

logger = logging.get_logger(__name__)


@dataclass
class DraftOptions:
    """
    Settings of drafting given in a call, or with an attached drafter; `None` means the drafter's. See
    [`~dspark_hf.dspark_generate`].

    Raises:
        ValueError: for a setting of another type.
    """

    num_assistant_tokens: int | None = None
    assistant_confidence_threshold: float | None = None
    verify_scheduler: VerifyScheduler | str | None = None
    drafting_backoff: bool | None = None

    def __post_init__(self) -> None:
        _check_type("num_assistant_tokens", self.num_assistant_tokens, Integral, "a number of tokens")
        _check_type("assistant_confidence_threshold", self.assistant_confidence_threshold, Real, "a number from 0 to 1")
        _check_type("verify_scheduler", self.verify_scheduler, VerifyScheduler | str, "a scheduler or the name of one")
        if self.drafting_backoff not in (None, False, True):
            raise ValueError(f"drafting_backoff={self.drafting_backoff!r} must be True or False.")

    def over(self, others: DraftOptions) -> DraftOptions:
        """These settings, and `others` where nothing is given here. A threshold and a scheduler replace each other."""
        decides = self.assistant_confidence_threshold is not None or self.verify_scheduler is not None
        return DraftOptions(
            others.num_assistant_tokens if self.num_assistant_tokens is None else self.num_assistant_tokens,
            self.assistant_confidence_threshold if decides else others.assistant_confidence_threshold,
            self.verify_scheduler if decides else others.verify_scheduler,
            others.drafting_backoff if self.drafting_backoff is None else self.drafting_backoff,
        )


def _check_type(name: str, value: object, accepted: type | UnionType, words: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, accepted)):
        raise ValueError(f"{name}={value!r} must be {words}.")


def draft_settings(drafter: Drafter, target: PreTrainedModel, options: DraftOptions) -> tuple[int, VerifyScheduler]:
    """
    Drafts per round and the scheduler, from the call's settings or else from `drafter.generation_config`.

    Raises:
        ValueError: for more drafts than a block gives, a threshold outside 0 to 1, both a threshold and a scheduler, or a
            scheduler name that is unknown or whose throughput curve is missing.
    """
    config, settings = drafter.config, drafter.generation_config
    num_drafts, threshold = options.num_assistant_tokens, options.assistant_confidence_threshold
    scheduler = options.verify_scheduler
    if num_drafts is None:
        num_drafts = (
            settings.num_assistant_tokens if settings.num_assistant_tokens is not None else config.num_draft_tokens
        )
    if not 0 <= num_drafts <= config.num_draft_tokens:
        raise ValueError(
            f"num_assistant_tokens={num_drafts}, but this drafter drafts at most {config.num_draft_tokens} tokens per round "
            f"({config.describe()['drafts']}). Beyond what it was trained for, the acceptance of every draft collapses."
        )
    if threshold and scheduler not in (None, "threshold"):
        raise ValueError(
            "Pass either assistant_confidence_threshold= or verify_scheduler=: both decide the verify length."
        )
    if threshold is None and scheduler is None:
        threshold, scheduler = settings.assistant_confidence_threshold, optional_field(settings, "verify_scheduler")
    if isinstance(scheduler, str):
        if scheduler == "threshold" and threshold is None:
            threshold = settings.assistant_confidence_threshold
        scheduler = build_scheduler(scheduler, threshold=threshold or 0.0, curve=curve_of(drafter, target))
    if scheduler is not None:
        return num_drafts, scheduler
    if not 0.0 <= (threshold or 0.0) <= 1.0:
        raise ValueError(f"assistant_confidence_threshold={threshold} is not a probability.")
    if threshold and not drafter.config.gives_confidence:
        logger.warning_once(
            f"assistant_confidence_threshold={threshold} has no effect: this drafter has no confidence head."
        )
        threshold = 0.0
    return num_drafts, ConfidenceThreshold(threshold) if threshold else FixedLength()


def curve_of(drafter: Drafter, target: PreTrainedModel) -> ThroughputCurve | None:
    """The drafter's throughput curve, if it has one that was measured on this target and device."""
    curve = drafter.throughput_curve
    if curve is None:
        return None
    try:
        curve.check(target)
    except ValueError as error:
        logger.warning_once(f"The drafter's throughput curve is not used. {error}")
        return None
    return curve


def backoff_of(
    drafter: Drafter, target: PreTrainedModel, scheduler: VerifyScheduler, num_rows: int, is_on: bool | None
) -> RowsBackoff | NoBackoff:
    """
    The back-off, which decides when drafting pauses. Costs come from the scheduler's curve, else from the drafter's, else
    they are assumed from the size of the models and the kind of device.

    Args:
        drafter, target, scheduler, num_rows: Those of the call.
        is_on: `drafting_backoff` as given in the call; `None` means the drafter's `generation_config`.
    """
    if is_on is None:
        is_on = optional_field(drafter.generation_config, "drafting_backoff")
    if is_on is False:
        return NoBackoff()
    costs = getattr(scheduler, "curve", None)
    if not isinstance(costs, ThroughputCurve):
        costs = curve_of(drafter, target)
    if costs is None:
        costs = ThroughputCurve.assumed(_relative_size(drafter, target), compute_device(target).type != "cpu")
    elif not costs.drafting:
        costs = costs.with_assumed_drafting(_relative_size(drafter, target))
    return RowsBackoff(costs, num_rows)


def _relative_size(drafter: Drafter, target: PreTrainedModel) -> float:
    """Weights read to draft a whole round, divided by those read for a pass of the target."""
    # Looking up embedding rows reads almost nothing, but an embedding tied to the LM head is read in full.
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    lookups = [] if weight_of(embedding) is weight_of(head) else [embedding]
    read = _num_weights(drafter) - sum(
        _num_weights(m) for m in (drafter.embed_tokens, drafter.lm_head) if m is not None
    )
    read += drafter.config.logits_size * drafter.config.hidden_size
    read *= drafter.passes_per_round
    return read / max(_num_weights(target) - sum(_num_weights(module) for module in lookups), 1)


def _num_weights(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
