"""The training arguments of [`DSparkTrainer`]."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainingArguments

from ..number_types import floating_dtype
from .refused_arguments import check_arguments


@dataclass
class DSparkTrainingArguments(TrainingArguments):
    """
    [`~transformers.TrainingArguments`] with additional fields; the `help` of each field says what it does.

    The defaults are those of the released drafters (paper section 6), which were trained with a batch of 512
    conversations, in bfloat16, for 10 epochs.
    """

    learning_rate: float = field(default=6e-4, metadata={"help": "Peak learning rate of AdamW."})
    warmup_steps: float = field(
        default=0.04, metadata={"help": "Warm-up: a number of steps, or below 1 a fraction of all steps."}
    )
    logging_steps: float = field(default=20, metadata={"help": "Log every so many optimiser steps."})

    num_anchors: int = field(
        default=512,
        metadata={"help": "Blocks sampled in each row. Rows with fewer possible anchors use what they have."},
    )
    position_decay: float | None = field(
        default=4.0,
        metadata={"help": "Draft j of a block (from 0) weighs exp(-j / position_decay). 0 or None: all weigh alike."},
    )
    ce_weight: float = field(default=0.1, metadata={"help": "Weight of the cross-entropy with the true token."})
    tv_weight: float = field(
        default=0.9, metadata={"help": "Weight of ||p_draft - p_target||_1, whose half is the rejection probability."}
    )
    confidence_weight: float = field(
        default=1.0, metadata={"help": "Weight of the confidence head's cross-entropy with the acceptance probability."}
    )
    logits_chunk_size: int = field(
        default=1024,
        metadata={
            "help": "Drafts whose logits exist at once: about 4 x vocabulary x 4 bytes each. 0 computes all at once "
            "with the readable reference implementation."
        },
    )
    matrix_optimizer: str = field(
        default="adamw",
        metadata={
            "help": "What trains the matrices of the draft layers: 'adamw' (as everything else), or 'muon', which takes "
            "about half the steps; then `optim` is not read. Muon needs torch 2.9 or newer and whole matrices, so not "
            "FSDP or DeepSpeed."
        },
    )
    anchor_seed: int | None = field(default=None, metadata={"help": "Seeds the anchors; data_seed or seed by default."})
    max_length: int | None = field(
        default=4096, metadata={"help": "Conversations are cut here when the trainer tokenizes them."}
    )
    chat_template_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Options of the chat template that the responses were made with, as JSON: '{\"enable_thinking\": false}'."
        },
    )
    save_dtype: str | None = field(
        default=None,
        metadata={
            "help": "Dtype save_model() writes, such as 'bfloat16'; the training dtype by default. Checkpoints always "
            "keep the training dtype, so that a resumed run is exact."
        },
    )

    @property
    def folder(self) -> str:
        """`output_dir`, which transformers fills in if it is not given."""
        return str(self.output_dir)

    @property
    def template_options(self) -> dict[str, Any]:
        """`chat_template_kwargs` as a dictionary."""
        assert not isinstance(self.chat_template_kwargs, str), "JSON is parsed in __post_init__"
        return self.chat_template_kwargs or {}

    def __getstate__(self) -> dict[str, Any]:
        """Without the access token, because this is what `training_args.bin` holds, which is pushed with the weights."""
        return vars(self) | {"hub_token": None}

    def __post_init__(self) -> None:
        if self.greater_is_better is None and (self.metric_for_best_model or "").endswith("error"):
            self.greater_is_better = False  # transformers only knows that a smaller loss is better.
        super().__post_init__()
        if isinstance(self.chat_template_kwargs, str):
            try:
                self.chat_template_kwargs = json.loads(self.chat_template_kwargs)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"chat_template_kwargs is not valid JSON ({error}): {self.chat_template_kwargs!r}."
                ) from None
        if not isinstance(self.chat_template_kwargs, dict | None):
            raise ValueError(
                f"chat_template_kwargs is {self.chat_template_kwargs!r}; give options by name, such as "
                "'{\"enable_thinking\": false}'."
            )
        weights = {
            "ce_weight": self.ce_weight,
            "tv_weight": self.tv_weight,
            "confidence_weight": self.confidence_weight,
        }
        for name, weight in weights.items():
            if weight < 0:
                raise ValueError(f"{name} is {weight}; a loss term cannot weigh less than 0.")
        if self.ce_weight == self.tv_weight == 0:
            raise ValueError("ce_weight and tv_weight are both 0, so the drafter would learn no tokens.")
        if self.matrix_optimizer not in ("adamw", "muon"):
            raise ValueError(f"matrix_optimizer is {self.matrix_optimizer!r}; give 'adamw' or 'muon'.")
        if self.matrix_optimizer == "muon" and (self.fsdp or self.deepspeed):
            raise ValueError("matrix_optimizer='muon' needs whole matrices, which FSDP and DeepSpeed cut: use 'adamw'.")
        check_arguments(self, uses_muon=self.matrix_optimizer == "muon")
        if self.save_dtype is not None:
            floating_dtype(self.save_dtype, "save_dtype")
        if self.logits_chunk_size < 0:
            raise ValueError(f"logits_chunk_size is {self.logits_chunk_size}; give a number of drafts, or 0 for all.")
