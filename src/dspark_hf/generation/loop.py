"""The decoding loop: draft, verify, commit, until the output is complete. Read this file first.

A round runs the target once over `[anchor, draft_1 .. draft_l]`, keeps the accepted drafts, adds one token of the target
after them, and makes that token the next anchor. Logits processors, stopping criteria and limits are applied token by token,
exactly as in plain `generate`. So the drafter has no influence on what the output is, only on how many tokens one pass gives.
"""

from __future__ import annotations

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from .call import Call
from .candidate_generator import Draft, no_draft
from .context_memory import prepare_context
from .prompt_pass import feed_prompt
from .rows_target_pass import states_of_row
from .target_model import TargetOutput
from .telemetry import stage
from .token_choice import TokenChoice, choose_at_once


def decode(call: Call, input_ids: torch.Tensor) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decodes the prompts `[B, P]` of a call and returns what plain `generate` would."""
    with stage("prompt"):
        feed_prompts(call, input_ids)
    while call.rows:
        run_round(call)
    return call.result()


def feed_prompts(call: Call, input_ids: torch.Tensor) -> None:
    """Runs the target over the prompts `[B, P]`: gives the drafter's context and the first anchors."""
    prepare_context(call.prompt, call.generator.context, input_ids)
    for fed in feed_prompt(call.prompt, input_ids):
        call.generator.context.add_prompt(fed.context_features, fed.attended)
    rows = [
        fed._replace(logits=fed.logits[row : row + 1], raw=states_of_row(fed.raw, row, call.prompt))
        for row in call.rows
    ]
    commit(call, rows, [no_draft()] * len(rows))
    call.begin_rounds()


def run_round(call: Call) -> None:
    """One round of draft, verify and commit for the rows still being decoded."""
    rows, ids = call.rows, [call.outputs[row].ids for row in call.rows]
    with stage("draft"):
        wanted = call.backoff.wants_drafts(rows)
        num_owed = call.target.num_owed
        parts = zip(rows, wanted, num_owed, strict=True)
        max_drafts = [call.max_drafts(row, owed) if wants else 0 for row, wants, owed in parts]
        call.generator.scheduler.num_fed_again = sum(num_owed)
        draft = call.cut_behind_uncounted(call.generator.draft(ids, max_drafts))
        drafts = [draft.of_row(place) for place in range(len(rows))]

    with stage("verify"):
        fed = call.target.verify(ids, [row_draft.ids for row_draft in drafts])

    with stage("commit"):
        try:
            choices = commit(call, fed, drafts)
        finally:  # Even if a criterion or streamer raises, no rejected draft stays in the cache.
            changes = [call.outputs[row].ids.shape[1] - before.shape[1] for row, before in zip(rows, ids, strict=True)]
            call.target.commit(changes)
        # When the batch ends, rows that were ahead of it are cut, so they may have become shorter.
        counts = [max(change, 0) for change in changes]
        call.generator.context.add([output.context_features[0] for output in fed], counts)
        # If there was no room for drafts, the round says nothing about whether they pay.
        if any(max_drafts) or any(num_owed) or not any(wanted):
            num_accepted = [max(count - 1, 0) for count in counts]
            call.backoff.observe(rows, draft.lengths, num_accepted, num_owed, has_drafted=any(max_drafts))
        call.drop_finished_rows()

    call.record(rows, wanted, num_owed, draft.ids.shape[1], drafts, choices, counts)


def commit(call: Call, fed: list[TargetOutput], drafts: list[Draft]) -> list[TokenChoice]:
    """Chooses the tokens of each row from the target's logits and the drafts, and adds them to the outputs."""
    choices = [
        TokenChoice(call.processors[row], call.do_sample, output.logits, draft)
        for row, output, draft in zip(call.rows, fed, drafts, strict=True)
    ]
    if call.chooses_at_once:
        choose_at_once(choices)
    for row, output, choice in zip(call.rows, fed, choices, strict=True):
        call.outputs[row].commit(choice, output)
    call.end_where_criteria_say()
    return choices
