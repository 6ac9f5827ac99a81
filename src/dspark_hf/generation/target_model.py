"""Passes of the target over tokens, as `generate` prepared it, with logits and tapped hidden states."""

from __future__ import annotations

import contextlib
import inspect
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import Cache, GenerationConfig
from transformers.cache_utils import CacheLayerMixin

from ..tapping import Tap
from ..transformers_names import (
    CACHE_KEY,
    GenerativeModel,
    extended_model_kwargs,
    has_own_update,
    hides_columns,
    is_callers_cache,
)
from .pass_mode import PassMode, pass_mode
from .requirements import refuse
from .telemetry import stage


class TargetOutput(NamedTuple):
    """
    One forward pass of the target.

    Args:
        logits: Float32 logits of the last `N` input tokens, `[B, N, V]`.
        context_features: Tapped hidden states of the `T` input tokens, concatenated, `[B, T, m * D_target]`.
        raw: The output of the model, for the states that the user asked for.
        is_whole: Whether all of `raw` belongs to one generated token, as in the pass over a prompt, instead of one token per
            position.
        attended: False at padding, `[B, T]`; `None` without padding.
    """

    logits: torch.Tensor
    context_features: torch.Tensor
    raw: Any
    is_whole: bool = False
    attended: torch.Tensor | None = None


@dataclass
class TargetModel:
    """
    The target with its cache and arguments. The model prepares its inputs as in plain `generate`.

    Args:
        model: The target.
        model_kwargs: As `generate` prepared them: cache, masks, positions and arguments specific to the model.
        generation_config: As `generate` prepared it.
        hidden_state_indices: Entries of `hidden_states` that feed the drafter.

    Attributes:
        cache (`Cache`): The target's cache.
        forgets_context (`bool`):
            Whether the model has discarded its cache, so that each pass runs over the whole sequence: Phi-3 does so at a
            certain length, in older versions of transformers.
        uncounted_id (`int`, *optional*):
            The padding token of a model that counts the positions of a pass itself, without padding (Kosmos-2): a token behind
            it in the same pass has another position than in a pass of its own.
        mode (`PassMode`): The context for its passes once the prompt is fed.

    Raises:
        ValueError: when the target's cache is off.
    """

    model: GenerativeModel
    model_kwargs: dict[str, Any]
    generation_config: GenerationConfig
    hidden_state_indices: list[int]

    def __post_init__(self) -> None:
        cache = self.model_kwargs.get(CACHE_KEY)
        self.forgets_context = False
        self.uncounted_id: int | None = None
        self._has_padding = hides_columns(self.model_kwargs.get("attention_mask"))
        self._prompt_positions: torch.Tensor | None = None
        if not self.model_kwargs.get("use_cache", True):
            given = self.model.generation_config.use_cache
            where = "" if given else f" in the configuration of {type(self.model).__name__}"
            refuse(
                f"the target's cache is off (use_cache=False{where}), and verifying drafts needs one: pass use_cache=True"
            )
        if not isinstance(cache, Cache):
            refuse(f"transformers makes no cache for {type(self.model).__name__}, and verifying drafts needs one")
        if has_own_update(self.model):
            try:
                extended_model_kwargs(self.model, self.model_kwargs, 1)
            except AttributeError:  # The states of images, for Idefics.
                refuse(f"{type(self.model).__name__} takes arguments of the next pass from the output of the last one")
        self.cache: Cache = cache
        self.tap = Tap(self.model, self.hidden_state_indices)
        self.mode: PassMode = contextlib.nullcontext if self._shows_states else pass_mode(self.model)

    @property
    def keeps_cache(self) -> bool:
        """Whether the cache outlives the call."""
        return bool(self.generation_config.return_dict_in_generate) or is_callers_cache(self.cache)

    @property
    def _shows_states(self) -> bool:
        config = self.generation_config
        return bool(config.return_dict_in_generate and (config.output_hidden_states or config.output_attentions))

    @property
    def past_length(self) -> int:
        """Tokens in the cache; 0 where it holds recurrent states alone, which do not count them."""
        layers: list[Any] = self.cache.layers
        if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
            return 0
        return int(self.cache.get_seq_length())

    def last_positions(self) -> torch.Tensor:
        """
        Positions of the last token of each prompt, `[B, 1]` or `[axes, B, 1]`, as the model was given them: some models change
        those that `generate` counts (PaliGemma), or count columns with the padding (EXAONE 4.5).
        """
        if self._prompt_positions is not None:
            return self._prompt_positions[..., -1:]
        counted: torch.Tensor = self.model_kwargs["position_ids"][..., -1:]
        return torch.full_like(counted, self.past_length - 1)

    def attended_columns(self, start: int, end: int) -> torch.Tensor | None:
        """Which of the prompt's columns `start..end-1` are not padding, `[B, end - start]`; `None` without padding."""
        return self.model_kwargs["attention_mask"][:, start:end].bool() if self._has_padding else None

    def forward(
        self,
        input_ids: torch.Tensor,
        num_fed: int,
        logits_to_keep: int,
        kwargs: dict[str, Any],
        is_first_iteration: bool = False,
    ) -> TargetOutput:
        """
        One pass of the model over the last tokens of a sequence.

        Args:
            input_ids: The whole sequence, `[B, L]`.
            num_fed: How many of its last tokens the cache does not hold yet.
            logits_to_keep: Tokens whose logits are wanted, from the last. After the prompt, so are their hidden states alone.
            kwargs: `model_kwargs` that cover the sequence.
            is_first_iteration: Whether the tokens belong to the prompt.
        """
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=num_fed, is_first_iteration=is_first_iteration, **kwargs
        )
        if is_first_iteration:
            self._prompt_positions = inputs.get("position_ids")
            if self._prompt_positions is None and "position_ids" in inspect.signature(self.model.forward).parameters:
                self.uncounted_id = getattr(self.model.get_input_embeddings(), "padding_idx", None)
            if (given := inputs.get("input_ids")) is not None and given.shape[1] > input_ids.shape[1]:
                refuse(f"{type(self.model).__name__} puts tokens of its own behind the text")  # XLM does.
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
        fed_ids = inputs.get("input_ids")
        if fed_ids is not None and fed_ids.shape[1] < num_fed:
            # PEFT's prefix tuning expects a single token per pass after the prompt.
            inputs["input_ids"] = input_ids[:, -num_fed:].to(fed_ids.device)
        if not inputs.get(
            "output_hidden_states"
        ):  # The user did not ask for hidden states, so only the tapped ones are requested, if transformers supports that.
            inputs["output_hidden_states"] = self.tap.argument
        # The prompt's pass may leave tensors for later calls, such as those of a static cache.
        mode = contextlib.nullcontext() if is_first_iteration else self.mode()
        with stage("target pass"), mode, self.tap.reading():
            raw = self.model(**inputs, return_dict=True)
        if kwargs.get("use_cache", True):
            self._continue_with(raw.get(CACHE_KEY), input_ids.shape[1])
        logits = raw.logits[:, -logits_to_keep:].to(device=input_ids.device, dtype=torch.float32, copy=True)
        features = self.tap.features(raw)
        # A model that has discarded its cache was run over the whole sequence again.
        is_refed = not is_first_iteration and features.shape[1] > num_fed
        if not is_first_iteration and features.shape[1] > logits_to_keep:
            features = features[:, -logits_to_keep:]
            if not is_refed:
                keep_last_states(raw, self.tap, logits_to_keep)
        return TargetOutput(logits, features, raw, is_whole=is_first_iteration or is_refed)

    def _continue_with(self, cache: Any, num_tokens: int) -> None:
        """Replaces the cache if a pass made a new one, as prefix tuning does, and models that discard theirs."""
        if cache is not None and cache is not self.cache:
            self.cache = self.model_kwargs[CACHE_KEY] = cache
            self.forgets_context = self.past_length < num_tokens


def keep_last_states(raw: Any, tap: Tap, num_kept: int) -> None:
    """Leaves out what the output of a pass holds of tokens that were fed again."""

    def axis_of(name: str, states: torch.Tensor) -> int:
        return 2 if name == "attentions" else tap.batch_axis(states) + 1  # Attention weights are `[1, H, N, T]`.

    for name in ("hidden_states", "attentions"):
        if (of_layers := raw.get(name)) is not None:
            kept = (None if s is None else s.narrow(axis_of(name, s), -num_kept, num_kept) for s in of_layers)
            setattr(raw, name, tuple(kept))
