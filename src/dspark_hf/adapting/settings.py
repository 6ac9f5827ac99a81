"""What an adaptation can be told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class AdaptSettings:
    """
    Args:
        target: The target, a folder or a model on the Hub.
        drafter: The drafter to start from, likewise. It stays as it is.
        prompts: The user's prompts: a JSONL file, or a data set as for `read_prompts`.
        output: Folder for the adapted drafter and everything that leads to it. An interrupted run resumes from it.
        general: Prompts of other domains, so that the drafter keeps what it can do there. By default the target writes them,
            which needs a chat template.
        general_prompts: How many of those are used; 0 for none.
        max_prompts: Use at most this many of the user's prompts.
        held_out: Share of the prompts, of either sort, that is not trained on. One half chooses the best checkpoint and
            calibrates the confidences, the other half compares the drafter before and after.
        max_new_tokens, temperature, thinking: How the target answers, as in
            [`~dspark_hf.responses.RegenerationSettings`]. Answer as you will generate.
        minutes: Time that training may take. The number of steps follows from a few timed ones.
        max_steps: Number of training steps instead.
        patience: Training stops early after this many evaluations without a better one. There are `evaluations` of them.
        evaluations: Evaluations during training.
        lora_rank: Train LoRA matrices of this rank, and merge them at the end; by default all weights are trained.
        learning_rate: Peak learning rate; by default 1.5e-3, with LoRA 1e-3.
        batch_size: Conversations per step.
        num_anchors: Blocks per conversation and step.
        training: Other fields of [`~dspark_hf.training.DSparkTrainingArguments`] by name.
        dtype, device: Of the target.
        seed: Seed of responses, training and intervals.

    Raises:
        ValueError: for a value that cannot be used.
    """

    target: str
    drafter: str
    prompts: str
    output: str
    general: str | None = None
    general_prompts: int = 200
    max_prompts: int | None = None
    held_out: float = 0.2
    max_new_tokens: int | None = None
    temperature: float | None = None
    thinking: bool | None = None
    minutes: float = 20.0
    max_steps: int | None = None
    patience: int = 4
    evaluations: int = 12
    lora_rank: int | None = None
    learning_rate: float | None = None
    batch_size: int = 8
    num_anchors: int = 32
    training: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; give a share between 0 and 1, such as 0.2.")
        if self.minutes <= 0:
            raise ValueError(f"minutes is {self.minutes}; give the minutes that training may take.")
        for name in ("max_prompts", "max_steps", "evaluations", "patience", "batch_size", "num_anchors"):
            if (value := vars(self)[name]) is not None and value < 1:
                raise ValueError(f"{name} is {value}; give 1 or more.")
        if self.general_prompts < 0:
            raise ValueError(f"general_prompts is {self.general_prompts}; give a number of prompts, or 0 for none.")

    @property
    def answers(self) -> dict[str, Any]:
        """The settings that the target's answers depend on, by the names of `RegenerationSettings`."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "enable_thinking": self.thinking,
            "seed": self.seed,
        }
