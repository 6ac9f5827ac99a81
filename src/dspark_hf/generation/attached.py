"""`attach(target, drafter)`: every `generate` of a target drafts, also where a library calls it."""

from __future__ import annotations

import re
import threading
import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..drafter import Drafter
from ..scheduling import VerifyScheduler
from ..transformers_names import uncompiled, without_peft
from .draft_settings import draft_settings
from .requirements import unwrap_drafter

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.get_logger(__name__)

# Neither a target nor its copies and files know of the drafter.
_attachments: weakref.WeakKeyDictionary[PreTrainedModel, Attachment] = weakref.WeakKeyDictionary()


class DraftSettings(TypedDict, total=False):
    """The settings of [`~dspark_hf.dspark_generate`] that an attachment can hold."""

    num_assistant_tokens: int | None
    assistant_confidence_threshold: float | None
    verify_scheduler: VerifyScheduler | str | None
    drafting_backoff: bool | None


class Attachment:
    """
    A drafter that a target's `generate` uses. Leaving it as a context manager detaches the drafter; what was attached before
    is attached again.

    Attributes:
        drafter (`Drafter`): The drafter.
        settings (`dict`): How it drafts, where a call says nothing else.
    """

    def __init__(self, target: PreTrainedModel, drafter: Drafter, settings: DraftSettings):
        self.drafter, self.settings = drafter, settings
        self.lock = threading.RLock()  # A drafter's buffers serve one call at a time.
        self._target, self._before = weakref.ref(target), _attachments.get(target)
        self._warned: set[str] = set()
        _attachments[target] = self

    def detach(self) -> None:
        """Ends the attachment, unless another drafter has been attached since."""
        target = self._target()
        if target is None or _attachments.get(target) is not self:
            return
        if self._before is None:
            del _attachments[target]
        else:
            _attachments[target] = self._before

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.detach()

    def drafter_on(self, device: torch.device) -> Drafter:
        """The drafter, moved to the target's device if that has changed."""
        if self.drafter.device != device:
            self.drafter.to(device)
        return self.drafter

    def warn_plain(self, reason: object) -> None:
        """Says once for each reason why a call runs without the drafter."""
        kind = re.sub(r"\d+", "0", str(reason))  # The same reason with other lengths is not said again.
        if kind not in self._warned:
            self._warned.add(kind)
            logger.warning(f"A call of generate runs without the attached drafter. {reason}")


def attach(target: Any, drafter: Any, **settings: Unpack[DraftSettings]) -> Attachment:
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
        settings: `num_assistant_tokens`, `assistant_confidence_threshold`, `verify_scheduler` and `drafting_backoff`, as in
            [`~dspark_hf.dspark_generate`]. A call may set others.

    Returns:
        [`Attachment`], which may be used as a context manager.

    Raises:
        ValueError: when the drafter is not one or does not fit the target, or a setting cannot be used.
        TypeError: for an unknown setting.
    """
    if unknown := settings.keys() - DraftSettings.__annotations__.keys():
        raise TypeError(
            f"attach takes no {', '.join(sorted(unknown))}; settings are {', '.join(DraftSettings.__annotations__)}."
        )
    model, base = unwrap_target(target), unwrap_drafter(drafter)
    if base is None:
        raise ValueError(
            f"attach takes a drafter of dspark_hf, got {type(drafter).__name__}. Load one, for instance with "
            "Drafter.from_pretrained(path)."
        )
    base.bind(model)
    draft_settings(
        base,
        model,
        settings.get("num_assistant_tokens"),
        settings.get("assistant_confidence_threshold"),
        settings.get("verify_scheduler"),
    )
    return Attachment(model, base, settings)


def detach(target: Any) -> None:
    """
    Makes a target's `generate` decode without a drafter again, however many were attached.

    Args:
        target: As in [`attach`]. A target without an attached drafter stays as it is.
    """
    _attachments.pop(unwrap_target(target), None)


def attachment_of(target: PreTrainedModel) -> Attachment | None:
    """What is attached to a target."""
    return _attachments.get(target)


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
            raise ValueError(f"attach takes a model of transformers as its target, got {type(target).__name__}.")
    return model
