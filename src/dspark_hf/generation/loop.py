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

from ..drafter import Drafter
from ..scheduling import VerifyScheduler
from ..transformers_names import is_callers_cache, pad_token_of
from .candidate_generator import DSparkCandidateGenerator, no_draft
from .context_memory import prepare_context, remember
from .eagle3_candidate_generator import generator_of
from .logits_process import processors_for_row
from .output import Output, assemble
from .requirements import backoff_of, check_call, draft_settings, unwrap_drafter
from .rows_target_pass import RowsTargetPass, states_of_row
from .target_pass import TargetPass
from .telemetry import Round, current_recorder
from .token_choice import TokenChoice


@torch.no_grad()
def dspark_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    streamer: BaseStreamer | None = None,
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    verify_scheduler: VerifyScheduler | str | None = None,
    drafting_backoff: bool | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
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
        verify_scheduler: Decides instead how many of each row's drafts are verified: an object or the name of one.
        drafting_backoff: Whether drafting pauses while it does not pay; on by default.

    Returns:
        What plain `generate` would return: token ids `[B, L]`, or a `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: for calls that have no exact answer here; each message says what to do instead.
    """
    prompt: TargetPass | None = None
    try:
        base = unwrap_drafter(drafter)
        if base is None:
            raise ValueError(f"drafter= must be a DSparkDrafter or Eagle3Drafter, got {type(drafter).__name__}.")
        check_call(model, input_ids, generation_config)
        num_drafts, scheduler = draft_settings(
            base, model, num_assistant_tokens, assistant_confidence_threshold, verify_scheduler
        )
        num_rows, do_sample, recorder = len(input_ids), bool(generation_config.do_sample), current_recorder()
        processors = [processors_for_row(logits_processor, row, num_rows) for row in range(num_rows)]
        generator = generator_of(base)(
            base,
            model,
            processors,
            do_sample=do_sample,
            num_draft_tokens=num_drafts,
            scheduler=scheduler,
            backoff=backoff_of(base, model, scheduler, num_rows, drafting_backoff),
            want_confidence=recorder is not None,
        )
        prompt = TargetPass(model, model_kwargs, generation_config, base.config.hidden_state_indices)
        outputs = [Output(row, stopping_criteria, generation_config, streamer) for row in input_ids.split(1)]

        # 1. The prompts: their features become the drafter's context, their last logits give the first anchors.
        started = time.perf_counter()
        prepare_context(prompt, generator, input_ids)
        for fed in prompt.prefill(input_ids):
            generator.observe_prompt(fed.context_features, fed.attended)
        for row, output in enumerate(outputs):
            choice = TokenChoice(processors[row], do_sample, fed.logits[row : row + 1], no_draft())
            output.commit(choice, states_of_row(fed.raw, row, num_rows), is_prefill=True)
        keep_cache = bool(generation_config.return_dict_in_generate) or is_callers_cache(prompt.cache)
        target = prompt if num_rows == 1 else RowsTargetPass(prompt, keep_cache)
        if recorder is not None:
            recorder.prefill_s += time.perf_counter() - started

        # 2. Rounds, until every row is complete.
        rows = drop_finished(list(range(num_rows)), outputs, generator, target)
        while rows:
            clock = [time.perf_counter()]
            # A round adds one token of the target's own, so there is room for one draft fewer than for tokens.
            draft = generator.draft([outputs[row].ids for row in rows], [outputs[row].room - 1 for row in rows])
            drafts = [draft.of_row(place) for place in range(len(rows))]
            clock.append(time.perf_counter())
            fed_rows = target.verify([outputs[row].ids for row in rows], [own.ids for own in drafts])
            clock.append(time.perf_counter())
            choices = [
                TokenChoice(processors[row], do_sample, fed.logits, own)
                for row, fed, own in zip(rows, fed_rows, drafts, strict=True)
            ]
            lengths = [outputs[row].ids.shape[1] for row in rows]
            try:
                for row, fed, choice in zip(rows, fed_rows, choices, strict=True):
                    outputs[row].commit(choice, fed.raw)
            finally:  # Whatever a criterion or streamer raises, the cache keeps no rejected draft.
                counts = [outputs[row].ids.shape[1] - length for row, length in zip(rows, lengths, strict=True)]
                target.commit(counts)
            generator.observe([fed.context_features[0] for fed in fed_rows], counts)
            if recorder is not None:
                parts = zip(rows, drafts, choices, counts, strict=True)
                records = [Round.of(row, draft.ids.shape[1], *others) for row, *others in parts]
                recorder.add(records, [*clock, time.perf_counter()])
            rows = drop_finished(rows, outputs, generator, target)
        if num_rows == 1 and outputs[0].ids.shape[1] == prompt.past_length + 1:  # The ids are those of the whole cache.
            ids = outputs[0].ids
            remember(prompt.cache, base, ids[:, :-1], generator.settle([ids]))
        return assemble(outputs, pad_token_of(generation_config), target.finish())
    finally:
        if prompt is not None:
            prompt.end_recording()
        if streamer is not None:
            streamer.end()


def drop_finished(
    rows: list[int], outputs: list[Output], generator: DSparkCandidateGenerator, target: TargetPass | RowsTargetPass
) -> list[int]:
    """The rows still to be decoded; the others leave the drafter and the target and cost nothing more."""
    places = [place for place, row in enumerate(rows) if not outputs[row].is_finished]
    if len(outputs) > 1 and len(places) < len(rows):
        generator.keep_rows(places)
        target.keep_rows(places)
    return [rows[place] for place in places]
