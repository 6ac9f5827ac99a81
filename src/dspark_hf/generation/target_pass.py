"""The target's side of a round: feed tokens, read logits and tapped hidden states, take rejected tokens back."""

from __future__ import annotations

import contextlib
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..transformers_names import CACHE_KEY, context_features, extended_model_kwargs, output_hidden_states
from .requirements import refuse
from .rollback import Rollback
from .telemetry import stage


class TargetOutput(NamedTuple):
    """
    One forward pass of the target.

    Args:
        logits: Float32 logits of the last tokens fed, `[B, N, V]`.
        context_features: Tapped hidden states of the tokens fed, concatenated, `[B, T, m * D_target]`.
        raw: The model's own output, for what the user asked to be returned.
        is_whole: Whether all of `raw` belongs to one token, as in the pass over a prompt, instead of a position each.
        attended: False where a token fed was padding, `[B, T]`; `None` when none was.
    """

    logits: torch.Tensor
    context_features: torch.Tensor
    raw: Any
    is_whole: bool = False
    attended: torch.Tensor | None = None


class TargetPass:
    """
    Runs the target over the prompts (see [`~dspark_hf.generation.prompt_pass`]) and then, for one row, over
    `[anchor, drafts]`, with transformers' own input preparation and cache.

    Args:
        model: The target.
        model_kwargs: As `generate` prepared them: cache, masks, positions and the model's own arguments.
        generation_config: As `generate` prepared it.
        hidden_state_indices: Entries of `hidden_states` that feed the drafter.

    Raises:
        ValueError: when the target's cache is off or cannot be rolled back.
    """

    refuse = staticmethod(refuse)

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
        self.ending = contextlib.ExitStack()  # What is to be undone when the call ends.
        # Phi-3 in older versions of transformers discards its cache for good at a certain length: each token stands alone then.
        self.forgets_context = False
        self._num_fed = 1
        if self.cache is None or not model_kwargs.get("use_cache", True):
            refuse("the target's cache is off (use_cache=False), and verifying drafts needs one")
        self._rollback = Rollback(model, self.cache)

    @property
    def past_length(self) -> int:
        """Tokens in the cache."""
        return int(self.cache.get_seq_length())

    def attended_columns(self, start: int, end: int) -> torch.Tensor | None:
        """Which of the prompt's columns `start..end-1` are no padding, `[B, end - start]`; `None` for all."""
        mask = self.model_kwargs.get("attention_mask")
        return None if mask is None else mask[:, start:end].bool()

    # ------------------------------------------------------------------ a round

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
        self._num_fed = candidates.shape[1] - input_ids[0].shape[1] + 1
        kwargs = extended_model_kwargs(self.model, self.model_kwargs, self._num_fed - 1)
        output = self.forward(candidates, self._num_fed, self._num_fed, kwargs)
        self.adopt_cache(output, candidates.shape[1])
        return [output]

    def commit(self, num_committed: list[int]) -> None:
        """
        Ends a pass: keeps the fed tokens that belong to the output and makes room for the new anchor.

        As in plain `generate`, the last committed token is not in the cache.

        Args:
            num_committed: Tokens that the pass added to the output.
        """
        with stage("cache handling"):
            self._rollback.take_back(self._num_fed - num_committed[0])
            self.model_kwargs = extended_model_kwargs(self.model, self.model_kwargs, num_committed[0])

    def keep_rows(self, rows: list[int]) -> None:
        """Nothing to do: the one row stays."""

    # ------------------------------------------------------------------ the call around the rounds

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
            logits_to_keep: Tokens whose logits are wanted, from the last.
            kwargs: `model_kwargs` that cover the sequence.
            is_first_iteration: Whether the tokens belong to the prompt.
        """
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=num_fed, is_first_iteration=is_first_iteration, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = logits_to_keep
        fed_ids = inputs.get("input_ids")
        if fed_ids is not None and fed_ids.shape[1] < num_fed:
            # PEFT's prefix tuning expects that only one token is fed after the prompt.
            inputs["input_ids"] = input_ids[:, -num_fed:].to(fed_ids.device)
        if not inputs.get(
            "output_hidden_states"
        ):  # The user wants none: where transformers allows, only the tapped ones.
            inputs["output_hidden_states"] = output_hidden_states(self.hidden_state_indices)
        with stage("target pass"):
            raw = self.model(**inputs, return_dict=True)
        logits = raw.logits[:, -logits_to_keep:].to(device=input_ids.device, dtype=torch.float32, copy=True)
        features = context_features(raw, self.hidden_state_indices)
        # Some models discard their cache at a certain length and are fed the whole sequence again.
        is_refed = not is_first_iteration and features.shape[1] > num_fed
        if is_refed:
            features = features[:, -num_fed:]
        return TargetOutput(logits, features, raw, is_whole=is_first_iteration or is_refed)

    def begin_rounds(self) -> None:
        """Called once the prompt is fed."""
        self._rollback.begin()
        self._num_fed = 1
        self.commit([1])

    def adopt_cache(self, output: TargetOutput, num_tokens: int) -> None:
        """
        Continues with the cache of a pass that made one: prefix tuning does, and models that discard theirs.

        Args:
            output: The pass.
            num_tokens: Tokens of the sequence so far.
        """
        made = output.raw.get(CACHE_KEY)
        if made is not None and made is not self.cache:
            has_begun = self._rollback.has_begun
            self._rollback.end()
            self.cache = self.model_kwargs[CACHE_KEY] = made
            self._rollback = Rollback(self.model, made)
            if has_begun:
                self._rollback.begin()
            self.forgets_context = self.past_length < num_tokens

    def finish(self) -> Any:
        """The target's cache, as plain `generate` leaves it."""
        self.end()
        return self.cache

    def end(self) -> None:
        """Leaves the target and its cache as they were before the call."""
        self.ending.close()
        self._rollback.end()
