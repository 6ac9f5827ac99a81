"""Responses by the target itself: the text a drafter learns from.

`Regenerator` answers prompts (JSON lines or a `datasets` data set) and appends one JSON line a response:

    id        index of the prompt in its source
    source    copied where the prompt names one
    prompt    or `messages`: what came before the response
    response  the target's text, special tokens left out
    finished  False where the limit cut the response, which then has no end-of-sequence token
    response_ids  the tokens as drawn, which the text may not give back; earlier turns' stand in their messages

A run that is stopped at any point goes on where it was: whole lines are synchronised to disk, a torn last line is dropped,
and prompts whose id is in the file are not answered again. `self_prompting` lets an instruct target write the prompts as
well.

The command line is `dspark-hf regenerate`.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversations.prompts import (
    Conversation,
    Unanswerable,
    as_conversations,
    check_same_prompts,
    without_ids,
)
from ..conversations.rows import end_token_ids
from ..conversations.templates import thinking_switch
from ..ragged.supported import length_limits, unsupported_reason
from ..storage.json_lines import ResumableLines
from .decoder import SlotDecoder
from .progress import Progress
from .requests import Completion, Request
from .token_sampling import Sampling

logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 512
WINDOW_SLOTS = 8  # prompts are sorted by length within windows of this many times the slots
# What `generate` can do to the logits and the fast path does not; the value that switches each off.
OTHER_PROCESSORS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "min_new_tokens": None,
    "min_length": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}


@dataclass
class RegenerationSettings:
    """How responses are made. A sampling field left None takes the target's generation config, then `generate`'s default.

    Args:
        max_new_tokens: limit of a response; 512 where neither this nor the generation config says.
        do_sample: False for greedy. A given positive temperature implies True, a temperature of 0 implies False.
        temperature: divides the logits.
        top_k: keep this many tokens; 0 keeps all. `generate`'s own default is 50.
        top_p: keep the most likely tokens that together reach this probability; 1.0 keeps all.
        enable_thinking: the chat template's thinking switch; None leaves it to the template.
        seed: every prompt's random numbers follow from this and its id.
        slots: rows of a decoding pass.
        save_token_ids: write `response_ids`, the tokens as drawn (end-of-sequence token included), which are what
            training then uses. Tokenizing a response's text may give others, or lack special tokens inside it.
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    enable_thinking: bool | None = None
    seed: int = 0
    slots: int = 128
    save_token_ids: bool = True


def request_seed(run_seed: int, id: int, turn: int) -> int:
    """A 63-bit seed for one response, the same on every machine and in every batch."""
    digest = hashlib.sha256(f"{run_seed}:{id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def by_length(requests: Iterable[Request], window: int) -> Iterator[Request]:
    """Sort by prompt length within windows, up and down in turn, so rows that share a pass are of like length."""
    source, descending = iter(requests), False
    while chunk := list(islice(source, window)):
        yield from sorted(chunk, key=lambda request: len(request.input_ids), reverse=descending)
        descending = not descending


# ---------------------------------------------------------------------------------------------------------- decoding


class PlainDecoder:
    """Batched `generate`, for targets that `SlotDecoder` cannot serve. Same interface.

    A batch draws from torch's global generator, seeded with its first request's seed.
    """

    def __init__(self, target: PreTrainedModel, sampling: Sampling, eos_token_ids: list[int], slots: int) -> None:
        self.target = target
        self.sampling = sampling
        self.eos_token_ids = eos_token_ids
        self.slots = slots
        self.queue: list[Request] = []

    def submit(self, request: Request) -> None:
        self.queue.append(request)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        source = iter(requests)
        while True:
            batch, self.queue = self.queue[: self.slots], self.queue[self.slots :]
            batch += islice(source, self.slots - len(batch))
            if not batch:
                return
            yield from self.complete(batch)

    @torch.inference_mode()
    def complete(self, batch: list[Request]) -> Iterator[Completion]:
        length = max(len(request.input_ids) for request in batch)
        pad_id = self.eos_token_ids[0] if self.eos_token_ids else 0
        padding = [length - len(request.input_ids) for request in batch]
        input_ids = torch.tensor([[pad_id] * pad + request.input_ids for pad, request in zip(padding, batch)])  # [B, T]
        mask = (torch.arange(length)[None] >= torch.tensor(padding)[:, None]).long()  # [B, T]
        torch.manual_seed(batch[0].seed)
        law = asdict(self.sampling) if self.sampling.do_sample else {"do_sample": False}
        output = self.target.generate(
            input_ids=input_ids.to(self.target.device),
            attention_mask=mask.to(self.target.device),
            max_new_tokens=max(request.max_new_tokens for request in batch),
            eos_token_id=self.eos_token_ids or None,
            pad_token_id=pad_id,
            **law,
        )
        for request, tokens in zip(batch, output[:, length:].tolist()):
            tokens = tokens[: request.max_new_tokens]
            end = next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)
            yield Completion(request.key, tokens[:end], None if end is None else tokens[end])


def first_set(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def resolve_sampling(settings: RegenerationSettings, generation_config: Any) -> Sampling:
    """The settings' own values, then the generation config's, then `generate`'s defaults."""
    implied = None if settings.temperature is None else settings.temperature > 0
    if not first_set(settings.do_sample, implied, generation_config.do_sample, False):
        return Sampling(do_sample=False)
    return Sampling(
        do_sample=True,
        temperature=first_set(settings.temperature, generation_config.temperature, 1.0),
        top_k=first_set(settings.top_k, generation_config.top_k, 50),
        top_p=first_set(settings.top_p, generation_config.top_p, 1.0),
    )


def other_processors(generation_config: Any) -> list[str]:
    """Names of what the generation config switches on and the fast path cannot do."""
    values = {name: getattr(generation_config, name, None) for name in OTHER_PROCESSORS}
    return [name for name, found in values.items() if found is not None and found != OTHER_PROCESSORS[name]]


# ---------------------------------------------------------------------------------------------------------- the verbs


class ResponseWriter(ABC):
    """Answers prompts into a resumable file; what answers them is left to the subclasses."""

    def run(
        self,
        prompts: Iterable[dict[str, Any]],
        output: str | Path,
        start: int = 0,
        max_prompts: int | None = None,
        progress: bool = True,
    ) -> int:
        """Answer the prompts that `output` lacks, appending to it.

        Args:
            prompts: rows as `read_prompts` gives them; a row's index is its id.
            output: JSON-lines file, resumed where it exists.
            start: index of the first prompt to answer.
            max_prompts: at most this many from there.
            progress: show a progress bar.

        Returns:
            `int`: how many rows were added.

        Raises:
            ValueError: a prompt has none of the known fields; or `output` holds rows of other prompts or settings, is
                something else, or is being written by another process.
        """
        stop = None if max_prompts is None else start + max_prompts
        chosen = dict(islice(enumerate(prompts), start, stop))
        added = 0
        with ResumableLines(output, self.origin()) as lines:
            check_same_prompts(lines.written, chosen, output)
            done = {row["id"] for row in lines.written}
            todo = as_conversations({index: row for index, row in chosen.items() if index not in done})
            with Progress(len(chosen), len(chosen) - len(todo), progress) as bar:
                for row, num_tokens in self.answer(todo):
                    written = row is not None and _append(lines, row)
                    added += written
                    bar.count(num_tokens, prompts=int(written))
        return added

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What the rows depend on, for the note beside the output."""

    @abstractmethod
    def answer(self, conversations: list[Conversation]) -> Iterator[tuple[dict[str, Any] | None, int]]:
        """Run conversations to their end, in the order they finish.

        Yields:
            for every response the conversation's output row (None while turns are left) and the response's tokens.
        """


def _append(lines: ResumableLines, row: dict[str, Any]) -> bool:
    """Writes a row; False, with a warning, where its text is not valid Unicode."""
    try:
        lines.append(row)
    except UnicodeEncodeError as error:
        logger.warning("Prompt %d is skipped: its text cannot be written (%s).", row["id"], error)
        return False
    return True


class Regenerator(ResponseWriter):
    """Answers prompts with the target's own responses.

    Args:
        target: the model, in the dtype and on the device it is to run in.
        tokenizer: its tokenizer. Without a chat template, prompts are continued as plain text.
        settings: how responses are made.

    Example:
        >>> target = AutoModelForCausalLM.from_pretrained("path/to/target", dtype="bfloat16")
        >>> tokenizer = AutoTokenizer.from_pretrained("path/to/target")
        >>> regenerator = Regenerator(target, tokenizer, RegenerationSettings(temperature=0.6, max_new_tokens=256))
        >>> regenerator.run(read_prompts("prompts.jsonl"), "responses.jsonl")
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: RegenerationSettings | None = None,
    ) -> None:
        self.target = target.eval()
        self.tokenizer = tokenizer
        self.settings = settings or RegenerationSettings()
        generation_config = target.generation_config
        self.sampling = resolve_sampling(self.settings, generation_config)
        self.max_new_tokens = first_set(
            self.settings.max_new_tokens, generation_config.max_new_tokens, DEFAULT_MAX_NEW_TOKENS
        )
        self.max_length = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self.eos_token_ids = end_token_ids(target, tokenizer)
        self.told_fallback = False

    def origin(self) -> dict[str, Any]:
        return {
            "target": self.target.config.name_or_path,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "max_new_tokens": self.max_new_tokens,
            "enable_thinking": self.settings.enable_thinking,
            "seed": self.settings.seed,
            **asdict(self.sampling),
        }

    def answer(self, conversations: list[Conversation]) -> Iterator[tuple[dict[str, Any] | None, int]]:
        open_conversations = {conversation.id: conversation for conversation in conversations}
        decoder = self.decoder(self.longest_row(conversations))
        requests = (request for request in map(self.request, conversations) if request is not None)
        for completion in decoder.run(by_length(requests, WINDOW_SLOTS * self.settings.slots)):
            conversation = open_conversations[completion.key]
            self.add(conversation, completion)
            request = self.request(conversation) if conversation.next_turn() else None
            if request is not None:
                decoder.submit(request)
                yield None, completion.num_tokens
            else:
                del open_conversations[conversation.id]
                yield conversation.output_row(), completion.num_tokens

    def add(self, conversation: Conversation, completion: Completion) -> None:
        end = [] if completion.end_id is None else [completion.end_id]
        conversation.add(
            self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            completion.finished,
            completion.token_ids + end if self.settings.save_token_ids else None,
        )

    def request(self, conversation: Conversation) -> Request | None:
        """The next response's request; None, with a warning, where there can be none."""
        try:
            input_ids = self.encode(conversation.messages)
            room = self.room(len(input_ids))
        except Unanswerable as reason:
            conversation.give_up(reason)
            return None
        seed = request_seed(self.settings.seed, conversation.id, conversation.num_responses)
        return Request(conversation.id, input_ids, room, seed)

    def room(self, num_tokens: int) -> int:
        """Tokens that a response may have behind a prompt of `num_tokens`."""
        if self.max_length is None:
            return self.max_new_tokens
        if num_tokens >= self.max_length:
            raise Unanswerable(f"with {num_tokens} tokens it fills the target's context of {self.max_length}")
        return min(self.max_new_tokens, self.max_length - num_tokens)

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the target's next response begins."""
        template = self.tokenizer.chat_template is not None
        if not template and len(messages) > 1:
            raise ValueError(
                f"The tokenizer of '{self.tokenizer.name_or_path}' has no chat template, so it cannot write a conversation "
                f"of {len(messages)} messages. Give rows with a single 'prompt', or set tokenizer.chat_template."
            )
        try:
            text = self.render(messages) if template else messages[0]["content"]
            text.encode()  # half a surrogate pair is told clearer than by the tokenizer
            return self.tokenizer(text, add_special_tokens=not template)["input_ids"]
        except (TemplateError, ValueError, TypeError) as error:
            raise Unanswerable(f"chat template or tokenizer refuse it ({error})") from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        thinking = thinking_switch(self.settings.enable_thinking)
        return self.tokenizer.apply_chat_template(
            without_ids(messages), tokenize=False, add_generation_prompt=True, **thinking
        )

    def decoder(self, max_length: int) -> SlotDecoder | PlainDecoder:
        """A decoder for rows of up to `max_length` tokens: the fast one or, where it cannot serve, the plain one."""
        reason = unsupported_reason(self.target, max_length)
        others = other_processors(self.target.generation_config)
        if reason is None and others:
            reason = f"its generation config sets {', '.join(others)}"
        if reason is None:
            return SlotDecoder(self.target, self.sampling, self.eos_token_ids, self.settings.slots)
        if not self.told_fallback:
            logger.warning(
                "%s runs with plain batched generate, which is slower, because %s.", type(self.target).__name__, reason
            )
            self.told_fallback = True
        return PlainDecoder(self.target, self.sampling, self.eos_token_ids, self.settings.slots)

    def longest_row(self, conversations: list[Conversation]) -> int:
        """Most tokens a row can come to. It is worked out only where it matters."""
        if not length_limits(self.target):
            return 0
        longest = max(map(self.longest, conversations), default=0)
        return longest if self.max_length is None else min(longest, self.max_length)

    def longest(self, conversation: Conversation) -> int:
        """Tokens of a whole conversation if every response runs to its limit; of the turns that can be asked."""
        messages, length = list(conversation.messages), 0
        try:
            for number, turn in enumerate([*conversation.turns, ""], start=1):
                length = len(self.encode(messages)) + number * self.max_new_tokens
                messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": turn}]
        except Unanswerable:  # said when it is asked
            pass
        return length
