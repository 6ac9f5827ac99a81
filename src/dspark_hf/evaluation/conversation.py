"""A chat as token ids, continued so that what the target's cache holds of it stays valid."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

# Stands for an answer while the text that follows it is looked up in the chat template.
_ANSWER = "\u2402ANSWER\u2403"


class Conversation:
    """
    One chat with the target, turn by turn.

    The next turn's prompt is the ids so far, answers exactly as they were generated, plus what the chat template puts
    after an answer. Tokenizing the whole text anew could split an answer differently, and the cache would not fit.

    ```python
    >>> conversation = Conversation(tokenizer)  # doctest: +SKIP
    >>> inputs = conversation.ask("Hello!")  # doctest: +SKIP
    >>> conversation.add_answer(target.generate(**inputs.to(target.device))[0])  # doctest: +SKIP
    ```

    Args:
        tokenizer: With a chat template; without one, turns are joined as plain text.
        system: What stands before the first turn.
        template_kwargs: For the chat template; `enable_thinking=False` by default.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None, **template_kwargs: Any):
        self.tokenizer = tokenizer
        self.messages: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
        self.token_ids: list[int] = []
        self._template_kwargs = {"enable_thinking": False} | template_kwargs

    def ask(self, text: str) -> torch.Tensor:
        """Adds a user's turn. Returns the whole prompt, `[1, P]`."""
        self.messages.append({"role": "user", "content": text})
        if not self.token_ids:
            self.token_ids = self._encode(self._render(self.messages))
        else:
            self.token_ids = self.token_ids + self._encode(self._after_answer())
        return torch.tensor([self.token_ids])

    def add_answer(self, output_ids: torch.Tensor) -> str:
        """
        Takes what was generated.

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
        messages = [dict(message) for message in self.messages]
        messages[-2]["content"] = _ANSWER
        _, _, rest = self._render(messages).rpartition(_ANSWER)
        last = str(self.tokenizer.decode(self.token_ids[-1:]))
        # An answer that was not cut short ends with the token that the template puts there.
        return rest.removeprefix(last) if self.token_ids[-1] in self.tokenizer.all_special_ids else rest

    def _render(self, messages: list[dict[str, str]]) -> str:
        if not self.tokenizer.chat_template:
            return "\n\n".join(message["content"] for message in messages) + "\n\n"
        return str(
            self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False, **self._template_kwargs
            )
        )

    def _encode(self, text: str) -> list[int]:
        # A chat template writes its own special tokens.
        add_special_tokens = not self.tokenizer.chat_template and not self.token_ids
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
