"""The target's side of a round: feed tokens, read logits and tapped hidden states, take rejected tokens back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionCacheLayerMixin, QuantizedLayer

from ..transformers_names import (
    CACHE_KEY,
    TOKEN_TYPE_KEYS,
    context_features,
    extended_model_kwargs,
    is_stateful,
    output_hidden_states,
    prompt_mask_length,
)


class TargetOutput(NamedTuple):
    """
    One forward pass of the target.

    Args:
        logits: Float32 logits of the last tokens fed, `[B, N, V]`.
        context_features: Tapped hidden states of all tokens fed, concatenated, `[B, T, m * D_target]`.
        raw: The model's own output, for what the user asked to be returned.
        attended: False where a token fed was padding, `[B, T]`; `None` when none was.
    """

    logits: torch.Tensor
    context_features: torch.Tensor
    raw: Any
    attended: torch.Tensor | None = None


class TargetPass:
    """
    Runs the target over the prompts and then, for one row, over `[anchor, drafts]`, with transformers' own input preparation
    and cache.

    Args:
        model: The target.
        model_kwargs: As `generate` prepared them: cache, masks, positions and the model's own arguments.
        generation_config: As `generate` prepared it.
        hidden_state_indices: Entries of `hidden_states` that feed the drafter.

    Raises:
        ValueError: when the target's cache is off or cannot be rolled back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        model_kwargs: dict[str, Any],
        generation_config: GenerationConfig,
        hidden_state_indices: list[int],
    ):
        self.model = model
        self.model_kwargs = model_kwargs
        self.cache = model_kwargs.get(CACHE_KEY)
        self.generation_config = generation_config
        self.hidden_state_indices = hidden_state_indices
        if is_stateful(model):
            self.refuse(
                f"{type(model).__name__} keeps recurrent state, which cannot be rolled back after a rejected draft"
            )
        if self.cache is None or not model_kwargs.get("use_cache", True):
            self.refuse("the target's cache is off (use_cache=False), and verifying drafts needs one")
        self._check_croppable()
        self._recording: list[Any] = []
        self.ending = contextlib.ExitStack()  # What is to be undone when the call ends.
        self._num_fed = 1

    @property
    def past_length(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())

    # ------------------------------------------------------------------ passes

    def prefill(self, input_ids: torch.Tensor) -> Iterator[TargetOutput]:
        """
        Feeds what the cache does not hold yet, in one pass or in chunks of `prefill_chunk_size`.

        Args:
            input_ids: The prompt, `[B, P]`; empty when the prompt is given as `inputs_embeds`.
        """
        embeds = self.model_kwargs.get("inputs_embeds")
        past_length, length = self.past_length, input_ids.shape[1] if embeds is None else embeds.shape[1]
        # Columns of masks and positions count from the start of the cache, those of new-only ids from its end.
        offset = 0 if self.holds_prefix_of(input_ids) else past_length
        if past_length >= offset + length:
            self.refuse(
                f"the cache already holds all {length} tokens of the prompt, so there is no token to continue from"
            )
        chunk_size = self.generation_config.prefill_chunk_size or length
        if chunk_size < offset + length - past_length and embeds is not None:
            self.refuse("prefill_chunk_size does not work with inputs_embeds")
        for start in range(past_length, offset + length, chunk_size):
            end = min(start + chunk_size, offset + length)
            kwargs = self._kwargs_of_first(end, offset + length)
            ids = input_ids if embeds is not None else input_ids[:, : end - offset]
            fed = self._forward(ids, end - start, 1, kwargs, is_first_iteration=True)
            yield fed._replace(attended=self.attended_columns(start, end))
        # Some targets make their cache in the first pass (prefix tuning).
        if (made := fed.raw.get(CACHE_KEY)) is not None:
            self.cache = self.model_kwargs[CACHE_KEY] = made
        self._check_croppable()
        # Only now: recording every state of a long prompt would hold far more memory than the layers keep.
        self._recording = [layer for layer in self.cache.layers if not getattr(layer, "record_past", True)]
        self.cache.activate_past_recording()
        self._end_pass(num_fed=1, num_committed=1)

    def verify(self, input_ids: list[torch.Tensor], draft_ids: list[torch.Tensor]) -> list[TargetOutput]:
        """
        Feeds the anchor and its drafts, of one row.

        Args:
            input_ids: All committed tokens, the anchor last, `[1, L]`.
            draft_ids: `[1, N]`.

        Returns:
            Logits and features of all `N + 1` tokens fed.
        """
        candidates = torch.cat([input_ids[0], draft_ids[0].to(input_ids[0].device)], dim=1)
        self._num_fed = draft_ids[0].shape[1] + 1
        kwargs = extended_model_kwargs(self.model, self.model_kwargs, self._num_fed - 1)
        return [self._forward(candidates, self._num_fed, self._num_fed, kwargs, is_first_iteration=False)]

    def commit(self, num_committed: list[int]) -> None:
        """
        Ends a round: keeps the fed tokens that belong to the output and makes room for the new anchor.

        As in plain `generate`, the last committed token is not in the cache.

        Args:
            num_committed: Tokens the round added to the output.
        """
        self._end_pass(self._num_fed, num_committed[0])

    def keep_rows(self, rows: list[int]) -> None:
        """Nothing to do: the one row stays."""

    def finish(self) -> Any:
        """The target's cache, as plain `generate` leaves it."""
        self.end_recording()
        return self.cache

    def _end_pass(self, num_fed: int, num_committed: int) -> None:
        # `crop(0)` is no no-op: it lets sliding-window layers drop what they recorded for this round.
        self.cache.crop(num_committed - num_fed)
        self.model_kwargs = extended_model_kwargs(self.model, self.model_kwargs, num_committed)

    def end_recording(self) -> None:
        """Leaves the target as it was: a later prompt is not to be recorded state by state."""
        self.ending.close()
        for layer in self._recording:
            layer.record_past = False

    def recompute_features(self, input_ids: torch.Tensor) -> torch.Tensor:
        """
        Features of a prefix that only the cache has seen, `[B, T, m * D_target]`, at the price of a pass over it.

        Args:
            input_ids: The prefix, `[B, T]`.
        """
        length, total = input_ids.shape[1], prompt_mask_length(self.model_kwargs, self.generation_config)
        kwargs = self._kwargs_of_first(length, total or length) | {"use_cache": False, CACHE_KEY: None}
        return self._forward(input_ids, length, 1, kwargs, is_first_iteration=True).context_features

    def attended_columns(self, start: int, end: int) -> torch.Tensor | None:
        """Which of the prompt's columns `start..end-1` are no padding, `[B, end - start]`; `None` for all."""
        mask = self.model_kwargs.get("attention_mask")
        return None if mask is None else mask[:, start:end].bool()

    def holds_prefix_of(self, input_ids: torch.Tensor) -> bool:
        """Whether `input_ids` starts with the tokens in the cache; otherwise it holds new tokens only."""
        if self.model_kwargs.get("inputs_embeds") is not None:
            return True
        return (
            self.past_length == 0 or prompt_mask_length(self.model_kwargs, self.generation_config) == input_ids.shape[1]
        )

    # ------------------------------------------------------------------ helpers

    def _forward(self, input_ids, num_fed: int, logits_to_keep: int, kwargs: dict[str, Any], is_first_iteration: bool):
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=num_fed, is_first_iteration=is_first_iteration, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
        if (fed_ids := inputs.get("input_ids")) is not None and fed_ids.shape[1] < num_fed:
            # PEFT's prefix tuning takes it that only one token is fed after the prompt.
            inputs["input_ids"] = input_ids[:, -num_fed:].to(fed_ids.device)
        raw = self.model(**(inputs | self._outputs_wanted(inputs)), return_dict=True)
        logits = raw.logits[:, -logits_to_keep:].to(device=input_ids.device, dtype=torch.float32, copy=True)
        return TargetOutput(logits, context_features(raw, self.hidden_state_indices), raw)

    def _outputs_wanted(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Hidden states: all of them where the user wants them, else (newer transformers) the tapped ones alone."""
        everything = inputs.pop("output_hidden_states", False)
        return {"output_hidden_states": True if everything else output_hidden_states(self.hidden_state_indices)}

    def _kwargs_of_first(self, length: int, total: int) -> dict[str, Any]:
        """`model_kwargs` as they would be for the first `length` of `total` prompt tokens."""
        kwargs = dict(self.model_kwargs)
        for name in ("attention_mask", "position_ids", *TOKEN_TYPE_KEYS):
            value = kwargs.get(name)
            if isinstance(value, torch.Tensor) and value.shape[-1] == total:
                kwargs[name] = value[..., :length]
        return kwargs

    def _check_croppable(self) -> None:
        is_empty = self.past_length == 0
        for layer in self.cache.layers:
            # Layers with convolutions know it only once they are filled. Quantized layers inherit a claim to be croppable in
            # older versions of transformers.
            is_undecided = is_empty and isinstance(layer, LinearAttentionCacheLayerMixin)
            if isinstance(layer, QuantizedLayer) or not (layer.is_croppable or is_undecided):
                self.refuse(
                    f"the layers of its {type(self.cache).__name__} cannot be rolled back ({type(layer).__name__}: recurrent "
                    "state, quantized keys and values, or a static window)"
                )

    def refuse(self, reason: str) -> NoReturn:
        """Raises the `ValueError` of a call that has no exact answer here."""
        raise ValueError(f"DSpark cannot draft for this call: {reason}. Generate without assistant_model=.")
