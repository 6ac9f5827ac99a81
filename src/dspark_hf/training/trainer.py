"""Training a drafter against its frozen target, as a [`~transformers.Trainer`].

In each step, the collator gives rows of tokens with their anchors. The target's features come from a cache or from one pass
of the target. The blocks of all anchors go through the drafter in one pass, in which each sees the context before its anchor
and no other block. The objective is called inside the drafter's `forward`, so that wrappers that gather sharded parameters
there (FSDP, DDP) include it.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from ..drafter import Drafter
from ..embeddings import SharedEmbeddings, target_embeddings
from ..hub import write_card
from ..hub.card import CARD_FILE
from ..number_types import floating_dtype
from ..storage.atomic import is_write_error, reason, whole_file, whole_files
from ..transformers_names import (
    GenerativeModel,
    TrainerHooks,
    compute_device,
    has_device_hook,
    has_own_adapter,
    is_quantized,
)
from .adaptation import load_own_adapter
from .anchors import Anchors, draft_positions, gather_positions
from .arguments import DSparkTrainingArguments
from .checkpoints import check_resumable, last_checkpoint
from .collator import FEATURE_KEYS, DSparkCollator
from .features import target_features
from .history import print_lines
from .losses import DraftTargets, DSparkObjective, LossWeights, TargetHead, summed_metrics
from .muon import MuonAdamW, split_parameters
from .refused_arguments import check_keywords
from .target_logits import logit_rule
from .tokenizing import Tokenizing, pass_on_epoch

logger = logging.get_logger(__name__)


class DSparkTrainer(TrainerHooks, Trainer):
    """
    Trains a drafter of any kind.

    ```python
    >>> trainer = DSparkTrainer(  # doctest: +SKIP
    ...     model=drafter, target=target, args=DSparkTrainingArguments("out"), train_dataset=rows, processing_class=tokenizer
    ... )
    >>> trainer.train()  # doctest: +SKIP
    ```

    Args:
        model (`Drafter`): The drafter. 16-bit weights are converted to float32 for training, because small steps would be
            lost in rounding; `bf16=True` still computes in bfloat16.
        target (`PreTrainedModel`): The target. It is neither trained nor saved; load it in bfloat16.
        args (`DSparkTrainingArguments`): The training arguments.
        train_dataset, eval_dataset: Conversations (see `dspark_hf.conversations.rows`; they are tokenized here), rows with
            `input_ids` and `loss_mask`, or a [`CachedFeatureDataset`]; in memory or streamed. `evaluate` and `predict` take
            the same.
        processing_class: The target's tokenizer; needed for conversations, and saved with the drafter.
        kwargs: As in [`~transformers.Trainer`].

    Raises:
        ValueError: when the drafter does not fit the target, one process uses several GPUs, or an argument of the `Trainer`
            cannot apply to a drafter (`compute_metrics`, `model_init`).
    """

    args: DSparkTrainingArguments
    model: Any  # The drafter, possibly wrapped by PEFT.
    data_collator: Any
    optimizer: Any

    def __init__(
        self,
        model: Drafter,
        target: GenerativeModel,
        args: DSparkTrainingArguments | None = None,
        data_collator: DSparkCollator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        args = args or DSparkTrainingArguments("dspark_trainer")
        if not isinstance(args, DSparkTrainingArguments):
            raise ValueError(f"args is a {type(args).__name__}; a drafter is trained with DSparkTrainingArguments.")
        check_keywords(kwargs, uses_muon=args.matrix_optimizer == "muon")
        if args.n_gpu > 1:
            raise ValueError(
                f"With {args.n_gpu} GPUs in one process, the model would be replicated in threads, which is not supported: "
                "start one process per GPU with `accelerate launch` or `torchrun`, or set CUDA_VISIBLE_DEVICES."
            )
        if any(p.requires_grad and p.dtype in (torch.bfloat16, torch.float16) for p in model.parameters()):
            logger.warning("The drafter's 16-bit weights are trained as float32; bf16=True computes in bfloat16.")
            model.float()
        is_placed = getattr(target, "hf_device_map", None) is not None or any(map(has_device_hook, target.modules()))
        if not is_placed and not is_quantized(target):
            target.to(args.device)  # type: ignore[arg-type]  # Declared without `self`.
        self.target = target.eval().requires_grad_(False)
        self._logit_rule = logit_rule(target)
        model.to(args.device)
        for module in (model.embed_tokens, model.lm_head):
            if module is not None:
                module.requires_grad_(False)
        self._bind(model)
        self.loss_weights = LossWeights(args.ce_weight, args.tv_weight, args.confidence_weight)
        if not model.config.gives_confidence:
            self.loss_weights = LossWeights(args.ce_weight, args.tv_weight, 0.0)

        self.tokenizing = Tokenizing(processing_class, target, args.max_length, args.template_options)
        train_dataset, eval_dataset = self.tokenizing(train_dataset), self.tokenizing(eval_dataset)
        if data_collator is None:
            seed = next(s for s in (args.anchor_seed, args.data_seed, args.seed) if s is not None)
            data_collator = self._collator(model, args, seed)
        self._eval_collator = self._collator(model, args, data_collator.seed)  # Never leaves epoch 0.
        self._sums: dict[str, dict[str, torch.Tensor]] = {"train": {}, "eval": {}}
        super().__init__(
            model=model,
            args=args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            **kwargs,
        )
        # The loss is already divided by the weights of all accumulation steps, so the Trainer must not divide again.
        self.model_accepts_loss_kwargs = True
        self.add_callback(_AnchorEpoch(data_collator))
        print_lines(self)

    def _bind(self, drafter: Drafter) -> None:
        """Sets the embedding and LM head that the drafter uses, and the target's distribution that it learns."""
        self.embeddings = drafter.bind(self.target)
        embed_tokens, lm_head = target_embeddings(self.target)
        theirs = self.embeddings
        if theirs.lm_head is not lm_head:  # The drafter has a separate head, but learns the target's distribution.
            theirs = SharedEmbeddings(embed_tokens, lm_head, draft_token_ids=drafter.draft_token_ids)
        self.target_head = TargetHead(theirs, self._logit_rule)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            check_resumable(self.run_folder if resume_from_checkpoint is True else resume_from_checkpoint)
        config = self.model.config
        if config.confidence_temperatures is not None:
            logger.warning(
                "The drafter's calibration belongs to its old weights and is dropped; `dspark-hf calibrate` makes a new one."
            )
            config.confidence_temperatures = None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def load_checkpoint(self, folder: str, model: torch.nn.Module | None = None) -> None:
        if has_own_adapter(self.model):
            load_own_adapter(self.model, folder)
        else:
            super().load_checkpoint(folder, model)
        self._bind(self.model)  # The checkpoint may have another draft vocabulary.

    def load_best_checkpoint(self) -> None:
        if has_own_adapter(self.model):
            assert self.state.best_model_checkpoint is not None
            load_own_adapter(self.model, self.state.best_model_checkpoint)
        else:
            super().load_best_checkpoint()

    @staticmethod
    def _collator(model: Drafter, args: DSparkTrainingArguments, seed: int) -> DSparkCollator:
        pad = model.config.pad_token_id
        return DSparkCollator(
            model.config, args.num_anchors, args.position_decay, seed, pad if isinstance(pad, int) else 0
        )

    # ------------------------------------------------------------------ data

    # The collator needs these columns, and makes the arguments of the drafter's `forward` from them.
    input_columns = ["input_ids", "loss_mask", "anchor_mask", *FEATURE_KEYS]

    def get_train_dataloader(self) -> DataLoader[Any]:
        self.train_dataset = self.tokenizing(self.train_dataset)  # It may have been replaced since.
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        with self._evaluation_anchors():
            return super().get_eval_dataloader(self.tokenizing(eval_dataset))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        with self._evaluation_anchors():
            return super().get_test_dataloader(self.tokenizing(test_dataset))

    @contextlib.contextmanager
    def _evaluation_anchors(self) -> Iterator[None]:
        """Within the context, the anchors do not depend on the epoch, so that evaluations can be compared."""
        collator, self.data_collator = self.data_collator, self._eval_collator
        try:
            yield
        finally:
            self.data_collator = collator

    def count_items(self, batches: list[dict[str, torch.Tensor]], device: torch.device) -> torch.Tensor | None:
        """Sum of the position weights in all micro-batches of one optimiser step, on all ranks."""
        if not batches:
            return None
        total = torch.stack([batch["draft_weights"].sum() for batch in batches]).sum().to(device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            total = self.accelerator.gather(total).sum()
        return total

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if self.optimizer is None and self.args.matrix_optimizer == "muon":
            options = self.args
            self.optimizer = MuonAdamW(
                *split_parameters(self.model),
                lr=options.learning_rate,
                weight_decay=options.weight_decay,
                betas=(options.adam_beta1, options.adam_beta2),
                eps=options.adam_epsilon,
            )
        return self.optimizer if self.optimizer is not None else super().create_optimizer(*args, **kwargs)

    # ------------------------------------------------------------------ loss

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        inputs = self._with_features(inputs)
        anchors = Anchors(inputs["anchor_positions"], inputs["keep_anchors"])
        objective = self._objective(inputs, anchors, num_items_in_batch)
        outputs = model(
            **self.model.training_inputs(inputs["input_ids"], inputs["attention_mask"], *anchors),
            context_features=inputs["context_features"],
            embeddings=self.embeddings,
            objective=objective,
        )
        self._add_sums("train" if model.training else "eval", outputs.metrics)
        loss = outputs.loss
        if num_items_in_batch is not None and self.args.average_tokens_across_devices:
            loss = loss * self.accelerator.num_processes  # Gradients are averaged over ranks, but the loss is a sum.
        return (loss, outputs) if return_outputs else loss

    def _with_features(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if "context_features" in inputs:
            return inputs
        input_ids = inputs["input_ids"]
        features = target_features(
            self.target, self.model.config.hidden_state_indices, input_ids.to(compute_device(self.target))
        )
        # The target may be on another GPU, spread over several, or offloaded.
        return inputs | {key: value.to(input_ids.device) for key, value in features._asdict().items()}

    def _objective(
        self, inputs: dict[str, torch.Tensor], anchors: Anchors, normalizer: torch.Tensor | int | None
    ) -> DSparkObjective:
        positions = draft_positions(anchors, self.model.config.num_draft_tokens)  # [B, A, J]

        def at(key: str, shift: int = 0) -> Any:
            return gather_positions(inputs[key], positions + shift) if key in inputs else None

        targets = DraftTargets(
            labels=at("input_ids", 1),
            hidden_states=at("last_hidden_states"),
            weights=inputs["draft_weights"],
            log_normalizers=at("log_normalizers"),
            greedy_ids=at("greedy_ids"),
        )
        return DSparkObjective(
            head=self.target_head,
            embeddings=self.embeddings,
            targets=targets,
            previous_ids=at("input_ids"),
            weights=self.loss_weights,
            normalizer=normalizer,
            chunk_size=self.args.logits_chunk_size,
        )

    # ------------------------------------------------------------------ metrics

    def _add_sums(self, kind: str, sums: dict[str, torch.Tensor]) -> None:
        mine = self._sums[kind]
        for name, value in sums.items():
            mine[name] = value + mine[name] if name in mine else value

    def _take_metrics(self, kind: str) -> dict[str, float]:
        """The metrics of everything since the last call, over all ranks."""
        sums, self._sums[kind] = self._sums[kind], {}
        if not sums:
            return {}
        sums = {name: self.accelerator.reduce(value, "sum") for name, value in sums.items()}
        return summed_metrics(sums, self.loss_weights)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        if "loss" in logs:
            metrics = self._take_metrics("train")
            metrics.pop("total_loss", None)  # The same as "loss".
            logs |= metrics
        super().log(logs, start_time)

    def prediction_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[torch.Tensor | None, Any, Any]:
        inputs = self.on_device(inputs)
        inputs["draft_weights"] = self._without_repeats(inputs["draft_weights"])
        with torch.no_grad(), self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        return loss.detach(), None, None

    def _without_repeats(self, weights: torch.Tensor) -> torch.Tensor:
        """
        The weights `[B, A, J]`, with zeros for rows that were evaluated before: if the last batch is too small for all
        processes, accelerate adds rows from the start.
        """
        remaining = self.accelerator.gradient_state.remainder  # Number of new rows in all processes.
        if not self.accelerator.gradient_state.end_of_dataloader or remaining <= 0:
            return weights
        new = remaining - self.accelerator.process_index * len(weights)
        return weights * (torch.arange(len(weights), device=weights.device) < new)[:, None, None]

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        self._sums["eval"] = {}
        output = super().evaluation_loop(dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        assert output.metrics is not None
        metrics = self._take_metrics("eval")
        if metrics:
            # A mean over drafts. The Trainer's is a mean over batches, whatever their size.
            output.metrics[f"{metric_key_prefix}_loss"] = metrics.pop("total_loss")
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        return output

    # ------------------------------------------------------------------ files

    def model_was_saved(self, folder: str) -> None:
        """Writes the drafter again in `args.save_dtype`. Checkpoints keep the training dtype, so that training can resume."""
        if self.args.save_dtype is None:
            return
        if (Path(folder) / "adapter_config.json").exists():
            return  # PEFT writes an adapter in the training dtype.
        saved = Drafter.from_pretrained(folder, dtype=floating_dtype(self.args.save_dtype, "save_dtype"))
        saved.save_pretrained(folder)

    def write_model(self, folder: str, state_dict: dict[str, torch.Tensor] | None = None) -> None:
        """Writes drafter or adapter, tokenizer and arguments; on an error the old files stay."""
        if not self.args.should_save:
            super().write_model(folder, state_dict)
            return
        with whole_files(folder) as part:
            if (card := Path(folder) / CARD_FILE).exists():
                shutil.copyfile(card, part / CARD_FILE)  # PEFT adds to an existing card.
            super().write_model(str(part), state_dict)

    def write_checkpoint(self, folder: Path, write: Callable[[], None]) -> None:
        """Writes a checkpoint. If that fails, it is removed, and the error names the last complete one."""
        if self.args.should_save:  # The state is written last: without it, a checkpoint counts as incomplete.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        try:
            super().write_checkpoint(folder, write)
        except Exception as error:
            if not is_write_error(error):
                raise
            if self.args.should_save:
                shutil.rmtree(folder, ignore_errors=True)
            last = last_checkpoint(folder.parent)
            kept = (
                f"The last complete checkpoint is '{last}'; training resumes from it."
                if last
                else "There is none before it."
            )
            raise OSError(f"'{folder}' could not be saved and was removed: {reason(error)}. {kept}") from error

    def save_state(self) -> None:
        """Writes the Trainer's state, with the history of the run, into the output folder."""
        if self.is_world_process_zero():
            with whole_file(Path(self.run_folder) / TRAINER_STATE_NAME) as part:
                self.state.save_to_json(str(part))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Writes the drafter's model card; see [`~dspark_hf.hub.write_card`]."""
        drafter = self.accelerator.unwrap_model(self.model)
        if not isinstance(drafter, Drafter):  # An adapter's card is PEFT's.
            super().create_model_card(*args, **kwargs)
        elif self.is_world_process_zero():
            write_card(drafter, self.run_folder, repo_id=self.args.hub_model_id, token=self.args.hub_token)


class _AnchorEpoch(TrainerCallback):
    """Sets the collator's epoch before the first batch of each epoch is made."""

    def __init__(self, collator: DSparkCollator):
        self.collator = collator

    def on_epoch_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        pass_on_epoch(self.collator, int((state.epoch or 0) + 1e-6))
