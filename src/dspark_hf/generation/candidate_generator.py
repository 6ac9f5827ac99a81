"""Context features in, a block of candidates out. Owns the draft cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..draft_cache import DraftCache
from ..drafter import Drafter
from ..sampling import drafting_law, draw
from ..scheduling import FixedLength, RowsBackoff, VerifyScheduler, calibrated_confidence
from .logits_process import DraftWarper, SequentialHeadLogitsProcessor, drafting_processors

_MAX_PENDING = 256  # Rounds whose features are kept before they are projected.


class Draft(NamedTuple):
    """
    Candidates of one round.

    Args:
        ids: Draft tokens, `[B, G]`.
        probs: The law each was drawn from, over the target's vocabulary, `[B, G, V]`; `None` for greedy drafts.
        confidence: `c_k` of each slot, `[B, G]`; `None` without a confidence head or when nobody asks.
        lengths: Leading drafts of each row that the schedule sends to the target.
        wanted: Which rows were to draft at all: drafting pauses where it does not pay. Empty for all.
    """

    ids: torch.Tensor
    probs: torch.Tensor | None
    confidence: torch.Tensor | None
    lengths: list[int]
    wanted: Sequence[bool] = ()

    def of_row(self, row: int) -> Draft:
        """What is sent to the target for one row, `[1, lengths[row]]`."""
        length = self.lengths[row]
        return Draft(
            self.ids[row : row + 1, :length],
            None if self.probs is None else self.probs[row : row + 1, :length],
            None if self.confidence is None else self.confidence[row : row + 1],
            [length],
            self.wanted[row : row + 1],
        )


def no_draft(num_rows: int = 1, wanted: Sequence[bool] = ()) -> Draft:
    """A draft of nothing: the round is a step of plain decoding."""
    return Draft(torch.zeros(num_rows, 0, dtype=torch.long), None, None, [0] * num_rows, wanted)


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Drafts for the rows of one `generate` call.

    Args:
        drafter: The drafter.
        target: The target it drafts for; the drafter borrows its embeddings.
        logits_processors: The processors of each row; drafts are warped with the stateless ones among them.
        do_sample: Whether drafts are drawn or the most likely ones.
        num_draft_tokens: Drafts a round, at most what a block gives.
        scheduler: Decides how many of a row's drafts are verified; all by default.
        backoff: Decides, from earlier rounds, which rows draft at all; all by default.
        want_confidence: Compute confidences even when the scheduler does not need them.
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
        backoff: RowsBackoff | None = None,
        want_confidence: bool = False,
    ):
        self.drafter = drafter
        self.embeddings = drafter.bind(target)
        self.logits_processors = [drafting_processors(own) for own in logits_processors]
        self.do_sample = do_sample
        self.num_draft_tokens = drafter.config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        self.scheduler = scheduler if scheduler is not None else FixedLength()
        self.scheduler.start()
        self.backoff = backoff
        self.wants_confidence = drafter.confidence_head is not None and (
            want_confidence or self.scheduler.needs_confidence
        )
        num_rows = len(self.logits_processors)
        self.rows = list(range(num_rows))  # Batch index of each row still being decoded.
        self.cache = DraftCache(len(drafter.layers), num_rows)
        # Context starts later than position 0 when the target's cache holds tokens that the drafter cannot know.
        self.first_positions = [0] * num_rows
        self._lengths: list[int] | None = None  # Drafts of each row in the round at hand.
        self._pending: list[list[torch.Tensor]] = [[] for _ in range(num_rows)]  # Features not projected yet.
        self._head = SequentialHeadLogitsProcessor(drafter.markov_head) if drafter.markov_head else None

    def observe(self, context_features: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
        """
        Takes in the features of tokens that are final: of the prompt, then of what each round committed.

        While drafting pauses they are only kept, and projected together once they are needed.

        Args:
            context_features: Of each row its tapped hidden states, `[T_row, m * D_target]`.
            counts: How many of them, from the first, are final.
        """
        if self.backoff is not None and self._lengths is not None:
            self.backoff.observe(self.rows, self._lengths, [count - 1 for count in counts])
        self._lengths = None
        for pending, row, count in zip(self._pending, context_features, counts, strict=True):
            pending.append(row[:count])
        if any(self._wanted()) or len(self._pending[0]) >= _MAX_PENDING:
            self.catch_up()

    def catch_up(self) -> None:
        """Projects the features that are still waiting for it."""
        rows = [torch.cat(pending).to(self.drafter.device) for pending in self._pending if pending]
        if not rows:
            return
        counts = [len(row) for row in rows]
        features = rows[0][None] if len(rows) == 1 else torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        self.drafter.extend_cache(self.cache, features, self._next_positions(features.shape[1]), counts)
        self._pending = [[] for _ in rows]

    def settle(self, input_ids: Sequence[torch.Tensor]) -> DraftCache:
        """The draft cache over all tokens of each row `[1, L_row]` but the last, for whoever goes on from there."""
        self.catch_up()
        return self.cache

    def observe_prompt(self, context_features: torch.Tensor, attended: torch.Tensor | None) -> None:
        """
        Takes in prompt features without padding.

        Args:
            context_features: `[B, T, m * D_target]`.
            attended: False at padding, `[B, T]`; `None` when there is none.
        """
        rows = list(context_features)
        if attended is not None:
            attended = attended.to(context_features.device)
            rows = [row[keep] for row, keep in zip(rows, attended, strict=True)]
        self.observe(rows, [len(row) for row in rows])

    def keep_rows(self, rows: list[int]) -> None:
        """Keeps only these of the rows still being decoded."""
        self.cache.select_rows(rows)
        self.rows = [self.rows[row] for row in rows]
        self.first_positions = [self.first_positions[row] for row in rows]
        self.logits_processors = [self.logits_processors[row] for row in rows]
        self._pending = [self._pending[row] for row in rows]

    def draft(self, input_ids: Sequence[torch.Tensor], max_drafts: Sequence[int]) -> Draft:
        """
        Drafts the tokens that follow each row.

        Args:
            input_ids: For each row all tokens so far, the anchor last, `[1, L_row]`.
            max_drafts: For each row how many drafts are of use at most.
        """
        wanted = self._wanted()
        max_drafts = [length if wants else 0 for length, wants in zip(max_drafts, wanted, strict=True)]
        num_drafts = min(self.num_draft_tokens, max(max_drafts))
        if num_drafts > 0:
            draft = self._draft(input_ids, num_drafts, max_drafts)._replace(wanted=wanted)
        else:
            draft = no_draft(len(input_ids), wanted)
        # Where there is only no room for drafts, the round says nothing about what they are worth.
        self._lengths = draft.lengths if num_drafts > 0 or not any(wanted) else None
        return draft

    def get_candidates(self, input_ids: torch.Tensor, **kwargs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        The interface of transformers' assisted generation: `input_ids` with the drafts appended, and their log
        probabilities `[B, G, V]` (`None` for greedy drafts). Context is what was given to
        [`~DSparkCandidateGenerator.observe`].
        """
        draft = self.draft(input_ids.split(1), [self.num_draft_tokens] * len(input_ids))
        kept = draft.ids[:, : max(draft.lengths)].to(input_ids.device)
        log_probs = None if draft.probs is None else draft.probs[:, : kept.shape[1]].log()
        return torch.cat([input_ids, kept], dim=1), log_probs

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: draft lengths come from the settings and the confidence of each round."""

    # ------------------------------------------------------------------ stages

    def _wanted(self) -> list[bool]:
        """Which rows draft in the coming round."""
        return [True] * len(self.rows) if self.backoff is None else self.backoff.wants_drafts(self.rows)

    def _draft(self, input_ids: Sequence[torch.Tensor], num_drafts: int, max_drafts: Sequence[int]) -> Draft:
        """One block, its drafts drawn and scheduled."""
        input_ids = [ids.to(self.drafter.device) for ids in input_ids]
        anchor_ids = torch.cat([ids[:, -1] for ids in input_ids])  # [B]
        hidden_states = self._block_hidden_states(anchor_ids, num_drafts)  # [B, G, D]
        base_logits = self.drafter.base_logits(hidden_states, self.embeddings)  # [B, G, V_draft]
        if self._head is not None:
            self._head.begin_block(hidden_states)
        return self._sequential_stage(input_ids, hidden_states, base_logits, max_drafts)

    def _next_positions(self, num_tokens: int) -> torch.Tensor:
        """Absolute positions of the `num_tokens` tokens after each row's context, `[B, num_tokens]`."""
        starts = [length + first for length, first in zip(self.cache.lengths, self.first_positions, strict=True)]
        starts = torch.tensor(starts, device=self.drafter.device)
        return starts[:, None] + torch.arange(num_tokens, device=starts.device)

    def _block_hidden_states(self, anchor_ids: torch.Tensor, num_drafts: int) -> torch.Tensor:
        """One backbone pass over `[anchor, MASK, ...]`; the slots that predict, as far as they are needed."""
        config = self.drafter.config
        # The whole block, even for fewer drafts: the slots attend to each other, and training always saw all of them.
        block_ids = torch.full(
            (len(anchor_ids), config.block_size), config.mask_token_id or 0, device=anchor_ids.device
        )
        block_ids[:, 0] = anchor_ids
        output = self.drafter(
            block_ids, self._next_positions(config.block_size), draft_cache=self.cache, embeddings=self.embeddings
        )
        first = 0 if config.sample_from_anchor else 1
        return output.last_hidden_state[:, first : first + num_drafts]

    def _sequential_stage(
        self,
        input_ids: Sequence[torch.Tensor],
        hidden_states: torch.Tensor,
        base_logits: torch.Tensor,
        max_drafts: Sequence[int],
    ) -> Draft:
        """Draws the drafts left to right, each slot seeing the token before it."""
        warp = DraftWarper(self.logits_processors, input_ids)
        token_ids = self.drafter.draft_token_ids
        # Where the processors allow, laws are made over the draft vocabulary, which can be many times smaller.
        is_reduced = token_ids is not None and warp.ignores_token_ids
        previous_ids = torch.cat([ids[:, -1] for ids in input_ids])  # [B]
        ids, probs, confidence = [], [], []
        for slot in range(base_logits.shape[1]):
            # Before x_k exists: whether slot k is verified must not depend on the token drawn there.
            if self.wants_confidence:
                confidence.append(self._confidence(slot, hidden_states[:, slot], previous_ids))
                if not self.scheduler.keeps_drafting(torch.stack(confidence, dim=1), max_drafts, self.rows):
                    break
            scores = base_logits[:, slot]
            if self._head is not None:
                scores = self._head(previous_ids[:, None], scores)
            if not is_reduced:
                scores = self._over_full_vocabulary(scores, float("-inf"))
            scores = warp(scores)
            if self.do_sample:
                probs.append(drafting_law(scores))
                previous_ids = draw(probs[-1])
            else:
                previous_ids = scores.argmax(-1)
            if is_reduced:
                previous_ids = token_ids[previous_ids]
            ids.append(previous_ids)
            warp.append(previous_ids)
        stacked = torch.stack(confidence, dim=1) if confidence else None
        useful = [min(length, len(ids)) for length in max_drafts]
        return Draft(
            torch.stack(ids, dim=1) if ids else previous_ids.new_zeros(len(previous_ids), 0),
            self._laws(probs, is_reduced),
            stacked,
            self.scheduler.schedule(stacked, useful, self.rows),
        )

    def _confidence(self, slot: int, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """Calibrated `c_k` of one slot, `[B]`."""
        embeddings = self.drafter.markov_head.markov_w1(previous_ids) if self.drafter.markov_head else None
        logits = self.drafter.confidence_head(hidden_states, embeddings)
        temperatures = self.drafter.config.confidence_temperatures
        return calibrated_confidence(logits[:, None], temperatures[slot : slot + 1] if temperatures else None)[:, 0]

    def _laws(self, probs: list[torch.Tensor], is_reduced: bool) -> torch.Tensor | None:
        """The law of every slot over the target's vocabulary, `[B, G, V]`, from those of the slots."""
        if not probs:
            return None
        stacked = torch.stack(probs, dim=1)
        return self._over_full_vocabulary(stacked, 0.0) if is_reduced else stacked

    def _over_full_vocabulary(self, values: torch.Tensor, outside: float) -> torch.Tensor:
        """`[..., V_draft]` -> `[..., V]`; tokens outside the draft vocabulary get the value `outside`."""
        token_ids = self.drafter.draft_token_ids
        if token_ids is None:
            return values
        full = values.new_full((*values.shape[:-1], self.drafter.config.vocab_size), outside)
        return full.index_copy_(-1, token_ids, values)
