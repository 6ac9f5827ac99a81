"""Generates responses with the target: the text a drafter learns from.

`Regenerator` answers prompts (JSON lines or a `datasets` data set) and appends one JSON line per response:

    id        index of the prompt in its source
    source    copied from the prompt, if it has one
    prompt    or `messages`: what came before the response
    response  the target's text without special tokens
    finished  False if the limit cut the response, which then has no end-of-sequence token
    response_ids  the tokens as drawn, which tokenizing the text may not reproduce; those of earlier turns are in `messages`

An interrupted run resumes where it stopped: prompts whose id is in the file are not answered again.

The command line is `dspark-hf regenerate`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversations.prompts import Conversation, Unanswerable, without_ids
from ..conversations.rows import end_token_ids
from ..conversations.templates import has_template, opening_tokens, thinking_switch
from ..ragged.supported import length_limits, unsupported_reason
from ..target_config import max_length, optional_field
from .decoder import SlotDecoder
from .plain_decoder import PlainDecoder
from .requests import Completion, Request
from .settings import RegenerationSettings, origin_of, request_seed, resolve_sampling
from .writer import ResponseWriter

logger = logging.getLogger(__name__)

WINDOW_SLOTS = 8  # prompts are sorted by length within windows of this many times the slots
# Settings of `generate` that the fast decoder does not support, each with the value that switches it off.
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


class Regenerator(ResponseWriter):
    """Answers prompts with the target.

    Args:
        target: the target model, in the dtype and on the device to use.
        tokenizer: its tokenizer. Without a chat template, prompts are continued as plain text, and a warning says so.
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
        self.max_new_tokens = self.settings.response_limit(generation_config)
        self.max_length = max_length(target.config.get_text_config())
        self.eos_token_ids = end_token_ids(target, tokenizer)
        self.told_fallback = False

    def origin(self) -> dict[str, Any]:
        dtype = str(self.target.dtype).removeprefix("torch.")
        return origin_of(self.settings, self.target.config.name_or_path, dtype, self.target.generation_config)

    def answer(
        self, conversations: list[Conversation], on_tokens: Callable[[int], None]
    ) -> Iterator[dict[str, Any] | None]:
        self.check_template(conversations)
        open_conversations = {conversation.id: conversation for conversation in conversations}
        decoder = self.decoder(self.longest_row(conversations), on_tokens)
        requests = (request for request in map(self.request, conversations) if request is not None)
        for completion in decoder.run(by_length(requests, WINDOW_SLOTS * self.settings.slots)):
            conversation = open_conversations[completion.key]
            self.add(conversation, completion)
            request = self.request(conversation) if conversation.next_turn() else None
            if request is not None:
                decoder.submit(request)
            else:
                del open_conversations[conversation.id]
                yield conversation.output_row()

    def check_template(self, conversations: list[Conversation]) -> None:
        """Warns if there is no chat template, and then refuses conversations of several messages."""
        if has_template(self.tokenizer, "each prompt is continued as plain text, with nothing before or after it"):
            return
        for conversation in conversations:
            if (count := len(conversation.messages) + len(conversation.turns)) > 1:
                raise ValueError(
                    f"The tokenizer of '{self.tokenizer.name_or_path}' has no chat template, so it cannot write the "
                    f"conversation of {count} messages that prompt {conversation.id} asks for. Give rows with a single "
                    "'prompt', or set tokenizer.chat_template."
                )

    def add(self, conversation: Conversation, completion: Completion) -> None:
        end = [] if completion.end_id is None else [completion.end_id]
        conversation.add(
            str(self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)),
            completion.finished,
            completion.token_ids + end if self.settings.save_token_ids else None,
        )

    def request(self, conversation: Conversation) -> Request | None:
        """The request for the next response; None, with a warning, if the prompt cannot be answered."""
        try:
            input_ids = self.encode(conversation.messages)
            room = self.room(len(input_ids))
        except Unanswerable as reason:
            conversation.give_up(reason)
            return None
        seed = request_seed(self.settings.seed, conversation.id, conversation.num_responses)
        return Request(conversation.id, input_ids, room, seed)

    def room(self, num_tokens: int) -> int:
        """The most tokens of a response after a prompt of `num_tokens`."""
        if self.max_length is None:
            return self.max_new_tokens
        if num_tokens >= self.max_length:
            raise Unanswerable(f"with {num_tokens} tokens it fills the target's context of {self.max_length}")
        return min(self.max_new_tokens, self.max_length - num_tokens)

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation up to the start of the next response."""
        try:
            text = self.render(messages)
            text.encode()  # Raises a clearer error than the tokenizer if the text contains half a surrogate pair.
            return opening_tokens(self.tokenizer, text)
        except (TemplateError, ValueError, TypeError) as error:
            raise Unanswerable(f"the chat template or the tokenizer refuses it ({error})") from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        if self.tokenizer.chat_template is None:
            return str(messages[0]["content"])
        thinking: dict[str, Any] = thinking_switch(self.settings.enable_thinking)
        text = self.tokenizer.apply_chat_template(
            without_ids(messages), tokenize=False, add_generation_prompt=True, **thinking
        )
        return str(text)

    def decoder(
        self, max_length: int, on_tokens: Callable[[int], None] = lambda count: None
    ) -> SlotDecoder | PlainDecoder:
        """A decoder for rows of up to `max_length` tokens: the fast one, or the plain one for targets it does not support."""
        how = self.sampling, self.eos_token_ids, self.settings.slots
        reason = unsupported_reason(self.target, max_length)
        others = other_processors(self.target.generation_config)
        if reason is None and others:
            reason = f"its generation config sets {', '.join(others)}"
        if reason is None:
            return SlotDecoder(self.target, *how, on_tokens=on_tokens)
        if not self.told_fallback:
            logger.warning(
                "%s runs with plain batched generate, which is slower, because %s.", type(self.target).__name__, reason
            )
            self.told_fallback = True
        return PlainDecoder(self.target, *how, on_tokens=on_tokens)

    def longest_row(self, conversations: list[Conversation]) -> int:
        """Most tokens a row can come to. It is worked out only where it matters."""
        if not length_limits(self.target):
            return 0
        longest = max(map(self.longest, conversations), default=0)
        return longest if self.max_length is None else min(longest, self.max_length)

    def longest(self, conversation: Conversation) -> int:
        """Upper bound on the tokens of the longest conversation: every response at its limit."""
        messages, length = list(conversation.messages), 0
        try:
            for number, turn in enumerate([*conversation.turns, ""], start=1):
                length = len(self.encode(messages)) + number * self.max_new_tokens
                messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": turn}]
        except Unanswerable:  # said when it is asked
            pass
        return length


def by_length(requests: Iterable[Request], window: int) -> Iterator[Request]:
    """Sorts by prompt length within windows, alternately up and down, so that rows that share a pass have similar lengths."""
    source, descending = iter(requests), False
    while chunk := list(islice(source, window)):
        yield from sorted(chunk, key=lambda request: len(request.input_ids), reverse=descending)
        descending = not descending


def other_processors(generation_config: Any) -> list[str]:
    """Names of settings in the generation config that the fast decoder does not support."""
    values = {name: optional_field(generation_config, name) for name in OTHER_PROCESSORS}
    return [name for name, found in values.items() if found is not None and found != OTHER_PROCESSORS[name]]
