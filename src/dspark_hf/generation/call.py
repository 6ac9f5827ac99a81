"""A `generate` call with a drafter: checks it and builds the objects that decode it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..ragged.target import CannotShareRows
from ..rope_limit import RopeLimit, rope_limit
from ..scheduling import NoBackoff, RowsBackoff
from ..transformers_names import GenerativeModel, pad_token_of
from .batch_steps import BatchSteps
from .candidate_generator import Draft, DrafterCandidateGenerator
from .context_memory import remember
from .draft_settings import DraftOptions, backoff_of, draft_settings
from .generators import generator_of
from .logits_process import is_rowwise
from .output import Output
from .pass_trial import check_passes
from .prompt_pass import check_prompt
from .requirements import check_call, unwrap_drafter
from .returned import Returned, assemble, padded
from .rollback import has_states
from .row_processors import processors_for_row
from .rows_target_pass import RowsTargetPass
from .shared_rows_target_pass import SharedRowsTargetPass
from .shared_states import can_share
from .single_rows_target_pass import SingleRowsTargetPass
from .stopping import StoppingRules
from .target_pass import TargetPass
from .telemetry import Round, current_recorder
from .token_choice import TokenChoice

# Tokens that may be fed again in one pass. Where there are more, a round without drafts, which nothing can reject, brings the
# cache up to date.
MOST_FED_AGAIN = 16


@dataclass
class Call:
    """
    The state of one `generate` call.

    Args:
        generator: Drafts, for the rows still being decoded.
        prompt: Runs the target over the prompts.
        target: Runs the target in each round, for the rows still being decoded.
        outputs: The output of each row of the batch.
        steps: The batch as streamers and criteria see it; `None` for one row, or when there are none of either.
        processors: The logits processors of each row of the batch.
        do_sample: Whether tokens are drawn or the most likely ones.
        chooses_at_once: Whether all tokens of a round are chosen together, or each only after the previous one is committed.
        backoff: Decides, from earlier rounds, which rows draft.
        rope: The length at which the target's rotary positions change, if they do.
        generation_config: As `generate` prepared it.
        rows: Batch index of each row still being decoded.
    """

    generator: DrafterCandidateGenerator
    prompt: TargetPass
    target: TargetPass | RowsTargetPass | SingleRowsTargetPass | SharedRowsTargetPass
    outputs: list[Output]
    steps: BatchSteps | None
    processors: list[LogitsProcessorList]
    do_sample: bool
    chooses_at_once: bool
    backoff: RowsBackoff | NoBackoff
    rope: RopeLimit | None
    generation_config: GenerationConfig
    rows: list[int]

    def begin_rounds(self) -> None:
        """Called once the prompts are fed and each row has its first token."""
        if len(self.outputs) > 1 and any(has_states(layer) for layer in self.prompt.cache.layers):
            if self.prompt.keeps_cache:
                self.target = SingleRowsTargetPass(self.prompt, "the cache is to be returned")
            elif can_share(self.prompt.model, self.prompt.cache):
                self.target = SharedRowsTargetPass(self.prompt)
            else:
                self.target = SingleRowsTargetPass(self.prompt, "rows of different lengths cannot share its states")
        elif len(self.outputs) > 1:
            try:
                self.target = RowsTargetPass(self.prompt, self.prompt.keeps_cache)
            except CannotShareRows as error:
                self.target = SingleRowsTargetPass(self.prompt, error.reason)
        self.drop_finished_rows()

    def max_drafts(self, row: int, num_owed: int) -> int:
        """The most drafts that a row can use in the coming round, of which `num_owed` tokens are to be fed again."""
        output = self.outputs[row]
        if self.prompt.forgets_context or num_owed > MOST_FED_AGAIN:
            return 0
        uncounted = self.prompt.uncounted_id
        if uncounted is not None and uncounted in output.ids[0, -1 - num_owed :].tolist():
            return 0
        # A round always adds one token of the target, so the last free place is not for a draft.
        longest = min(self.generator.num_draft_tokens, output.room - 1)
        return longest if self.rope is None else min(longest, self.rope.max_drafts(output.ids.shape[1]))

    def cut_behind_uncounted(self, draft: Draft) -> Draft:
        """Leaves out drafts behind a token that the target does not count; most targets count all."""
        uncounted = self.prompt.uncounted_id
        if uncounted is None:
            return draft
        rows = zip(draft.ids.tolist(), draft.lengths, strict=True)
        lengths = [ids.index(uncounted) + 1 if uncounted in ids[:length] else length for ids, length in rows]
        return draft._replace(lengths=lengths)

    def end_where_criteria_say(self) -> None:
        """Asks the criteria that look at the whole batch."""
        if self.steps is not None:
            self.steps.advance()

    def drop_finished_rows(self) -> None:
        """Removes finished rows from the drafter and the target."""
        places = [place for place, row in enumerate(self.rows) if not self.outputs[row].is_finished]
        if len(self.outputs) > 1 and len(places) < len(self.rows):
            self.generator.keep_rows(places)
            self.target.keep_rows(places)
        self.rows = [self.rows[place] for place in places]

    def record(
        self,
        rows: list[int],
        wanted: list[bool],
        num_owed: list[int],
        num_drafted: int,
        drafts: list[Draft],
        choices: list[TokenChoice],
        counts: list[int],
    ) -> None:
        """Tells the active recorder, if any, what happened to each row in a round."""
        if (recorder := current_recorder()) is None:
            return
        parts = zip(rows, wanted, num_owed, drafts, choices, counts, strict=True)
        recorder.add(
            [
                Round.cut_to_output(
                    row=row,
                    drafted=num_drafted if wants else 0,
                    verified=draft.ids.shape[1],
                    accepted=choice.num_accepted,
                    committed=count,
                    confidence=[] if draft.confidence is None else draft.confidence[0].tolist(),
                    skipped=not wants,
                    fed=owed + 1 + draft.ids.shape[1],
                )
                for row, wants, owed, draft, choice, count in parts
            ]
        )

    def result(self) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What plain `generate` would return. With one row, the drafter's context is kept for a call that continues it."""
        ids = [output.ids for output in self.outputs]
        pad_token_id, returned = pad_token_of(self.generation_config), [output.returned for output in self.outputs]
        sequences = padded(ids, pad_token_id)
        cache = self.target.finish(sequences, [output.num_new for output in self.outputs])
        are_all_known = ids[0].shape[1] == self.prompt.past_length + 1  # Every token in the cache has its id here.
        if len(ids) == 1 and are_all_known and self.prompt.keeps_cache:
            context = self.generator.context.complete(ids)
            remember(self.prompt.cache, self.generator.drafter, ids[0][:, :-1], context)
        return assemble(sequences, returned, self.generation_config, cache)

    def end(self) -> None:
        """Leaves the target as it was before the call, whatever has ended it."""
        self.prompt.end(self.outputs[0].ids if len(self.outputs) == 1 else None)


def prepare_call(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Any,
    streamer: BaseStreamer | None,
    options: DraftOptions,
    model_kwargs: dict[str, Any],
) -> Call:
    """
    Checks a call and builds its parts, without running a model.

    Args: as in [`~dspark_hf.dspark_generate`].

    Raises:
        ValueError: for calls that have no exact answer here.
    """
    base = unwrap_drafter(drafter)
    if base is None:
        raise ValueError(
            f"drafter= must be a drafter of dspark_hf, got {type(drafter).__name__}. Load one, for instance with "
            "Drafter.from_pretrained(path)."
        )
    rope = rope_limit(model)
    check_call(model, input_ids, generation_config, rope)
    num_drafts, scheduler = draft_settings(base, model, options)
    check_passes(model)
    num_rows, do_sample = len(input_ids), bool(generation_config.do_sample)
    rules = StoppingRules(stopping_criteria, generation_config)
    processors = [processors_for_row(logits_processor, row, num_rows) for row in range(num_rows)]
    generator = generator_of(base)(
        base,
        model,
        processors,
        do_sample=do_sample,
        num_draft_tokens=num_drafts,
        scheduler=scheduler,
        want_confidence=current_recorder() is not None,
    )
    prompt = TargetPass(model, model_kwargs, generation_config, base.config.hidden_state_indices, num_rows)
    is_alone = num_rows == 1
    check_prompt(prompt, input_ids)
    if rope is not None and is_alone and (attended := prompt.attended_columns(0, input_ids.shape[1])) is not None:
        rope = rope._replace(num_padding=int((~attended).sum()))
    outputs = [
        Output(row, rules, Returned(generation_config), is_alone, streamer if is_alone else None)
        for row in input_ids.split(1)
    ]
    steps = None
    if not is_alone and (rules.has_others or streamer is not None):
        steps = BatchSteps(outputs, rules, streamer, pad_token_of(generation_config))
    return Call(
        generator,
        prompt,
        prompt,
        outputs,
        steps,
        processors,
        do_sample,
        chooses_at_once=is_rowwise(logits_processor) and not (is_alone and rules.has_others),
        backoff=backoff_of(base, model, scheduler, num_rows, options.drafting_backoff),
        rope=rope,
        generation_config=generation_config,
        rows=list(range(num_rows)),
    )
