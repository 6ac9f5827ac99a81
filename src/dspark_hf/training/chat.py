"""From conversations to tokens and the mask of what the drafter is to learn.

A row is `{"messages": [...]}`, or `{"prompt": ..., "response": ...}`, or `messages` with the last `response` beside
them. What is learned is what the target generated: the assistant's words and the token that ends its turn, in every
turn, and nothing of the template around them. One policy for all lengths: no row is left out for being short.

Two things decide whether a drafter learns what it will meet:

- each turn is tokenized on its own, as in generation, where the prompt is tokenized before the response exists; the
  tokens at the seam are then the same;
- `"finished": False` says that a length limit cut the last response, so no end of turn follows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)

Encoded = dict[str, list]
Segment = tuple[str | list[int], bool]  # Text or token ids, and whether they are learned.


def encode_row(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    **template_options: Any,
) -> Encoded:
    """
    One conversation.

    Args:
        row: As in the module's description. `response_ids`, where given, are the last response's tokens as they were
            drawn (end-of-turn token included), and are used instead of its text.
        tokenizer: With a chat template; without one, `prompt` and `response` are joined as plain text.
        max_length: Rows are cut here; what then follows the last learned token is dropped, so that no half template
            is left at the end.
        eos_token_ids: Tokens that end a turn; the tokenizer's by default. What the template writes behind one is not
            learned: the target stops there.
        template_options: For the chat template, such as `enable_thinking=False`.

    Returns:
        `{"input_ids": [...], "loss_mask": [...]}`.

    Raises:
        ValueError: when the row holds no conversation.
    """
    ends = {tokenizer.eos_token_id} if eos_token_ids is None else set(eos_token_ids)
    messages = row_messages(row)
    if tokenizer.chat_template is None:
        segments = _plain_segments(messages, row, tokenizer)
    elif _marks_generation(tokenizer) and row.get("response_ids") is None and row.get("finished", True):
        encoded = tokenizer.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **template_options
        )
        ids, mask = list(encoded["input_ids"]), [bool(m) for m in encoded["assistant_masks"]]
        return _cut(ids, _up_to_end(ids, mask, ends), max_length)
    else:
        segments = _template_segments(messages, row, tokenizer, template_options)

    ids, mask = [], []
    for text, learned in segments:
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else list(text)
        ids += tokens
        mask += _up_to_end(tokens, [learned] * len(tokens), ends)
    return _cut(ids, mask, max_length)


def encode_rows(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int | None = None,
    eos_token_ids: Iterable[int] | None = None,
    **template_options: Any,
) -> list[Encoded]:
    """All rows in which something is left to learn; says how many are not. Arguments as in [`encode_row`]."""
    eos_token_ids = None if eos_token_ids is None else list(eos_token_ids)
    encoded = [encode_row(row, tokenizer, max_length, eos_token_ids, **template_options) for row in rows]
    kept = [row for row in encoded if sum(row["loss_mask"]) >= 2]  # A block needs an anchor and a label.
    if len(kept) < len(encoded):
        logger.warning(
            f"{len(encoded) - len(kept)} of {len(encoded)} rows have no two response tokens"
            f"{'' if max_length is None else f' within {max_length} tokens'} and were left out."
        )
    return kept


def row_messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """The conversation of a row, with the response it ends in."""
    if row.get("messages"):
        messages = [dict(message) for message in row["messages"]]
    elif row.get("prompt"):
        messages = [{"role": "user", "content": row["prompt"]}]
    else:
        raise ValueError(f"A row has the fields {sorted(row)}; give 'messages', or 'prompt' and 'response'.")
    if row.get("response") is not None:
        messages.append({"role": "assistant", "content": row["response"]})
    return messages


def _plain_segments(messages: list[dict], row: Mapping[str, Any], tokenizer) -> list[Segment]:
    if [message["role"] for message in messages] not in (["user", "assistant"], ["user"]):
        raise ValueError(
            "The tokenizer has no chat template, so only rows with 'prompt' and 'response' can be encoded."
        )
    prompt = tokenizer(messages[0]["content"])["input_ids"]
    if prompt and prompt[-1] == tokenizer.eos_token_id:
        prompt = prompt[:-1]  # Some tokenizers end every text with it.
    segments: list[Segment] = [(prompt, False)]
    if row.get("response_ids") is not None:
        return [*segments, (row["response_ids"], True)]
    if len(messages) > 1:
        segments.append((messages[1]["content"], True))
        if row.get("finished", True) and tokenizer.eos_token_id is not None:
            segments.append(([tokenizer.eos_token_id], True))
    return segments


def _template_segments(messages: list[dict], row: Mapping[str, Any], tokenizer, options: dict) -> list[Segment]:
    """Cuts the rendered conversation where the template starts and ends each assistant turn."""

    def render(upto: int, prompt: bool) -> str:
        return tokenizer.apply_chat_template(messages[:upto], tokenize=False, add_generation_prompt=prompt, **options)

    last = len(messages) - 1
    segments: list[Segment] = []
    text = ""  # What the segments so far say.
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        opening, closed = render(turn, prompt=True), render(turn + 1, prompt=False)
        content = message["content"]
        cut = turn == last and not row.get("finished", True)
        given_ids = row.get("response_ids") if turn == last else None
        if not opening.startswith(text):
            # The template rewrites earlier turns (it drops their thoughts, say): they are context now, not to learn.
            segments, text = [], ""
        segments.append((opening[len(text) :], False))
        text = opening
        if given_ids is not None:
            segments.append((given_ids, True))
        elif cut:
            segments.append((content, True))
        elif closed.startswith(opening):
            segments.append((closed[len(opening) :], True))
            text = closed
        else:
            # The template writes a finished turn differently from one being generated: close it by hand.
            segments += [(content, True), ([tokenizer.eos_token_id], True)]
            text = opening + content
    if not segments and messages:
        segments.append((render(len(messages), prompt=False), False))
    return segments


def _marks_generation(tokenizer) -> bool:
    template = tokenizer.chat_template
    return isinstance(template, str) and "{% generation" in template.replace("{%-", "{%")


def _up_to_end(ids: list[int], mask: list[bool], ends: set) -> list[bool]:
    """In every learned run of tokens, only those up to the first that ends a turn are kept."""
    kept, ended = [], False
    for token, learned in zip(ids, mask, strict=True):
        if not learned:
            ended = False
        kept.append(learned and not ended)
        ended = ended or (learned and token in ends)
    return kept


def _cut(ids: list[int], mask: list[bool], max_length: int | None) -> Encoded:
    if max_length is not None and len(ids) > max_length:
        ids, mask = ids[:max_length], mask[:max_length]
        while mask and not mask[-1]:
            ids, mask = ids[:-1], mask[:-1]
    return {"input_ids": ids, "loss_mask": [int(m) for m in mask]}
