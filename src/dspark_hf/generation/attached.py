"""`attach(target, drafter)`: every `generate` of a target drafts, also where a library calls it."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafter import Drafter
from ..scheduling import VerifyScheduler
from ..transformers_names import uncompiled, without_peft
from .draft_settings import DraftOptions, draft_settings
from .requirements import CannotDraft, unwrap_drafter

logger = logging.get_logger(__name__)

# The attachments of each target; the last one is in use. Neither a target nor its copies and files know of them.
_attachments: weakref.WeakKeyDictionary[PreTrainedModel, list[Attachment]] = weakref.WeakKeyDictionary()


class Attachment:
    """
    A drafter that a target's `generate` uses. As a context manager it is attached inside, and detached at the end; then
    what was attached before is in use again.

    Attributes:
        drafter (`Drafter`): The drafter.
        options (`DraftOptions`): How it drafts, where a call says nothing else.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter, options: DraftOptions):
        self.drafter, self.options = drafter, options
        self._target = weakref.ref(target)
        self._warned: set[str] = set()
        self._scheduler_is_free = threading.Lock()
        self._attach()

    def detach(self) -> None:
        """Ends the attachment. Others of the same target stay."""
        target = self._target()
        others = [] if target is None else [other for other in _attachments.get(target, []) if other is not self]
        if target is not None and others:
            _attachments[target] = others
        elif target is not None:
            _attachments.pop(target, None)

    def _attach(self) -> None:
        target = self._target()
        if target is not None and self not in (attached := _attachments.get(target, [])):
            _attachments[target] = [*attached, self]

    def __enter__(self) -> Attachment:
        self._attach()
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.detach()

    def drafter_on(self, device: torch.device) -> Drafter:
        """
        The drafter, moved to the target's device if that has changed.

        Raises:
            CannotDraft: when its weights have been given up.
        """
        if self.drafter.device.type == "meta":
            raise CannotDraft("The drafter has no weights: it is on the device meta.")
        if self.drafter.device != device:
            self.drafter.to(device)
        return self.drafter

    @contextlib.contextmanager
    def options_of(self, call: DraftOptions) -> Iterator[DraftOptions]:
        """
        Inside, the settings of a call. A scheduler serves one call at a time, so a call that begins while another one runs gets
        a copy of the attached one.
        """
        options = call.over(self.options)
        is_ours = self._scheduler_is_free.acquire(blocking=False)
        try:
            if not is_ours and isinstance(options.verify_scheduler, VerifyScheduler):
                options.verify_scheduler = copy.deepcopy(options.verify_scheduler)
            yield options
        finally:
            if is_ours:
                self._scheduler_is_free.release()

    def warn_plain(self, reason: object) -> None:
        """Says once for each reason why a call runs without the drafter."""
        text = reason.reason if isinstance(reason, CannotDraft) else str(reason)
        kind = re.sub(r"\d+", "0", text)  # The same reason with other lengths is not said again.
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(f"A call of generate runs without the attached drafter. {text}")


def attach(
    target: Any,
    drafter: Any,
    *,
    num_assistant_tokens: int | None = None,
    assistant_confidence_threshold: float | None = None,
    verify_scheduler: VerifyScheduler | str | None = None,
    drafting_backoff: bool | None = None,
) -> Attachment:
    """
    Makes every `generate` of a target draft, until [`detach`]: in pipelines, trainers, evaluation libraries and agents, which
    call `generate` themselves.

    ```python
    >>> dspark_hf.attach(target, drafter)  # doctest: +SKIP
    >>> target.generate(**inputs)  # Drafts.  # doctest: +SKIP
    >>> with dspark_hf.attach(target, drafter, verify_scheduler="throughput"):  # doctest: +SKIP
    ...     trainer.train()
    ```

    A call that names another assistant or another decoding method, or that cannot draft, runs as if nothing was attached, with
    one warning for each reason. The output is that of plain `generate` in any case. The drafter becomes no part of the target:
    its parameters, its files and its copies are as before.

    Args:
        target (`PreTrainedModel`): The target, possibly wrapped by PEFT, DDP or `torch.compile`.
        drafter (`Drafter`): Its drafter. It follows the target to another device.
        num_assistant_tokens, assistant_confidence_threshold, verify_scheduler, drafting_backoff: As in
            [`~dspark_hf.dspark_generate`]. What a call sets itself replaces them.

    Returns:
        [`Attachment`], which may be used as a context manager.

    Raises:
        ValueError: when the drafter is not one or does not fit the target, or a setting cannot be used.
    """
    model = unwrap_target(target)
    base = unwrap_drafter(drafter) if isinstance(drafter, torch.nn.Module) else None
    if base is None:
        given = f"the class {drafter.__name__}" if isinstance(drafter, type) else f"{type(drafter).__name__}"
        raise ValueError(
            f"attach takes a loaded drafter of dspark_hf, got {given}. Load one, for instance with "
            "Drafter.from_pretrained(path)."
        )
    base.bind(model)
    options = DraftOptions(num_assistant_tokens, assistant_confidence_threshold, verify_scheduler, drafting_backoff)
    draft_settings(base, model, options)
    return Attachment(model, base, options)


def detach(target: Any) -> None:
    """
    Makes a target's `generate` decode without a drafter again, however many were attached.

    Args:
        target: As in [`attach`]. A target without an attached drafter stays as it is.
    """
    _attachments.pop(unwrap_target(target), None)


def attachment_of(target: PreTrainedModel) -> Attachment | None:
    """What is attached to a target and in use."""
    return next(reversed(_attachments.get(target, [])), None)


def unwrap_target(target: Any) -> PreTrainedModel:
    """
    The model whose `generate` is called in the end, without what PEFT, DDP or `torch.compile` put around it.

    Raises:
        ValueError: when there is no such model.
    """
    model = target
    while not isinstance(model, PreTrainedModel):
        if (base := without_peft(model)) is not model:
            model = base
        elif (inner := uncompiled(model)) is not None:
            model = inner
        elif isinstance(model, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            model = model.module
        else:
            raise ValueError(f"The target must be a model of transformers, not {type(target).__name__}.")
    return model
