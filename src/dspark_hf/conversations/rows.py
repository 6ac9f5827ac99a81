"""Turns conversations into token ids and a mask of the tokens that the drafter learns.

An input row is `{"messages": [...]}`, `{"prompt": ..., "response": ...}`, or `{"messages": [...], "response": ...}` with the last
response separate. The drafter learns the tokens that the target generated: in every turn, the response and the token that ends
it, but nothing of the template around them. No row is left out because of its length.

Training rows have to look like the sequences of generation. So every turn is built the same way: the prompt is rendered with
the generation prompt and tokenized as a whole, followed by the tokens of the response. If the next turn's prompt begins with
exactly these tokens, both turns share a row. Many templates rewrite earlier turns, for instance by removing the thoughts; then
each turn becomes a separate row, with the context that the target saw. So a conversation gives one row or several, and every
turn is learned exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile, takewhile
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from .prompts import as_message
from .templates import has_template, opening_tokens

logger = logging.get_logger(__name__)

Encoded = dict[str, list[int]]

_OF_RESPONSE = ("response_ids", "finished")  # Fields about the response, which are not passed to the template.
_BESIDE_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # Fields that a template may write too.
_MARK = "\ue000response\ue001"  # A placeholder for a response, to find out what the template puts around it.
_UNKNOWN = (
    "Responses with tool calls or reasoning in separate fields are not learned if the chat template does not write these "
    "after its generation prompt, because it is unknown what the target wrote. Give it in 'content', or as 'response_ids'."
)


def encode_rows(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    **template_options: Any,
) -> list[Encoded]:
    """
    Turns conversations into training rows. Those with nothing to learn are left out, and a warning says how many.

    Args:
        rows: Conversations, as in the module's description. `response_ids`, if given, are the tokens of the last response
            as they were drawn (including the end-of-turn token), and are used instead of its text. `"finished": False` says
            that a length limit cut the last response, so no end of turn follows it. The messages of earlier turns may have
            both fields too.
        tokenizer: The target's tokenizer. Without a chat template, the response follows the prompt as plain text, with a
            warning.
        max_length: Rows are cut to this length, and tokens after the last learned one are dropped, so that no incomplete
            template is left at the end.
        eos_token_ids: Tokens that end a turn; the tokenizer's by default. Nothing after such a token is learned, because
            the target stops there.
        template_options: Arguments of the chat template, such as `enable_thinking=False`; use those of generation.

    Returns:
        Rows `{"input_ids": [...], "loss_mask": [...]}`: one per conversation, or several if the template rewrites turns.

    Raises:
        ValueError: when a row is not a conversation, or the template refuses it.
    """
    kept = list(_encoded(rows, tokenizer, max_length, eos_token_ids, template_options))
    if left_out := sum(not parts for parts in kept):
        logger.warning(
            f"{left_out} of {len(kept)} rows have no two response tokens"
            f"{'' if max_length is None else f' within {max_length} tokens'} and were left out."
        )
    return [part for parts in kept for part in parts]


def encode_stream(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    **template_options: Any,
) -> Iterator[Encoded]:
    """The rows of [`encode_rows`], each as soon as its conversation is read; says once when one is left out."""
    for parts in _encoded(rows, tokenizer, max_length, eos_token_ids, template_options):
        if not parts:
            logger.warning_once("Rows that have no two response tokens within the maximum length are left out.")
        yield from parts


def _encoded(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None,
    eos_token_ids: Iterable[int] | None,
    template_options: dict[str, Any],
) -> Iterator[list[Encoded]]:
    """The rows of each conversation that have something to learn."""
    ends = [tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids
    writer = _Writer(tokenizer, [token for token in ends if token is not None], template_options)
    for row in rows:
        parts = [_cut(ids, mask, max_length) for ids, mask in writer.rows(row_messages(row))]
        yield [part for part in parts if sum(part["loss_mask"]) >= 2]  # A block needs an anchor and a label.


def row_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a row, including its last response; every `content` is text."""
    if row.get("messages"):
        messages = [as_message(message) for message in row["messages"]]
    elif row.get("prompt"):
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise ValueError(f"A row has the fields {sorted(row)}; give 'messages', or 'prompt' and 'response'.")
    if row.get("response") is not None:
        messages.append({"role": "assistant", "content": row["response"]})
    if messages[-1]["role"] == "assistant":
        messages[-1] |= {name: row[name] for name in _OF_RESPONSE if row.get(name) is not None}
    return messages


@dataclass
class _Writer:
    """
    Renders and tokenizes turns in the same way as generation.

    Args:
        tokenizer: The target's. Without a chat template, the response follows the prompt as plain text.
        ends: Tokens that end a turn.
        options: Arguments of the chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    ends: list[int]
    options: dict[str, Any]

    @cached_property
    def has_template(self) -> bool:
        return has_template(
            self.tokenizer, "prompt and response are learned as plain text, one directly after the other"
        )

    @cached_property
    def special(self) -> set[int]:
        """The special tokens."""
        return {*self.ends, *self.tokenizer.added_tokens_decoder}

    def rows(self, messages: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
        """Tokens and mask of a conversation, in as few rows as possible, such that every turn has the context of generation."""
        roles = [message["role"] for message in messages]
        if not self.has_template and roles not in (["user", "assistant"], ["user"]):
            raise ValueError(
                f"The tokenizer has no chat template, so it cannot write a conversation of {', '.join(roles)}. Give rows "
                "with 'prompt' and 'response', or set tokenizer.chat_template."
            )
        rows: list[tuple[list[int], list[int]]] = []
        for i, message in enumerate(messages):
            if i == 0 or message["role"] != "assistant":  # A response without a prompt is only context.
                continue
            prompt, response = self.turn(messages[:i], message)
            if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
                rows.append(([], []))
            ids, mask = rows[-1]
            mask += [0] * (len(prompt) - len(ids)) + [1] * len(response)
            ids += prompt[len(ids) :] + response
        return rows

    def turn(self, before: list[dict[str, Any]], message: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The tokens of the prompt that consists of `before`, and those of the response in `message`."""
        opening = self.render(before, prompt=True)
        prompt = opening_tokens(self.tokenizer, opening)
        response = message.get("response_ids")
        if response is None:
            response = self.response(before, message, opening, prompt)
        stop = next((i for i, token in enumerate(response, start=1) if token in self.ends), None)
        return prompt, list(response[:stop])

    def response(
        self, before: list[dict[str, Any]], message: dict[str, Any], opening: str, prompt: list[int]
    ) -> list[int]:
        """The tokens of a response, and the end of its turn unless the limit cut it."""
        head, found, closing = self.render([*before, {"role": "assistant", "content": _MARK}]).partition(_MARK)
        if not found:
            raise ValueError(
                "The chat template writes an assistant's message without its text, so nothing can be learned. Give one that "
                "takes texts as 'content' (chat_template=...)."
            )
        lead = head[len(opening) :] if head.startswith(opening) else ""
        text, finished = message["content"], message.get("finished") in (None, True)
        if any(message.get(name) for name in _BESIDE_CONTENT):
            written = self.render([*before, message])
            shown = written[len(opening) :].removeprefix(lead) if written.startswith(opening) else ""
            text = shown.removesuffix(closing)
            # A tool call may have a different end, which is part of the text.
            finished = finished and shown.endswith(closing)
            if not text:
                logger.warning_once(_UNKNOWN)
                return []
        return self.words(opening, prompt, lead, text) + (self.end(closing) if finished else [])

    def words(self, opening: str, prompt: list[int], lead: str, text: str) -> list[int]:
        """
        The tokens of a response's text. Tokens that the template puts before the text count as generated only if decoding
        would lose them, so that no text could contain them: SentencePiece's space before a first word, or a special token.
        """
        if lead and text:
            ids = self.behind(opening, prompt, lead + text)
            if self.tokenizer.decode(ids, skip_special_tokens=True) == text:
                return ids
        return self.behind(opening, prompt, text)

    def behind(self, opening: str, prompt: list[int], text: str) -> list[int]:
        """
        The tokens of `text` when tokenized together with the opening, because some tokenizers put a space before every text.
        If a token would span both, which generation never draws, the text is tokenized alone.
        """
        whole = opening_tokens(self.tokenizer, opening + text)
        return whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.part(text)

    def end(self, closing: str) -> list[int]:
        """The first special tokens that the template writes after a response, or else a known end-of-turn token."""
        from_first = dropwhile(lambda token: token not in self.special, self.part(closing))
        return list(takewhile(self.special.__contains__, from_first)) or self.ends[:1]

    def render(self, messages: list[dict[str, Any]], prompt: bool = False) -> str:
        if not self.has_template:
            return "".join(message["content"] for message in messages)
        messages = [{name: m[name] for name in m if name not in _OF_RESPONSE} for m in messages]
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt, **self.options
            )
            return str(text)
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"The chat template refuses a conversation of {', '.join(m['role'] for m in messages)}: {error}. Change such "
                "rows, or leave them out."
            ) from error

    def part(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def end_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a turn: those of the generation config, else of the model config, else of the tokenizer."""
    for found in (
        target.generation_config.eos_token_id,
        target.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        if found is not None:
            return list(found) if isinstance(found, (list, tuple)) else [found]
    return []


def _cut(ids: list[int], mask: list[int], max_length: int | None) -> Encoded:
    if max_length is not None and len(ids) > max_length:
        ids, mask = ids[:max_length], mask[:max_length]
        while mask and not mask[-1]:
            ids, mask = ids[:-1], mask[:-1]
    return {"input_ids": ids, "loss_mask": mask}
