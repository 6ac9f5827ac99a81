"""`dspark_generate`, the `custom_generate` callable behind `generate(assistant_model=drafter)`."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation import GenerateDecoderOnlyOutput, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ..drafter import Drafter
from ..scheduling import VerifyScheduler
from ..transformers_names import GenerativeModel
from .call import DraftOptions, prepare_call
from .loop import decode


@torch.no_grad()
def dspark_generate(
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    drafter: Drafter | None = None,
    streamer: BaseStreamer | None = None,
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    verify_scheduler: VerifyScheduler | str | None = None,
    drafting_backoff: bool | None = None,
    **model_kwargs: Any,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """
    Decodes with a DSpark drafter. A `custom_generate` callable: transformers prepares the arguments.

    ```python
    >>> target.generate(**inputs, assistant_model=drafter)  # doctest: +SKIP
    >>> target.generate(**inputs, custom_generate=dspark_hf.dspark_generate, drafter=drafter)  # doctest: +SKIP
    ```

    The second spelling needs no patch of `generate`. After `dspark_hf.unregister()` transformers passes neither `streamer=` nor
    `tokenizer=` on to a loop that is given this way.

    Args:
        model: The target.
        input_ids: Prompt, `[B, P]`.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepared them.
        drafter: The drafter, which may be wrapped by PEFT.
        streamer: Gets each committed token, as in plain `generate`.
        num_assistant_tokens: Drafts per round; the drafter's `generation_config` by default.
        assistant_confidence_threshold: A round's drafts end before the first slot less confident than this.
        verify_scheduler: Decides instead how many of each row's drafts are verified: an object or the name of one.
        drafting_backoff: Whether drafting pauses while it does not pay; on by default.

    Returns:
        What plain `generate` would return: token ids `[B, L]`, or a `GenerateDecoderOnlyOutput`.

    Raises:
        ValueError: for calls that have no exact answer here; each message says what to do instead.
    """
    with contextlib.ExitStack() as ending:
        if streamer is not None:
            ending.callback(streamer.end)
        options = DraftOptions(num_assistant_tokens, assistant_confidence_threshold, verify_scheduler, drafting_backoff)
        prepared = (model, input_ids, logits_processor, stopping_criteria, generation_config)
        call = prepare_call(*prepared, drafter, streamer, options, model_kwargs)
        ending.callback(call.prompt.end)
        return decode(call, input_ids)
