"""The decoding methods that are compared. Each is a set of arguments for the same `target.generate` call."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ..drafter import Drafter
from ..scheduling import ThroughputCurve, build_scheduler
from ..transformers_names import DFLASH_READS_LAYER_INPUTS

PLAIN = "plain"
BY_COST = ("throughput", "async_throughput")  # Schedules that use the cost of a round.


@dataclass(frozen=True)
class Method:
    """
    Args:
        name: Name of the method in tables.
        arguments: Arguments for `target.generate`, added to those that all methods share.
        drafter: Our drafter, if the method uses one; its rounds are recorded.
        fields: What distinguishes the method in a sweep, such as `{"threshold": 0.5}`.
        keeps_cache: Whether a next turn can use the cache of the turn before. transformers' assisted generation cannot.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    drafter: Drafter | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    keeps_cache: bool = True


def plain_method() -> Method:
    """Plain `generate`: one token per pass. All other methods are compared with it."""
    return Method(PLAIN)


def prompt_lookup_method(num_tokens: int = 10) -> Method:
    """transformers' prompt lookup: drafts are copied from the prompt."""
    return Method("prompt-lookup", {"prompt_lookup_num_tokens": num_tokens}, keeps_cache=False)


def assistant_method(assistant: PreTrainedModel) -> Method:
    """transformers' assisted generation with a small model of the same vocabulary."""
    return Method("assistant", {"assistant_model": assistant}, keeps_cache=False)


def dspark_method(
    drafter: Drafter,
    name: str = "dspark",
    num_tokens: int | None = None,
    threshold: float | None = None,
    fields: dict[str, Any] | None = None,
) -> Method:
    """
    Our decoding loop without back-off: it drafts in every round, even if that does not pay, to measure the drafter.

    Args:
        drafter: The drafter.
        name: Name of the method.
        num_tokens: Drafts per round; the drafter's setting by default.
        threshold: Draft until the first slot below this confidence. The default, `None`, keeps the drafter's setting.
        fields: As in [`Method`].
    """
    arguments: dict[str, Any] = {"assistant_model": drafter, "drafting_backoff": False}
    if num_tokens is not None:
        arguments["num_assistant_tokens"] = num_tokens
    if threshold is not None:
        arguments["assistant_confidence_threshold"] = threshold
    return Method(name, arguments, drafter, fields or {})


def calibration_method(drafter: Drafter) -> Method:
    """Our decoding loop with settings for calibration: every round drafts, and every draft is verified."""
    return dspark_method(drafter, "calibration", num_tokens=drafter.config.num_draft_tokens, threshold=0.0)


def schedule_method(
    drafter: Drafter, schedule: str, label: str = "dspark", curve: ThroughputCurve | None = None
) -> Method:
    """
    Our decoding loop with a schedule given as text.

    Args:
        drafter: The drafter.
        schedule: `fixed` (whole blocks), `fixed:N` (N drafts per round), `threshold:P` (confidence of at least P), or
            `throughput` and `async_throughput` (by cost; drafting pauses where it does not pay).
        label: Name of the drafter.
        curve: The cost of rounds, for the last two schedules.

    Raises:
        ValueError: for any other text, or a schedule by confidence where the drafter has no confidence head.
    """
    kind, _, value = schedule.partition(":")
    name = f"{label} {schedule}"
    if kind == "fixed" and (not value or value.isdigit()):
        return dspark_method(drafter, name, num_tokens=int(value) if value else None, threshold=0.0)
    by_cost = schedule in BY_COST
    if not by_cost and not (kind == "threshold" and _is_probability(value)):
        raise ValueError(
            f"Unknown schedule {schedule!r}: use fixed, fixed:N (N drafts per round), threshold:P (such as threshold:0.5), "
            f"{' or '.join(BY_COST)}."
        )
    if not drafter.config.gives_confidence:
        raise ValueError(f"Schedule {schedule!r} needs a drafter with a confidence head, and {label!r} has none.")
    if not by_cost:
        return dspark_method(drafter, name, threshold=float(value))
    scheduler = build_scheduler(schedule, curve=curve)
    return Method(name, {"assistant_model": drafter, "verify_scheduler": scheduler, "drafting_backoff": True}, drafter)


def _is_probability(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


def dflash_method(drafter: Drafter, name: str = "dflash (transformers)") -> Method:
    """
    transformers' DFlash generator with the drafter's weights.

    Raises:
        ValueError: when the drafter is not a plain DFlash drafter.
    """
    arguments = {"assistant_model": DFlashView(drafter), "speculation_type": "dflash"}
    return Method(name, arguments, keeps_cache=False)


def is_dflash(drafter: Drafter) -> bool:
    """Whether transformers' DFlash generator can run this drafter."""
    return not drafter.beyond_dflash()


class DFlashView(nn.Module):
    """
    A drafter in the shape that transformers' `DFlashTokenCandidateGenerator` expects of its assistant model.

    It keeps keys and values in the cache of the generator, as transformers' DFlash drafters do.

    Args:
        drafter: The drafter.
        heads_elsewhere: Accept a drafter whose logits need more than the target's LM head; the caller applies its heads.

    Raises:
        ValueError: when the drafter is not a plain DFlash drafter.
    """

    def __init__(self, drafter: Drafter, heads_elsewhere: bool = False):
        super().__init__()
        reasons = drafter.beyond_dflash(heads_elsewhere)
        if reasons:
            raise ValueError(f"transformers' DFlash generator cannot run this drafter: it has {', '.join(reasons)}.")
        self.drafter: Any = drafter
        self.config = copy.deepcopy(drafter.config)
        # The generator drops the first slot of a block. If that slot predicts, the block needs one slot more.
        self._adds_slot = drafter.config.sample_from_anchor
        self.config.block_size += self._adds_slot
        if DFLASH_READS_LAYER_INPUTS:
            self.config.target_layer_ids = [layer_id + 1 for layer_id in self.config.target_layer_ids]
        self.generation_config = drafter.generation_config

    @property
    def device(self) -> torch.device:
        return self.drafter.device

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: Any = None,
        cache: Any = None,
        past_key_values: Any = None,
    ) -> BaseModelOutput:
        """
        Args:
            noise_embeds: Embeddings of the block, `[1, G, D]`.
            context_hidden_states: Features of what was accepted since the last call, `[1, T, m * D_target]`.
            position_ids: Positions of both, `[1, T + G]`.
            attention_mask: Ignored: a single row without padding attends to everything.
            cache, past_key_values: The cache, under its new and its old name.
        """
        cache = cache if cache is not None else past_key_values
        num_new, num_slots = context_hidden_states.shape[1], noise_embeds.shape[1]
        hidden_states = noise_embeds.to(self.drafter.dtype)
        if self._adds_slot:
            hidden_states = hidden_states[:, :-1]
        context = self.drafter.project_context(context_hidden_states)  # [1, T, D]
        context_angles = self.drafter.rotary_emb(context, position_ids[:, :num_new])
        block_positions = position_ids[:, num_new : num_new + hidden_states.shape[1]]
        angles = self.drafter.rotary_emb(hidden_states, block_positions)
        for index, layer in enumerate(self.drafter.layers):
            keys, values = layer.key_values(context, context_angles)
            # The generator crops a whole block from the cache afterwards. These entries are for that, and are not attended to.
            pad = (0, 0, 0, num_slots)
            keys, values = cache.update(nn.functional.pad(keys, pad), nn.functional.pad(values, pad), index)
            hidden_states = layer(hidden_states, angles, (keys[:, :, :-num_slots], values[:, :, :-num_slots]), None)
        hidden_states = self.drafter.norm(hidden_states)
        if self._adds_slot:
            hidden_states = nn.functional.pad(hidden_states, (0, 0, 1, 0))
        return BaseModelOutput(last_hidden_state=hidden_states)
