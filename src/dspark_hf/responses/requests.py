"""A request, which is a prompt to continue, and its completion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Request:
    """A prompt to continue.

    Args:
        key: the caller's name for it, returned with the completion.
        input_ids: the prompt's token ids, at least one.
        max_new_tokens: the limit of the response.
        seed: seeds this request's uniform numbers.
    """

    key: int
    input_ids: list[int]
    max_new_tokens: int
    seed: int = 0


@dataclass
class Completion:
    """The response to a request.

    Args:
        key: the request's.
        token_ids: the new tokens, without the end-of-sequence token.
        end_id: the end-of-sequence token that ended it; None if the limit cut it.
    """

    key: int
    token_ids: list[int]
    end_id: int | None

    @property
    def finished(self) -> bool:
        return self.end_id is not None

    @property
    def num_tokens(self) -> int:
        """Generated tokens, including the end-of-sequence token."""
        return len(self.token_ids) + self.finished
