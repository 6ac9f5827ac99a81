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
from ..tapping import capturing_hooks
from ..transformers_names import GenerativeModel, compute_device, plain_decoding
from .attached import Attachment
from .call import Call, prepare_call
from .draft_settings import DraftOptions
from .loop import decode
from .pass_mode import make_ordinary


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

    The second form works without the patch of `generate`. But after `dspark_hf.unregister()`, transformers does not pass
    `streamer=` and `tokenizer=` to a decoding loop given this way.

    Args:
        model: The target.
        input_ids: Prompt, `[B, P]`.
        logits_processor, stopping_criteria, generation_config, model_kwargs: As `generate` prepared them.
        drafter: The drafter, possibly wrapped by PEFT.
        streamer: Gets each committed token, as in plain `generate`.
        num_assistant_tokens: Drafts per round; by default that of the drafter's `generation_config`.
        assistant_confidence_threshold: Drafting stops at the first slot below this confidence.
        verify_scheduler: A scheduler, or the name of one, that decides how many drafts of each row are verified.
        drafting_backoff: Whether drafting pauses while it costs more time than it saves; on by default.

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
        return decode_call(prepare_call(*prepared, drafter, streamer, options, model_kwargs), input_ids)


def decode_call(call: Call, input_ids: torch.Tensor) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Decodes the prompts `[B, P]` of a prepared call, and leaves the models as they were."""
    with contextlib.ExitStack() as ending:
        ending.callback(call.end)
        ending.callback(make_ordinary, call.generator.drafter)
        ending.enter_context(capturing_hooks(call.prompt.model))
        return decode(call, input_ids)


@torch.no_grad()
def attached_generate(
    attachment: Attachment,
    model: GenerativeModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    options: DraftOptions,
    model_kwargs: dict[str, Any],
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """
    Decodes with the attached drafter, or as plain `generate` if that is not possible.

    Args: as in [`dspark_generate`].
    """
    prepared = (model, input_ids, logits_processor, stopping_criteria, generation_config)
    with attachment.options_of(options) as settings, contextlib.ExitStack() as ending:
        try:
            drafter = attachment.drafter_on(compute_device(model))
            call = prepare_call(*prepared, drafter, streamer, settings, model_kwargs)
        except ValueError as reason:  # Whatever cannot draft; plain `generate` finds mistakes of the caller again.
            attachment.warn_plain(reason)
            return plain_decoding(*prepared, streamer, model_kwargs)
        if streamer is not None:
            ending.callback(streamer.end)
        return decode_call(call, input_ids)
