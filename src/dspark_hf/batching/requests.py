"""A request for one output, and its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers.generation.streamers import BaseStreamer

FinishReason = Literal["eos", "stop", "length", "cancelled", "error"]


@dataclass(eq=False)
class GenerationRequest:
    """
    A prompt to continue, with its own settings.

    Args:
        input_ids: The prompt: at least one token id, as a list or a tensor `[P]` or `[1, P]`.
        key: The caller's name for it, returned with the result.
        seed: Seeds its random numbers. One seed gives one output, whichever requests share its passes and whatever is drafted; by
            default a seed is drawn from torch's global generator.
        streamer: Gets the prompt and then each token, as in `generate`.
        is_cancelled: Called before every pass; once it returns True, the request ends with the tokens it has.
        settings: Arguments of `generate` that are fields of its `GenerationConfig` (`max_new_tokens`, `do_sample`, `temperature`,
            `stop_strings`, ...), and `logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`.
    """

    input_ids: Sequence[int] | torch.Tensor
    key: Any = None
    seed: int | None = None
    streamer: BaseStreamer | None = None
    is_cancelled: Callable[[], bool] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._has_been_cancelled = False

    def cancel(self) -> None:
        """Ends the request before the next pass, or as soon as it would start. May be called from any thread."""
        self._has_been_cancelled = True

    @property
    def wants_to_end(self) -> bool:
        """Whether it was cancelled in either way."""
        return self._has_been_cancelled or (self.is_cancelled is not None and bool(self.is_cancelled()))


@dataclass(frozen=True)
class GenerationResult:
    """
    The end of a request.

    Args:
        request: The request.
        token_ids: The tokens after the prompt, an end-of-sequence token included.
        finish_reason: `"eos"` (an end-of-sequence token), `"stop"` (a stop string or another criterion), `"length"`,
            `"cancelled"` or `"error"`.
        num_prompt_tokens: Tokens of the prompt.
        num_passes: Passes of the target after the prompt's.
        num_drafted: Drafts that the target verified.
        num_accepted: Drafts that were accepted.
        seed: The seed of its random numbers; `None` for greedy decoding.
        error: What went wrong; `None` unless `finish_reason` is `"error"`.
    """

    request: GenerationRequest
    token_ids: list[int]
    finish_reason: FinishReason
    num_prompt_tokens: int = 0
    num_passes: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seed: int | None = None
    error: Exception | None = None

    @property
    def key(self) -> Any:
        """The caller's name for the request."""
        return self.request.key

    @property
    def acceptance_length(self) -> float:
        """Tokens per pass of the target; NaN without passes."""
        return len(self.token_ids) / self.num_passes if self.num_passes else float("nan")

    @property
    def acceptance_rate(self) -> float:
        """The accepted share of the verified drafts; NaN without any."""
        return self.num_accepted / self.num_drafted if self.num_drafted else float("nan")
