"""What the tests of training read of a run, and a short run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from dspark_hf import Drafter
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments


def losses(trainer: DSparkTrainer) -> list[float]:
    """The logged losses, in their order."""
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: DSparkTrainer) -> dict[str, torch.Tensor]:
    """Copies of the drafter's parameters."""
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def trained(target: PreTrainedModel, drafter: Any, folder: Path, num_tokens: int = 24) -> Any:
    """The drafter as it is read back after three steps on two rows of `num_tokens` tokens."""
    rows = [{"input_ids": list(range(1, num_tokens + 1)), "loss_mask": [1] * num_tokens} for _ in range(2)]
    arguments = DSparkTrainingArguments(
        output_dir=str(folder / "run"),
        max_steps=3,
        learning_rate=1e-2,
        num_anchors=4,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    trainer = DSparkTrainer(model=drafter, target=target, train_dataset=rows, args=arguments)
    trainer.train()
    trainer.save_model(str(folder / "trained"))
    return Drafter.from_pretrained(folder / "trained")
