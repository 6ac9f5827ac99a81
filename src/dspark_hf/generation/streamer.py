"""A streamer that shows which tokens were drafted."""

from __future__ import annotations

import os
import sys
from typing import Any, TextIO

import torch
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

# Blue and orange: distinguishable with all common kinds of colour vision, readable on dark and on light terminals.
DRAFTED_STYLE = "\x1b[38;5;33m"
OWN_STYLE = "\x1b[38;5;208m"
RESET = "\x1b[0m"


class DraftStreamer(BaseStreamer):
    """Base class of streamers that are told which tokens were drafted."""

    def next_are_drafted(self, num_tokens: int) -> None:
        """The decoding loop calls this before it `put`s `num_tokens` tokens that come from the drafter."""


class DraftTintStreamer(DraftStreamer):
    """
    Prints text as it is generated: drafted tokens in one colour, tokens of the target in another.

    ```python
    >>> streamer = DraftTintStreamer(tokenizer, skip_prompt=True)  # doctest: +SKIP
    >>> target.generate(**inputs, assistant_model=drafter, streamer=streamer)  # doctest: +SKIP
    ```

    A token's text is printed as soon as it is whole: a character that is spread over several tokens waits for the last
    of them. Subclasses that want the text elsewhere override [`~DraftTintStreamer.on_text`].

    Args:
        tokenizer: Decodes the tokens.
        skip_prompt: Leave the prompt out.
        file (`TextIO`, *optional*): Where to print; `sys.stdout` by default.
        color (`bool`, *optional*): By default only on a terminal, and not where `NO_COLOR` is set or `TERM` is `dumb`.
        decode_kwargs: For `tokenizer.decode`, such as `skip_special_tokens=True`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        skip_prompt: bool = False,
        file: TextIO | None = None,
        color: bool | None = None,
        **decode_kwargs: Any,
    ):
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.file = file if file is not None else sys.stdout
        self.color = wants_color(self.file) if color is None else color
        self.decode_kwargs = decode_kwargs
        self._expects_prompt = True
        self._num_drafted = 0
        self._token_ids: list[int] = []
        # How many of `_token_ids` are printed already. Some are kept, because a token's text depends on the ones before.
        self._num_printed = 0

    def next_are_drafted(self, num_tokens: int) -> None:
        self._num_drafted = num_tokens

    def put(self, value: torch.Tensor) -> None:
        """
        Takes the prompt, then new tokens.

        Raises:
            ValueError: for more than one row.
        """
        if value.dim() > 1 and len(value) > 1:
            raise ValueError(f"DraftTintStreamer shows one row, got {len(value)}.")
        is_prompt = self._expects_prompt
        self._expects_prompt = False
        if is_prompt and self.skip_prompt:
            return
        for token_id in value.reshape(-1).tolist():
            drafted = self._num_drafted > 0
            self._num_drafted -= drafted
            self._token_ids.append(token_id)
            if text := self._whole_text():
                self.on_text(text, drafted)

    def end(self) -> None:
        """Prints what is left, then a newline."""
        if text := self._pending_text():
            self.on_text(text, drafted=False)
        self._restart()
        print(file=self.file, flush=True)

    def on_text(self, text: str, drafted: bool) -> None:
        """Prints the text of one token, or of the tokens that one character is spread over."""
        if self.color:
            text = f"{DRAFTED_STYLE if drafted else OWN_STYLE}{text}{RESET}"
        print(text, end="", file=self.file, flush=True)

    # ------------------------------------------------------------------ helpers

    def _restart(self) -> None:
        self._expects_prompt = True
        self._num_drafted = 0
        self._token_ids = []
        self._num_printed = 0

    def _whole_text(self) -> str:
        """The text of the unprinted tokens; `""` while it ends inside a character."""
        text = self._pending_text()
        if not text or text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        del self._token_ids[: self._num_printed]
        self._num_printed = len(self._token_ids)
        return text

    def _pending_text(self) -> str:
        before = str(self.tokenizer.decode(self._token_ids[: self._num_printed], **self.decode_kwargs))
        after = str(self.tokenizer.decode(self._token_ids, **self.decode_kwargs))
        return after[len(before) :]


def wants_color(file: TextIO) -> bool:
    """Whether to write colours to `file` (see no-color.org)."""
    return file.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
