"""Finds the checkpoints of a run that are complete, and those from which training can resume."""

from __future__ import annotations

import json
from pathlib import Path

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

logger = logging.get_logger(__name__)


def last_checkpoint(folder: str | Path) -> str | None:
    """The newest complete checkpoint in the folder of a run."""
    names = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    steps = {int(step): name for name in names if (step := name.name.rpartition("-")[2]).isdigit()}
    for _, checkpoint in sorted(steps.items(), reverse=True):
        if is_whole(checkpoint):
            return str(checkpoint)
        logger.warning(f"{checkpoint} is ignored: the run was interrupted while it was written.")
    return None


def is_whole(checkpoint: Path) -> bool:
    """Whether a checkpoint is complete: the Trainer writes its state last."""
    try:
        json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def check_resumable(folder: str | Path) -> None:
    """
    Args:
        folder: A checkpoint, or the folder of a run, whose newest checkpoint counts.

    Raises:
        ValueError: when the checkpoint holds weights only; training would go on with a new optimizer.
    """
    checkpoint = Path(folder)
    if not (checkpoint / TRAINER_STATE_NAME).exists() or not checkpoint.name.startswith(PREFIX_CHECKPOINT_DIR):
        newest = last_checkpoint(checkpoint)
        checkpoint = checkpoint if newest is None else Path(newest)
    if not is_whole(checkpoint):
        return  # The Trainer says what is missing.
    if not any(checkpoint.glob("optimizer*")) and not any(checkpoint.glob("global_step*")):
        raise ValueError(
            f"'{checkpoint}' was saved with save_only_model=True, so it has no optimizer state and training cannot resume from "
            "it. Start a new run from its weights (`DSparkDrafter.from_pretrained`, or `--drafter` and `--no-resume` on the "
            "command line), and leave out save_only_model where a run should be resumable."
        )
