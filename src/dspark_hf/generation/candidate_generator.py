"""The part of drafting that is the same for all kinds of drafter: from context and anchors to candidate tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..drafter import Drafter
from ..scheduling import FixedLength, VerifyScheduler, calibrated_confidence
from .draft_context import DraftContext
from .draft_sampler import DraftSampler, PositionRaces
from .logits_process import drafting_processors
from .telemetry import stage


class Draft(NamedTuple):
    """
    Candidates of one round.

    Args:
        ids: Draft tokens, `[B, G]`.
        probs: The distribution each was drawn from, over the target's vocabulary, `[B, G, V]`; `None` for greedy drafts.
        confidence: `c_k` of each slot, `[B, G]`; `None` without a confidence head or when nothing needs it.
        lengths: How many leading drafts of each row are sent to the target.
    """

    ids: torch.Tensor
    probs: torch.Tensor | None
    confidence: torch.Tensor | None
    lengths: list[int]

    def of_row(self, row: int) -> Draft:
        """The drafts sent to the target for one row, `[1, lengths[row]]`."""
        length = self.lengths[row]
        return Draft(
            self.ids[row : row + 1, :length],
            None if self.probs is None else self.probs[row : row + 1, :length],
            None if self.confidence is None else self.confidence[row : row + 1],
            [length],
        )


def no_draft(num_rows: int = 1) -> Draft:
    """A draft without tokens: the round is a step of plain decoding."""
    return Draft(torch.zeros(num_rows, 0, dtype=torch.long), None, None, [0] * num_rows)


class DrafterCandidateGenerator(CandidateGenerator, ABC):
    """
    Drafts for the rows of one `generate` call.

    Args:
        drafter: The drafter.
        target: The target it drafts for; the drafter borrows its embeddings.
        logits_processors: The processors of each row; the stateless ones among them are applied to drafts too.
        do_sample: Whether drafts are drawn or the most likely ones.
        num_draft_tokens: Drafts per round, at most what a block gives.
        scheduler: Decides how many of a row's drafts are verified; all by default.
        want_confidence: Compute confidences even when the scheduler does not need them.

    Attributes:
        context (`DraftContext`): The drafter's context of each row; the decoding loop adds what each round committed.
        races (*optional*): For each row the random numbers of its coming tokens, see [`DraftSampler`].
        head (`LogitsProcessor`, *optional*): Adds to the base logits of a slot the part that depends on the token before it.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: Drafter,
        target: PreTrainedModel,
        logits_processors: Sequence[LogitsProcessorList] = (LogitsProcessorList(),),
        *,
        do_sample: bool = False,
        num_draft_tokens: int | None = None,
        scheduler: VerifyScheduler | None = None,
        want_confidence: bool = False,
    ):
        self.drafter = drafter
        self.embeddings = drafter.bind(target)
        self.logits_processors = [drafting_processors(processors) for processors in logits_processors]
        self.do_sample = do_sample
        self.num_draft_tokens = drafter.config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        self.scheduler = scheduler if scheduler is not None else FixedLength()
        self.scheduler.start()
        self.wants_confidence = drafter.config.gives_confidence and (want_confidence or self.scheduler.needs_confidence)
        self.rows = list(range(len(logits_processors)))  # Batch index of each row still being decoded.
        self.context = DraftContext(drafter, len(logits_processors))
        self.races: Sequence[PositionRaces | None] | None = None
        self.head: LogitsProcessor | None = None

    def draft(self, input_ids: Sequence[torch.Tensor], max_drafts: Sequence[int]) -> Draft:
        """
        Drafts the tokens that follow each row.

        Args:
            input_ids: For each row all tokens so far, the anchor last, `[1, L_row]`.
            max_drafts: For each row the most drafts it can use.
        """
        num_drafts = min(self.num_draft_tokens, max(max_drafts))
        if num_drafts <= 0:
            return no_draft(len(input_ids))
        input_ids = [ids.to(self.drafter.device) for ids in input_ids]
        self.scheduler.most_drafts = sum(min(num_drafts, length) for length in max_drafts)
        with self.context.mode():
            self.context.get_ready(input_ids)
            hidden_states, base_logits = self.backbone_pass(input_ids, num_drafts)
            return self.sequential_stage(input_ids, hidden_states, base_logits, max_drafts)

    @property
    def ends_early(self) -> bool:
        """
        Whether a draft ends as soon as the scheduler verifies no more of it, which it is asked before each slot.

        To ask, the confidence is read from the device. An accelerator would wait for that longer than for the remaining slots
        of a block, so there the block is drafted whole and the scheduler is asked once. On a CPU reading costs nothing, and
        a drafter that takes a pass for each slot has more to lose than a read.
        """
        return self.drafter.device.type == "cpu" or self.drafter.passes_per_round > 1

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows still being decoded."""
        self.context.keep_rows(rows)
        self.rows = [self.rows[row] for row in rows]
        self.logits_processors = [self.logits_processors[row] for row in rows]

    # ------------------------------------------------------------------ the two stages of a draft

    @abstractmethod
    def backbone_pass(self, input_ids: Sequence[torch.Tensor], num_drafts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """
        The computation before the first draft is drawn.

        Args:
            input_ids: For each row all tokens so far, the anchor last, `[1, L_row]`.
            num_drafts: Drafts that are wanted.

        Returns:
            Hidden states `[B, G, D]` and base logits `[B, G, V_draft]` of the `G` drafts. `head` adds to the logits the part that
            depends on the tokens drawn before.
        """

    def sequential_stage(
        self,
        input_ids: Sequence[torch.Tensor],
        hidden_states: torch.Tensor,
        base_logits: torch.Tensor,
        max_drafts: Sequence[int],
    ) -> Draft:
        """Draws the drafts from left to right, each given the token before it."""
        config = self.drafter.config
        sampler = DraftSampler(
            self.logits_processors,
            input_ids,
            self.do_sample,
            self.drafter.draft_token_ids,
            config.vocab_size,
            self.races,
        )
        anchor_ids = sampler.last_ids
        confidences: list[torch.Tensor] = []
        with stage("sequential stage"):
            for slot, scores in enumerate(base_logits.unbind(1)):
                # Asked before x_k is drawn: whether slot k is verified must not depend on the token drawn there.
                if self.wants_confidence and self.ends_early:
                    confidences.append(self.confidence(slot, hidden_states[:, slot : slot + 1], sampler.last_ids))
                    if not self.scheduler.keeps_drafting(torch.cat(confidences, dim=1), max_drafts, self.rows):
                        break
                if self.head is not None:
                    scores = self.head(sampler.last_ids, scores)
                sampler.draw(scores)
        ids = sampler.ids()
        if self.wants_confidence and not self.ends_early:  # Each looks at the token before its slot alone, as above.
            previous_ids = torch.cat([anchor_ids, ids[:, :-1]], dim=1)
            confidences.append(self.confidence(0, hidden_states, previous_ids))
        confidence = torch.cat(confidences, dim=1) if confidences else None
        useful = [min(length, ids.shape[1]) for length in max_drafts]
        return Draft(ids, sampler.probs(), confidence, self.scheduler.schedule(confidence, useful, self.rows))

    def confidence(self, start: int, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """
        Calibrated `c_k` of `n` slots from `start` on, `[B, n]`, from their hidden states `[B, n, D]` and the tokens before them
        `[B, n]`.
        """
        with stage("confidence"):
            logits = self.drafter.confidence_logits(hidden_states, previous_ids)
            temperatures = self.drafter.config.confidence_temperatures
            return calibrated_confidence(logits, temperatures[start:] if temperatures else None)

    # ------------------------------------------------------------------ the interface of transformers

    def get_candidates(  # type: ignore[override]  # Declared for LongTensor, an older type of tensors.
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The interface of transformers' assisted generation: returns `input_ids` with the drafts appended, and their log
        probabilities `[B, G, V]` (`None` for greedy drafts). The features of the tokens so far must be in `context`.
        """
        draft = self.draft(input_ids.split(1), [self.num_draft_tokens] * len(input_ids))
        kept = draft.ids[:, : max(draft.lengths)].to(input_ids.device)
        log_probs = None if draft.probs is None else draft.probs[:, : kept.shape[1]].log()
        return torch.cat([input_ids, kept], dim=1), log_probs

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Does nothing: draft lengths depend on the settings and the confidences of each round only."""
