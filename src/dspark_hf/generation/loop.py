"""The decoding loop: draft, verify, commit, until the output is complete. The file to read first.

A round feeds the target `[anchor, draft_1 .. draft_l]` in one pass, keeps the drafts that pass, adds the one token that
follows them, and makes that token the next anchor. Everything that decides what the output is (processors, criteria,
limits) is the target's and is applied token by token exactly as plain `generate` does; the drafter only decides how
many of the tokens come out of one pass.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..drafter import Drafter
from ..scheduling import VerifyScheduler
from .call import Call, DraftOptions, prepare_call
from .candidate_generator import Draft, no_draft
from .context_memory import prepare_context
from .prompt_pass import feed_prompt
from .rows_target_pass import states_of_row
from .target_pass import TargetOutput
from .telemetry import Round, current_recorder, stage
from .token_choice import TokenChoice, choose_at_once


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
        num_assistant_tokens: Drafts per round; the drafter's `generation_config` by default.
        assistant_confidence_threshold: A round's drafts end before the first slot less confident than this.
        verify_scheduler: Decides instead how many of each row's drafts are verified: an object or the name of one.
        drafting_backoff: Whether drafting pauses while it does not pay; on by default.

    Returns:
        What plain `generate` would return: token ids `[B, L]`, or a `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: for calls that have no exact answer here; each message says what to do instead.
    """
    with contextlib.ExitStack() as ending:
        if streamer is not None:
            ending.callback(streamer.end)
        options = DraftOptions(num_assistant_tokens, assistant_confidence_threshold, verify_scheduler, drafting_backoff)
        prepared = (model, input_ids, logits_processor, stopping_criteria, generation_config)
        call = prepare_call(*prepared, drafter, streamer, options, model_kwargs)
        ending.callback(call.prompt.end)
        with stage("prompt"):
            feed_prompts(call, input_ids)
        while call.rows:
            run_round(call)
        return call.result()


def feed_prompts(call: Call, input_ids: torch.Tensor) -> None:
    """The prompts `[B, P]`: their features become the drafter's context, their last logits give the first anchors."""
    prepare_context(call.prompt, call.generator.context, input_ids)
    for fed in feed_prompt(call.prompt, input_ids):
        call.generator.context.add_prompt(fed.context_features, fed.attended)
    num_rows = len(call.rows)
    rows = [
        fed._replace(logits=fed.logits[row : row + 1], raw=states_of_row(fed.raw, row, num_rows)) for row in call.rows
    ]
    commit(call, rows, [no_draft()] * num_rows)
    call.begin_rounds()


def run_round(call: Call) -> None:
    """One draft-verify-commit of the rows still being decoded."""
    rows, ids = call.rows, [call.outputs[row].ids for row in call.rows]
    with stage("draft"):
        wanted = call.backoff.wants_drafts(rows)
        max_drafts = [call.max_drafts(row) if wants else 0 for row, wants in zip(rows, wanted, strict=True)]
        draft = call.generator.draft(ids, max_drafts)
        drafts = [draft.of_row(place) for place in range(len(rows))]

    with stage("verify"):
        fed = call.target.verify(ids, [own.ids for own in drafts])

    with stage("commit"):
        try:
            choices = commit(call, fed, drafts)
        finally:  # Whatever a criterion or streamer raises, the cache keeps no rejected draft.
            changes = [call.outputs[row].ids.shape[1] - before.shape[1] for row, before in zip(rows, ids, strict=True)]
            call.target.commit(changes)
        counts = [max(change, 0) for change in changes]  # Rows that were ahead when the batch ended became shorter.
        call.generator.context.add([own.context_features[0] for own in fed], counts)
        # Where there was only no room for drafts, the round says nothing about what they are worth.
        if any(max_drafts) or not any(wanted):
            call.backoff.observe(rows, draft.lengths, [max(count - 1, 0) for count in counts])
        call.drop_finished_rows()

    if (recorder := current_recorder()) is not None:
        parts = zip(rows, wanted, drafts, choices, counts, strict=True)
        recorder.add(
            [
                Round.cut_to_output(
                    row=row,
                    drafted=draft.ids.shape[1] if wants else 0,
                    verified=own.ids.shape[1],
                    accepted=choice.num_accepted,
                    committed=count,
                    confidence=[] if own.confidence is None else own.confidence[0].tolist(),
                    skipped=not wants,
                )
                for row, wants, own, choice, count in parts
            ]
        )


def commit(call: Call, fed: list[TargetOutput], drafts: list[Draft]) -> list[TokenChoice]:
    """Chooses the tokens of each row from what the target said of its drafts, and adds them to the outputs."""
    parts = list(zip(call.rows, fed, drafts, strict=True))
    choices = [TokenChoice(call.processors[row], call.do_sample, own.logits, draft) for row, own, draft in parts]
    if call.chooses_at_once:
        choose_at_once(choices)
    for (row, own, _), choice in zip(parts, choices, strict=True):
        call.outputs[row].commit(choice, own)
    call.end_where_criteria_say()
    return choices
