"""The decoding loop: draft, verify, commit, until the output is complete. The file to read first.

A round feeds the target `[anchor, draft_1 .. draft_l]` in one pass, keeps the drafts that pass, adds the one token that
follows them, and makes that token the next anchor. Everything that decides what the output is (processors, criteria,
limits) is the target's and is applied token by token exactly as plain `generate` does; the drafter only decides how
many of the tokens come out of one pass.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..modeling_dspark import DSparkDrafter
from .candidate_generator import NO_DRAFT, DSparkCandidateGenerator
from .context_memory import prepare_context, remember
from .output import Output
from .registration import unwrap_drafter
from .requirements import check_call, draft_settings
from .target_pass import TargetPass
from .telemetry import Round, current_recorder
from .token_choice import TokenChoice


@torch.no_grad()
def dspark_generate(
    model: PreTrainedModel,
    input_ids: torch.LongTensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: DSparkDrafter | None = None,
    streamer: BaseStreamer | None = None,
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    **model_kwargs: Any,
) -> torch.LongTensor | GenerateDecoderOnlyOutput:
    """
    Decodes with a DSpark drafter. A `custom_generate` callable: transformers prepares the arguments.

    ```python
    >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
    >>> target.generate(**inputs, custom_generate=dspark_hf.dspark_generate, drafter=drafter)  # doctest: +SKIP
    ```

    The second spelling needs no patch of `generate`. After `dspark_hf.unregister()` transformers passes neither `streamer=` nor
    `tokenizer=` on to a loop that is given this way.

    Args:
        model: The target.
        input_ids: Prompt, `[B, P]`.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepared them.
        drafter: The drafter, which may be wrapped by PEFT.
        streamer: Gets each committed token, as in plain `generate`.
        num_assistant_tokens: Drafts a round; the drafter's `generation_config` by default.
        assistant_confidence_threshold: A round's drafts end before the first slot less confident than this.

    Returns:
        What plain `generate` would return: token ids `[B, L]`, or a `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: for calls that have no exact answer here; each message says what to do instead.
    """
    try:
        base = unwrap_drafter(drafter)
        if base is None:
            raise ValueError(f"drafter= must be a DSparkDrafter, got {type(drafter).__name__}.")
        check_call(model, input_ids, generation_config)
        num_drafts, threshold = draft_settings(base, num_assistant_tokens, assistant_confidence_threshold)
        do_sample = bool(generation_config.do_sample)
        recorder = current_recorder()
        generator = DSparkCandidateGenerator(
            base,
            model,
            logits_processor,
            do_sample=do_sample,
            num_draft_tokens=num_drafts,
            confidence_threshold=threshold,
            num_rows=len(input_ids),
            want_confidence=recorder is not None,
        )
        target = TargetPass(model, model_kwargs, generation_config, base.config.hidden_state_indices)
        output = Output(input_ids, stopping_criteria, generation_config, streamer)

        # 1. The prompt: its features become the drafter's context, its last logits give the first anchor.
        started = time.perf_counter()
        prepare_context(target, generator, input_ids)
        for fed in target.prefill(input_ids):
            generator.observe_prompt(fed.context_features, fed.attended)
        choice = TokenChoice(logits_processor, do_sample, fed.logits, NO_DRAFT)
        output.commit(choice, fed.raw, is_prefill=True)
        target.commit(num_fed=1, num_committed=1)
        if recorder is not None:
            recorder.prefill_s += time.perf_counter() - started

        # 2. Rounds, until the output is complete.
        while not output.is_finished:
            started = time.perf_counter()
            # A round adds one token of the target's own, so there is room for one draft fewer than for tokens.
            draft = generator.draft(output.ids, max_drafts=output.room - 1)
            num_verified = draft.lengths[0]
            drafted = time.perf_counter()
            fed = target.verify(output.ids, draft.ids[:, :num_verified])  # type: ignore[arg-type]
            verified = time.perf_counter()
            choice = TokenChoice(logits_processor, do_sample, fed.logits, draft)
            length = output.ids.shape[1]
            try:
                output.commit(choice, fed.raw)
            finally:  # Whatever a criterion or streamer raises, the cache keeps no rejected draft.
                num_committed = output.ids.shape[1] - length
                target.commit(num_fed=num_verified + 1, num_committed=num_committed)
            generator.observe(fed.context_features[:, :num_committed])
            if recorder is not None:
                recorder.rounds.append(
                    Round.of(draft, choice, num_committed, started, drafted, verified, time.perf_counter())
                )
        target.end_recording()
        if output.ids.shape[1] == target.past_length + 1:  # The ids are those of the whole cache.
            remember(target.cache, base, output.ids[:, :-1], generator.cache)  # type: ignore[arg-type]
        return output.result(target.cache)
    finally:
        if streamer is not None:
            streamer.end()
