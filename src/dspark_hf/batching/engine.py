"""The loop of continuous batching: give free rows to requests, feed their prompts, run a round, hand out what has ended."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from transformers import PreTrainedTokenizerBase

from ..generation.candidate_generator import no_draft
from ..tapping import capturing_hooks
from ..transformers_names import GenerativeModel
from .drafting import RowsDrafting
from .requests import GenerationRequest, GenerationResult
from .row import Row
from .shared_pass import SharedPass

_PROMPT_TOKENS = 4096  # Most tokens of prompts in one pass, unless a single prompt is longer.


class Engine:
    """
    Decodes requests in a fixed number of rows.

    Args:
        target: The target.
        shared: Its passes.
        drafting: The drafter's part; `None` decodes plainly.
        max_rows: Most requests at a time.
        tokenizer: For stop strings.
    """

    def __init__(
        self,
        target: GenerativeModel,
        shared: SharedPass,
        drafting: RowsDrafting | None,
        max_rows: int,
        tokenizer: PreTrainedTokenizerBase | None,
    ):
        self.target = target
        self.shared = shared
        self.drafting = drafting
        self.max_rows = max_rows
        self.tokenizer = tokenizer
        self.rows: list[Row] = []
        self._num_started = 0

    def run(self, requests: Iterable[GenerationRequest | None]) -> Iterator[GenerationResult]:
        """The results of all requests, in the order in which they end; see [`~dspark_hf.generate_many`]."""
        with capturing_hooks(self.target):
            yield from self._results(requests)

    def _results(self, requests: Iterable[GenerationRequest | None]) -> Iterator[GenerationResult]:
        source, has_more = iter(requests), True
        while has_more or self.rows:
            added: list[Row] = []
            ended = {place for place, row in enumerate(self.rows) if row.has_ended}
            while has_more and len(self.rows) - len(ended) < self.max_rows:
                try:
                    request = next(source)
                except StopIteration:
                    has_more = False
                    break
                if request is None:
                    break
                row = self._begun(request)
                if isinstance(row, GenerationResult):
                    yield row
                    continue
                self._put(row, ended)
                added.append(row)
            if ended:
                self._drop(ended)
            self._feed_prompts(added)
            for row in self.rows:
                row.was_cancelled = self._is_cancelled(row)
            if not all(row.has_ended for row in self.rows):
                self._round()
            yield from [row.result() for row in self.rows if row.has_ended]

    def _begun(self, request: GenerationRequest) -> Row | GenerationResult:
        """The row of a request, or its result if it cannot be decoded."""
        try:
            if request.wants_to_end:
                return GenerationResult(request, [], "cancelled")
            row = Row(self.target, request, self.tokenizer, self._num_started)
            if request.streamer is not None:
                request.streamer.put(row.ids.cpu())
        except Exception as error:  # Whatever is wrong with one request, the others go on.
            return GenerationResult(request, [], "error", error=error)
        self._num_started += 1
        return row

    @torch.no_grad()
    def _put(self, row: Row, ended: set[int]) -> None:
        """Gives a row the place of one that has ended, or a new one."""
        if ended:
            place = ended.pop()
            self.rows[place] = row
            self.shared.cache.clear(place)
        else:
            place = len(self.rows)
            self.shared.add_row(place)
            self.rows.append(row)
        taken = {other.place for other in self.rows if other is not row}
        row.place = next(account for account in range(self.max_rows) if account not in taken)
        if self.drafting is not None:
            self.drafting.begin_account(row.place)
            self.drafting.add_row(place, len(self.rows))

    @torch.no_grad()
    def _drop(self, ended: set[int]) -> None:
        """Removes rows that have ended and whose place nobody needs."""
        places = [place for place in range(len(self.rows)) if place not in ended]
        self.rows = [self.rows[place] for place in places]
        self.shared.keep_rows(places)
        if self.drafting is not None:
            self.drafting.keep_rows(places)

    def _is_cancelled(self, row: Row) -> bool:
        try:
            return row.request.wants_to_end
        except Exception as error:
            row.error = error
            return False

    @torch.no_grad()
    def _feed_prompts(self, added: list[Row]) -> None:
        """Feeds the prompts of new rows but for their last tokens, which are the anchors of their first rounds."""
        waiting = [row for row in added if row.num_prompt_tokens > 1]
        while waiting:
            group = [waiting.pop(0)]
            while waiting and sum(row.num_prompt_tokens for row in [*group, waiting[0]]) <= _PROMPT_TOKENS:
                group.append(waiting.pop(0))
            fed = [row.ids[0, :-1] if row in group else row.ids[0, :0] for row in self.rows]
            features = self.shared.feed_prompts(fed)
            for place, (row, of_row) in enumerate(zip(self.rows, features, strict=True)):
                if row in group and of_row is not None and self.drafting is not None:
                    self.drafting.begin_prompt(place, of_row)

    @torch.no_grad()
    def _round(self) -> None:
        """One pass of the target over the anchors and drafts of all rows. A round reads like that of `generation/loop.py`."""
        drafts = [no_draft()] * len(self.rows) if self.drafting is None else self.drafting.draft(self.rows)
        pairs = list(zip(self.rows, drafts, strict=True))
        fed = self.shared.verify([torch.cat([row.ids[0, -1:], d.ids[0].to(row.ids.device)]) for row, d in pairs])
        counts = [
            0 if row.has_ended else row.commit(output, draft) for (row, draft), output in zip(pairs, fed, strict=True)
        ]
        self.shared.commit(counts)
        if self.drafting is not None:
            self.drafting.observe(fed, counts)
