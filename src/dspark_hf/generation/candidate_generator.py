"""Context features in, a block of candidates out. Owns the draft cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..draft_cache import DraftCache
from ..modeling_dspark import DSparkDrafter
from ..sampling import drafting_law, draw
from .logits_process import SequentialHeadLogitsProcessor, drafting_processors


class Draft(NamedTuple):
    """
    Candidates of one round.

    Args:
        ids: Draft tokens, `[B, G]`.
        probs: The law each was drawn from, over the target's vocabulary, `[B, G, V]`; `None` for greedy drafts.
        confidence: `c_k` of each slot, `[B, G]`; `None` without a confidence head or when nobody asks.
        lengths: Leading drafts of each row that are confident enough to verify.
    """

    ids: torch.LongTensor
    probs: torch.Tensor | None
    confidence: torch.Tensor | None
    lengths: list[int]


NO_DRAFT = Draft(torch.zeros(1, 0, dtype=torch.long), None, None, [0])  # type: ignore[arg-type]


class DSparkCandidateGenerator(CandidateGenerator):
    """
    Drafts for the rows of one `generate` call.

    Args:
        drafter: The drafter.
        target: The target it drafts for; the drafter borrows its embeddings.
        logits_processor: The processors of the call; drafts are warped with the stateless ones among them.
        do_sample: Whether drafts are drawn or the most likely ones.
        num_draft_tokens: Drafts a round, at most what a block gives.
        confidence_threshold: A row's drafts end before its first slot less confident than this; 0 keeps all.
        num_rows: Rows of the batch.
        want_confidence: Compute confidences even when no threshold needs them.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: DSparkDrafter,
        target: PreTrainedModel,
        logits_processor: LogitsProcessorList | None = None,
        *,
        do_sample: bool = False,
        num_draft_tokens: int | None = None,
        confidence_threshold: float = 0.0,
        num_rows: int = 1,
        want_confidence: bool = False,
    ):
        self.drafter = drafter
        self.embeddings = drafter.bind(target)
        self.logits_processor = drafting_processors(logits_processor or LogitsProcessorList())
        self.do_sample = do_sample
        self.num_draft_tokens = drafter.config.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        self.confidence_threshold = confidence_threshold
        self.wants_confidence = drafter.confidence_head is not None and (want_confidence or confidence_threshold > 0)
        self.cache = DraftCache(len(drafter.layers), num_rows)
        # Context starts later than position 0 when the target's cache holds tokens that the drafter cannot know.
        self.first_position = 0
        self._head = SequentialHeadLogitsProcessor(drafter.markov_head) if drafter.markov_head else None

    def observe(self, context_features: torch.Tensor, counts: list[int] | None = None) -> None:
        """
        Takes in the features of tokens that are final: the prompt, then what each round accepted.

        Args:
            context_features: Tapped hidden states, `[B, T, m * D_target]`.
            counts: How many of the `T` belong to each row; all by default.
        """
        features = context_features.to(self.drafter.device)
        position_ids = self._next_positions(features.shape[1])
        self.drafter.extend_cache(self.cache, features, position_ids, counts)

    def observe_prompt(self, context_features: torch.Tensor, attended: torch.BoolTensor | None) -> None:
        """
        Takes in prompt features without padding.

        Args:
            context_features: `[1, T, m * D_target]`.
            attended: False at padding, `[1, T]`; `None` when there is none.
        """
        if attended is not None:
            context_features = context_features[:, attended[0].to(context_features.device)]
        self.observe(context_features)

    def draft(self, input_ids: torch.LongTensor, max_drafts: int) -> Draft:
        """
        Drafts the tokens that follow `input_ids`.

        Args:
            input_ids: All tokens so far, the anchor last, `[B, L]`.
            max_drafts: No more drafts than this are of use.
        """
        num_drafts = min(self.num_draft_tokens, max_drafts)
        if num_drafts <= 0:
            return NO_DRAFT
        input_ids = input_ids.to(self.drafter.device)  # type: ignore[assignment]
        hidden_states = self._block_hidden_states(input_ids[:, -1], num_drafts)  # [B, G, D]
        base_logits = self.drafter.base_logits(hidden_states, self.embeddings)  # [B, G, V_draft]
        if self._head is not None:
            self._head.begin_block(hidden_states)
        return self._sequential_stage(input_ids, hidden_states, base_logits)

    def get_candidates(self, input_ids: torch.LongTensor, **kwargs) -> tuple[torch.LongTensor, torch.Tensor | None]:
        """
        The interface of transformers' assisted generation: `input_ids` with the drafts appended, and their log
        probabilities `[B, G, V]` (`None` for greedy drafts). Context is what was given to
        [`~DSparkCandidateGenerator.observe`].
        """
        draft = self.draft(input_ids, self.num_draft_tokens)
        kept = draft.ids[:, : max(draft.lengths)].to(input_ids.device)
        log_probs = None if draft.probs is None else draft.probs[:, : kept.shape[1]].log()
        return torch.cat([input_ids, kept], dim=1), log_probs  # type: ignore[return-value]

    def update_candidate_strategy(self, input_ids: torch.LongTensor, scores: torch.Tensor, num_matches: int) -> None:
        """Nothing to adapt: draft lengths come from the settings and the confidence of each round."""

    # ------------------------------------------------------------------ stages

    def _next_positions(self, num_tokens: int) -> torch.LongTensor:
        """Absolute positions of the `num_tokens` tokens after each row's context, `[B, num_tokens]`."""
        starts = torch.tensor(self.cache.lengths, device=self.drafter.device) + self.first_position
        return starts[:, None] + torch.arange(num_tokens, device=starts.device)  # type: ignore[return-value]

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

    def _sequential_stage(self, input_ids: torch.Tensor, hidden_states: torch.Tensor, base_logits: torch.Tensor):
        """Draws the drafts left to right, each slot seeing the token before it."""
        token_ids = self.drafter.draft_token_ids
        full_vocabulary = bool(self.logits_processor) or self.do_sample
        sequence, ids, probs, confidence = input_ids, [], [], []
        for slot in range(base_logits.shape[1]):
            # Before x_k exists: the cut at slot k must not depend on the token drawn there.
            if self.wants_confidence:
                confidence.append(self._confidence(slot, hidden_states[:, slot], sequence[:, -1]))
                if (confidence[-1] < self.confidence_threshold).all():
                    break
            scores = base_logits[:, slot]
            if self._head is not None:
                scores = self._head(sequence, scores)  # type: ignore[arg-type]
            if full_vocabulary:
                scores = self.logits_processor(sequence, self._over_full_vocabulary(scores))  # type: ignore[arg-type]
            if self.do_sample:
                probs.append(drafting_law(scores))
                next_ids = draw(probs[-1])
            else:
                next_ids = scores.argmax(-1)  # type: ignore[assignment]
                if token_ids is not None and not full_vocabulary:
                    next_ids = token_ids[next_ids]  # type: ignore[assignment]
            ids.append(next_ids)
            sequence = torch.cat([sequence, next_ids[:, None]], dim=1)
        stacked = torch.stack(confidence, dim=1) if confidence else None
        return Draft(
            sequence[:, input_ids.shape[1] :],  # type: ignore[arg-type]
            torch.stack(probs, dim=1) if probs else None,
            stacked,
            self._confident_lengths(stacked, len(ids), len(input_ids)),
        )

    def _confidence(self, slot: int, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """Calibrated `c_k` of one slot, `[B]`."""
        embeddings = self.drafter.markov_head.markov_w1(previous_ids) if self.drafter.markov_head else None
        logits = self.drafter.confidence_head(hidden_states, embeddings).float()  # type: ignore[misc]
        temperatures = self.drafter.config.confidence_temperatures
        return torch.sigmoid(logits / temperatures[slot] if temperatures else logits)

    def _confident_lengths(self, confidence: torch.Tensor | None, num_drafts: int, num_rows: int) -> list[int]:
        """Drafts before the first slot below the threshold (algorithm of paper section 3.3, static threshold)."""
        if confidence is None or self.confidence_threshold <= 0:
            return [num_drafts] * num_rows
        confident = (confidence >= self.confidence_threshold).long().cumprod(1).sum(1)
        return confident.clamp(max=num_drafts).tolist()

    def _over_full_vocabulary(self, scores: torch.Tensor) -> torch.Tensor:
        """Draft scores spread over the target's vocabulary; tokens outside the draft vocabulary get probability 0."""
        token_ids = self.drafter.draft_token_ids
        if token_ids is None:
            return scores
        full = scores.new_full((len(scores), self.drafter.config.vocab_size), float("-inf"))
        return full.index_copy_(1, token_ids, scores)
