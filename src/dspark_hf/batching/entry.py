"""`generate_many`: any number of requests, a fixed number of rows, results as they end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..generation.draft_settings import DraftOptions
from ..generation.pass_trial import check_passes
from ..generation.requirements import unwrap_drafter
from ..scheduling import VerifyScheduler
from ..transformers_names import GenerativeModel
from .drafting import RowsDrafting
from .engine import Engine
from .requests import GenerationRequest, GenerationResult
from .shared_pass import SharedPass


def generate_many(
    target: GenerativeModel,
    drafter: Any,
    requests: Iterable[GenerationRequest | None],
    *,
    rows: int = 8,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    verify_scheduler: VerifyScheduler | str | None = None,
    drafting_backoff: bool | None = None,
) -> Iterator[GenerationResult]:
    """
    Decodes many independent requests at once (continuous batching). A row whose request has ended is given to the next one
    immediately.

    ```python
    >>> requests = (GenerationRequest(ids, key, settings={"max_new_tokens": 64}) for key, ids in prompts)  # doctest: +SKIP
    >>> for result in dspark_hf.generate_many(target, drafter, requests, rows=16):  # doctest: +SKIP
    ...     print(result.key, result.finish_reason, result.token_ids)
    ```

    The output of each request is that of plain `generate` for it alone: with greedy decoding the same tokens, with sampling a
    draw from the same distribution. One seed gives one output, whichever requests share its passes and whatever is drafted (up to
    the rounding of floating-point numbers). A request that fails ends alone, with its error in its result.

    Args:
        target: A decoder-only target whose layers all cache keys and values.
        drafter: Its drafter; `None` decodes plainly.
        requests: Read only as rows become free, so it may be a long generator. It may yield `None` for "none is ready now":
            then the running requests get another round before it is asked again.
        rows: Most requests at a time.
        tokenizer: For requests with stop strings.
        num_assistant_tokens, assistant_confidence_threshold, verify_scheduler, drafting_backoff: As in
            [`~dspark_hf.dspark_generate`], for all requests.

    Returns:
        The results, in the order in which the requests end.

    Raises:
        ValueError: when the target cannot share passes among rows, or settings do not fit the drafter.
    """
    if rows < 1:
        raise ValueError(f"rows={rows} decodes nothing: at least 1.")
    base = unwrap_drafter(drafter)
    if drafter is not None and base is None:
        raise ValueError(f"{type(drafter).__name__} is not a drafter of dspark_hf. Pass a loaded drafter, or None.")
    check_passes(target)
    shared = SharedPass(target, [] if base is None else base.config.hidden_state_indices)
    options = DraftOptions(num_assistant_tokens, assistant_confidence_threshold, verify_scheduler, drafting_backoff)
    drafting = None if base is None else RowsDrafting(base, target, rows, options)
    return Engine(target, shared, drafting, rows, tokenizer).run(requests)
