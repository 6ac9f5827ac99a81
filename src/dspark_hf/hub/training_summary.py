"""A record of how a drafter was trained, stored with its weights and shown on its card."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

from ..storage.atomic import write_text
from .private import without_secrets

TRAINING_FILE = "training.json"


@dataclass
class TrainingSummary:
    """
    How a drafter was trained. All of it is optional, and all of it is shown on the model card.

    Access tokens are removed before saving.

    Args:
        command: The command that trains it again.
        data: The training data in words: kind and amount.
        datasets: Names of its data sets on the Hub, for the card's metadata.
        settings: Settings by name: learning rate, epochs, weights of the losses, ...
        results: Final figures by name, numbers or text: `loss`, `acceptance_length`, `hours`, ...; the card describes those of
            the trainer in words.
        environment: Versions, device, ... by name.
        figures: Names of image files in the folder of the weights.
    """

    command: str | None = None
    data: str | None = None
    datasets: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    figures: list[str] = field(default_factory=list)

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes `training.json` into the folder of the weights."""
        text = json.dumps(without_secrets(asdict(self)), indent=2, default=str)
        write_text(Path(folder) / TRAINING_FILE, text + "\n")

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> TrainingSummary | None:
        """Reads a folder's `training.json`; `None` if the folder has no such file. Unknown fields are ignored."""
        file = Path(folder) / TRAINING_FILE
        if not file.is_file():
            return None
        stored = json.loads(file.read_text(encoding="utf-8"))
        return cls(**{f.name: stored[f.name] for f in fields(cls) if f.name in stored})
