"""A chat as token ids, continued so that the target's cache of the earlier turns stays valid."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .templates import has_template, opening_tokens

# A placeholder for an answer, to find out which text the chat template puts after it.
_ANSWER = "\u2402ANSWER\u2403"


class Chat:
    """
    One chat with the target, turn by turn.

    The next turn's prompt is the token ids so far, with answers exactly as they were generated, plus what the chat template puts
    after an answer. Tokenizing the whole text again could split an answer differently, and the target's cache would not fit.

    ```python
    >>> chat = Chat(tokenizer)  # doctest: +SKIP
    >>> inputs = chat.ask("Hello!")  # doctest: +SKIP
    >>> chat.add_answer(target.generate(inputs.to(target.device))[0])  # doctest: +SKIP
    ```

    Args:
        tokenizer: The target's tokenizer. Without a chat template, prompts are plain text that the target continues, turns are
            separated by a blank line, and there is a warning.
        system: A system message.
        template_kwargs: Arguments of the chat template; `enable_thinking=False` by default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **template_kwargs: Any):
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.token_ids: list[int] = []
        self._template_kwargs = {"enable_thinking": False} | template_kwargs
        self._has_template = has_template(
            tokenizer, "prompts are plain text that the target continues, and turns are separated by a blank line"
        )

    def ask(self, text: str) -> torch.Tensor:
        """Adds a user's turn. Returns the whole prompt, `[1, P]`."""
        self.messages.append({"role": "user", "content": text})
        if not self.token_ids:
            self.token_ids = opening_tokens(self.tokenizer, self._render(self.messages))
        else:
            ids = self.tokenizer(self._after_answer(), add_special_tokens=False)["input_ids"]
            self.token_ids = self.token_ids + list(ids)
        return torch.tensor([self.token_ids])

    def add_answer(self, output_ids: torch.Tensor) -> str:
        """
        Adds the generated answer.

        Args:
            output_ids: Prompt and answer, `[L]`.

        Returns:
            The answer's text.
        """
        answer_ids = output_ids.tolist()[len(self.token_ids) :]
        self.token_ids = self.token_ids + answer_ids
        text = str(self.tokenizer.decode(answer_ids, skip_special_tokens=True))
        self.messages.append({"role": "assistant", "content": text})
        return text

    # ------------------------------------------------------------------ helpers

    def _after_answer(self) -> str:
        """The text from the end of the last answer to the start of the next."""
        if not self._has_template:
            return "\n\n" + self.messages[-1]["content"]
        messages = [dict(message) for message in self.messages]
        messages[-2]["content"] = _ANSWER
        _, _, rest = self._render(messages).rpartition(_ANSWER)
        last = str(self.tokenizer.decode(self.token_ids[-1:]))
        # A complete answer already ends with the token that the template puts after it.
        return rest.removeprefix(last) if self.token_ids[-1] in self.tokenizer.all_special_ids else rest

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not self._has_template:
            return "\n\n".join(message["content"] for message in messages)
        return str(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._template_kwargs
            )
        )
