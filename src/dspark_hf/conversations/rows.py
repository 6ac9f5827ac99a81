"""From conversations to tokens and the mask of what the drafter is to learn.

A row is `{"messages": [...]}`, or `{"prompt": ..., "response": ...}`, or `messages` with the last `response` beside
them. What is learned is what the target generated: its words and the token that ends its turn, in every turn, and
nothing of the template around them. One policy for all lengths: no row is left out for being short.

A drafter shall learn what it will meet, so every turn is written as generation writes it: the prompt is rendered with
the generation prompt and tokenized whole, and the response follows it, token by token. Where the next turn's prompt
begins with just these tokens, both turns share a row. Many templates rewrite earlier turns (they drop the thoughts, say);
the turn then keeps a row of its own, in the context that the target saw. So a conversation is one row or several, and
every turn is learned once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

_OF_RESPONSE = ("response_ids", "finished")  # Fields of a row about its response, not for the template.
_BESIDE_CONTENT = ("tool_calls", "reasoning_content", "reasoning", "thinking")  # A template writes these as well.
_MARK = "\ue000response\ue001"  # Stands for a response, to see what the template puts around it.
_UNKNOWN = (
    "Responses with tool calls or reasoning beside their content are not learned where the chat template does not write "
    "them behind its generation prompt: what the target wrote is then unknown. Give it in 'content', or as 'response_ids'."
)


def encode_rows(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    **template_options: Any,
) -> list[Encoded]:
    """
    All rows in which something is left to learn; says how many conversations have none.

    Args:
        rows: Conversations, as in the module's description. `response_ids`, where given, are the last response's tokens
            as they were drawn (end-of-turn token included), and are used instead of its text. `"finished": False` says
            that a length limit cut the last response, so no end of turn follows it. An earlier turn's message may have
            both as well.
        tokenizer: With a chat template; without one, the response follows the prompt as plain text, and a warning says so.
        max_length: Rows are cut here; what then follows the last learned token is dropped, so that no half template
            is left at the end.
        eos_token_ids: Tokens that end a turn; the tokenizer's by default. Nothing behind one is learned: the target
            stops there.
        template_options: For the chat template, such as `enable_thinking=False`: those that the responses were made with.

    Returns:
        Rows `{"input_ids": [...], "loss_mask": [...]}`: one a conversation, or several where the template rewrites turns.

    Raises:
        ValueError: when a row holds no conversation, or one that the template cannot write.
    """
    ends = [tokenizer.eos_token_id] if eos_token_ids is None else eos_token_ids
    writer = _Writer(tokenizer, [token for token in ends if token is not None], template_options)
    encoded = [[_cut(ids, mask, max_length) for ids, mask in writer.rows(row_messages(row))] for row in rows]
    # A block needs an anchor and a label.
    kept = [[part for part in parts if sum(part["loss_mask"]) >= 2] for parts in encoded]
    if left_out := sum(not parts for parts in kept):
        logger.warning(
            f"{left_out} of {len(kept)} rows have no two response tokens"
            f"{'' if max_length is None else f' within {max_length} tokens'} and were left out."
        )
    return [part for parts in kept for part in parts]


def row_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conversation of a row, with the response it ends in; every `content` is text."""
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
    Writes turns as generation does.

    Args:
        tokenizer: Without a chat template, the response follows the prompt as plain text.
        ends: Tokens that end a turn.
        options: For the chat template.
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
        """Tokens that no text is made of."""
        return {*self.ends, *self.tokenizer.added_tokens_decoder}

    def rows(self, messages: list[dict[str, Any]]) -> list[tuple[list[int], list[int]]]:
        """Tokens and mask of a conversation, in as few rows as show every turn as it was generated."""
        roles = [message["role"] for message in messages]
        if not self.has_template and roles not in (["user", "assistant"], ["user"]):
            raise ValueError(
                f"The tokenizer has no chat template, so it cannot write a conversation of {', '.join(roles)}. Give rows "
                "with 'prompt' and 'response', or set tokenizer.chat_template."
            )
        rows: list[tuple[list[int], list[int]]] = []
        for i, message in enumerate(messages):
            if i == 0 or message["role"] != "assistant":  # What was said before any question is context.
                continue
            prompt, response = self.turn(messages[:i], message)
            if not rows or prompt[: len(rows[-1][0])] != rows[-1][0]:
                rows.append(([], []))
            ids, mask = rows[-1]
            mask += [0] * (len(prompt) - len(ids)) + [1] * len(response)
            ids += prompt[len(ids) :] + response
        return rows

    def turn(self, before: list[dict[str, Any]], message: dict[str, Any]) -> tuple[list[int], list[int]]:
        """The tokens of the prompt that `before` makes, and those of the response in `message`."""
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
        """Its own words, and what ends its turn where no limit cut it."""
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
            finished = finished and shown.endswith(closing)  # A call may end with a token of its own, in the text.
            if not text:
                logger.warning_once(_UNKNOWN)
                return []
        return self.words(opening, prompt, lead, text) + (self.end(closing) if finished else [])

    def words(self, opening: str, prompt: list[int], lead: str, text: str) -> list[int]:
        """
        What the template puts before a response is the target's own only where decoding loses it, so that no text
        could hold it: the space before a first word in SentencePiece, or a special token.
        """
        if lead and text:
            ids = self.behind(opening, prompt, lead + text)
            if self.tokenizer.decode(ids, skip_special_tokens=True) == text:
                return ids
        return self.behind(opening, prompt, text)

    def behind(self, opening: str, prompt: list[int], text: str) -> list[int]:
        """
        The tail of opening and text tokenized together, since some tokenizers begin every text with a space. Where a
        token would span the seam, which is never drawn, the text is tokenized alone.
        """
        whole = opening_tokens(self.tokenizer, opening + text)
        return whole[len(prompt) :] if whole[: len(prompt)] == prompt else self.part(text)

    def end(self, closing: str) -> list[int]:
        """The first special tokens that the template writes behind a response, or else a known end."""
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
                f"The chat template refuses a conversation of {', '.join(m['role'] for m in messages)}: {error}. Bring such "
                "rows into the form it takes, or leave them out."
            ) from error

    def part(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]


def end_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Tokens that end a turn: the generation config's, then the model config's, then the tokenizer's."""
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
