"""Every option of transformers' `Trainer` either works for drafters or is refused by name."""

import dataclasses
import re
from pathlib import Path

import datasets
import pytest
import tiny_folders
import torch
import transformers
from training.runs import losses, weights
from transformers import Trainer, TrainerCallback, TrainingArguments

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.refused_arguments import (
    REFUSED_ARGUMENTS,
    REFUSED_KEYWORDS,
    REFUSED_KEYWORDS_WITH_MUON,
    REFUSED_WITH_MUON,
)
from dspark_hf.training.trainer import DSparkTrainer

PAGE = Path(__file__).parents[2] / "docs" / "training_options.md"
OPTIONS = {field.name for field in dataclasses.fields(TrainingArguments)}
CHECKPOINTING = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in OPTIONS)


# ------------------------------------------------------------------ what is refused

GIVEN = {
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rms_norm": True},
    "use_cache": True,
    "label_names": ["labels"],
    "batch_eval_metrics": True,
    "include_for_metrics": ["loss"],
    "eval_do_concat_batches": False,
    "eval_accumulation_steps": 2,
    "eval_use_gather_object": True,
    "optim": "sgd",
    "optim_args": "foreach=False",
    "optim_target_modules": ["fc"],
}


@pytest.mark.parametrize("name", [*REFUSED_ARGUMENTS, *REFUSED_WITH_MUON])
def test_options_without_a_meaning_are_refused_by_name(name, tmp_path):
    muon = {"matrix_optimizer": "muon"} if name in REFUSED_WITH_MUON else {}
    with pytest.raises(ValueError, match=rf"does not work with {name} \("):
        DSparkTrainingArguments(tmp_path, use_cpu=True, **muon, **{name: GIVEN[name]})


def test_all_refused_options_are_named_at_once(tmp_path):
    with pytest.raises(ValueError, match=r"label_smoothing_factor .*; nor with neftune_noise_alpha"):
        DSparkTrainingArguments(tmp_path, use_cpu=True, neftune_noise_alpha=5, label_smoothing_factor=0.1)


def test_the_optimizer_may_be_chosen_without_muon(tmp_path):
    assert DSparkTrainingArguments(tmp_path, use_cpu=True, optim="sgd").optim == "sgd"


@pytest.mark.parametrize("name", [*REFUSED_KEYWORDS, *REFUSED_KEYWORDS_WITH_MUON])
def test_keywords_without_a_meaning_are_refused_by_name(name, tmp_path):
    target = tiny.qwen3()
    muon = {"matrix_optimizer": "muon"} if name in REFUSED_KEYWORDS_WITH_MUON else {}
    args = DSparkTrainingArguments(tmp_path, use_cpu=True, report_to="none", **muon)
    value = (torch.optim.SGD([torch.ones(1)], lr=1.0), None) if name == "optimizers" else print
    with pytest.raises(ValueError, match=rf"does not work with {name} \("):
        DSparkTrainer(tiny.random_drafter(target), target, args, **{name: value})


def test_plain_training_arguments_are_refused(tmp_path):
    target = tiny.qwen3()
    with pytest.raises(ValueError, match="trained with DSparkTrainingArguments"):
        DSparkTrainer(tiny.random_drafter(target), target, TrainingArguments(tmp_path, use_cpu=True, report_to="none"))


def test_reentrant_checkpointing_is_refused(tmp_path):
    options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": True}}
    with pytest.raises(ValueError, match=r"use_reentrant=True .* would not be trained"):
        DSparkTrainingArguments(tmp_path, use_cpu=True, **options)


def test_checkpointing_trains_every_weight(new_drafter, make_trainer):
    """Whatever is not refused: all weights that change without checkpointing change with it, by as much."""
    options = {CHECKPOINTING: True, f"{CHECKPOINTING}_kwargs": {"use_reentrant": False}}
    results = []
    for some in ({}, options):
        target = tiny.qwen3()
        trainer = make_trainer(new_drafter(target), target, max_steps=2, **some)
        before = weights(trainer)
        trainer.train()
        results.append({name: weight - before[name] for name, weight in weights(trainer).items()})
    assert {name for name, change in results[0].items() if change.any()} == {
        name for name, change in results[1].items() if change.any()
    }
    for name, change in results[0].items():
        torch.testing.assert_close(results[1][name], change, rtol=1e-3, atol=1e-6)


@pytest.mark.skipif(
    transformers.__version__ < "5.24", reason="the page lists the options of the newest supported version"
)
def test_the_page_has_a_row_for_every_option():
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    listed = {name: state for names, state in rows for name in re.findall(r"`(\w+)`", names)}
    assert listed.keys() >= OPTIONS, f"no row for {sorted(OPTIONS - listed.keys())}"
    for name in REFUSED_ARGUMENTS:
        assert listed[name] == "refused", name
    for name in OPTIONS - REFUSED_ARGUMENTS.keys():
        assert listed[name] != "refused", name


def test_every_keyword_of_the_trainer_is_known():
    """A new argument of `Trainer` shows up here, so that somebody decides what it means for drafters."""
    known = {"model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "callbacks"}
    refused = REFUSED_KEYWORDS.keys() | REFUSED_KEYWORDS_WITH_MUON.keys()
    parameters = set(Trainer.__init__.__code__.co_varnames[1 : Trainer.__init__.__code__.co_argcount])
    assert parameters == known | refused


# ------------------------------------------------------------------ what works


def test_compiled_training_equals_eager_training(make_trainer):
    """With a backend that only traces, so that a machine needs no compiler."""
    results = []
    for options in ({}, {"torch_compile": True, "torch_compile_backend": "eager"}):
        trainer = make_trainer(max_steps=3, **options)
        trainer.train()
        results.append(losses(trainer))
    assert results[1] == pytest.approx(results[0], rel=1e-4)


@pytest.mark.parametrize("length_column", [False, True])
def test_rows_of_similar_length_may_share_batches(length_column, make_trainer, rows):
    plain = rows(16)
    column = [row | {"length": len(row["input_ids"])} for row in plain]
    lengths = []

    class Lengths(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            lengths.append(state.global_step)

    trainer = make_trainer(
        rows=datasets.Dataset.from_list(column if length_column else plain),
        num_train_epochs=1,
        train_sampling_strategy="group_by_length",
        callbacks=[Lengths()],
    )
    sampled = list(trainer.get_train_dataloader().batch_sampler)
    assert sorted(index for batch in sampled for index in batch) == list(range(16))
    trainer.train()
    assert len(lengths) == 8


def test_tokens_seen_are_counted(make_trainer, rows):
    data = rows(4, length=20)
    trainer = make_trainer(rows=data, num_train_epochs=1, include_num_input_tokens_seen="non_padding")
    trainer.train()
    assert trainer.state.num_input_tokens_seen == sum(len(row["input_ids"]) for row in data)


def test_a_batch_that_does_not_fit_is_halved(make_trainer, monkeypatch):
    trainer = make_trainer(max_steps=2, per_device_train_batch_size=8, auto_find_batch_size=True)
    sizes = []
    step = DSparkTrainer.compute_loss

    def full(self, model, inputs, **kwargs):
        sizes.append(len(inputs["input_ids"]))
        if sizes[-1] > 4:
            raise RuntimeError("CUDA out of memory.")
        return step(self, model, inputs, **kwargs)

    monkeypatch.setattr(DSparkTrainer, "compute_loss", full)
    trainer.train()
    assert trainer.state.global_step == 2
    assert sizes[0] == 8 and max(sizes[-2:]) <= 4


def test_evaluation_in_bfloat16(make_trainer, rows):
    trainer = make_trainer(eval_rows=rows(4), bf16_full_eval=True)
    whole = make_trainer(eval_rows=rows(4)).evaluate()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(whole["eval_loss"], rel=0.05)


@pytest.mark.parametrize(("metric", "greater"), [("acceptance_length", True), ("confidence_error", False)])
def test_the_best_checkpoint_is_the_one_with_the_better_metric(metric, greater, tmp_path):
    args = DSparkTrainingArguments(tmp_path, use_cpu=True, metric_for_best_model=metric)
    assert args.greater_is_better is greater


def test_weights_alone_cannot_be_resumed_from(make_trainer, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    make_trainer(save_only_model=True, **options).train()
    again = make_trainer(**options | {"max_steps": 6})
    for place in (True, str(tmp_path / "run" / "checkpoint-4")):
        with pytest.raises(ValueError, match="checkpoint-4' was saved with save_only_model=True"):
            again.train(resume_from_checkpoint=place)
    assert DSparkDrafter.from_pretrained(tmp_path / "run" / "checkpoint-4")  # Its weights are whole.


# ------------------------------------------------------------------ conversations wherever rows can be

CONVERSATIONS = [{"prompt": "a b", "response": "c d e f g h i j"}, {"prompt": "b", "response": "a c e g i b d f h j a"}]


@pytest.fixture
def chat_trainer(tmp_path):
    target, tokenizer = tiny.qwen3(), tiny_folders.tokenizer()

    def build(**data):
        args = DSparkTrainingArguments(
            tmp_path / "run", use_cpu=True, report_to="none", max_steps=2, num_anchors=4, logging_steps=1,
            save_strategy="no", per_device_train_batch_size=2,
        )  # fmt: skip
        return DSparkTrainer(tiny.random_drafter(target), target, args, processing_class=tokenizer, **data)

    return build


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(CONVERSATIONS * 4)


STREAMS = {
    "a stream of torch": Stream,
    "a stream of datasets": lambda: datasets.IterableDataset.from_generator(lambda: iter(CONVERSATIONS * 4)),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
@pytest.mark.parametrize("workers", [0, 2])
def test_streamed_conversations_train_as_listed_ones(stream, workers, chat_trainer):
    trainer = chat_trainer(train_dataset=stream())
    trainer.args.dataloader_num_workers = workers
    trainer.train()
    assert all(loss > 0 for loss in losses(trainer)) and len(losses(trainer)) == 2
    if workers == 0:
        listed = chat_trainer(train_dataset=CONVERSATIONS * 4)
        listed.args.train_sampling_strategy = "sequential"
        listed.train()
        assert losses(trainer) == pytest.approx(losses(listed), rel=1e-5)


def test_streamed_rows_of_tokens(chat_trainer, rows):
    class Rows(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(rows(8))

    trainer = chat_trainer(train_dataset=Rows())
    trainer.train()
    assert len(losses(trainer)) == 2


def test_conversations_to_evaluate_with(chat_trainer):
    """In a dictionary, as an argument of `evaluate` and of `predict`, and streamed: the same figures everywhere."""
    named = chat_trainer(train_dataset=CONVERSATIONS, eval_dataset={"some": CONVERSATIONS, "few": CONVERSATIONS[:1]})
    metrics = named.evaluate()
    assert {"eval_some_loss", "eval_few_loss"} <= metrics.keys()
    trainer = chat_trainer(train_dataset=CONVERSATIONS)
    loss = pytest.approx(metrics["eval_some_loss"], rel=1e-5)
    assert trainer.evaluate(CONVERSATIONS)["eval_loss"] == loss
    assert trainer.evaluate({"x": CONVERSATIONS})["eval_x_loss"] == loss
    assert named.evaluate("some")["eval_loss"] == loss
    assert trainer.predict(CONVERSATIONS).metrics["test_loss"] == loss
    assert trainer.evaluate(datasets.Dataset.from_list(CONVERSATIONS))["eval_loss"] == loss

    class Few(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(CONVERSATIONS)

    assert trainer.evaluate(Few())["eval_loss"] == loss


WITHOUT_TOKENIZER = {
    "eval_dataset": lambda make_trainer: make_trainer(eval_rows={"some": CONVERSATIONS}),
    "evaluate": lambda make_trainer: make_trainer().evaluate(CONVERSATIONS),
    "predict": lambda make_trainer: make_trainer().predict(CONVERSATIONS),
    "a stream": lambda make_trainer: make_trainer(rows=Stream(), max_steps=1).train(),
}


@pytest.mark.parametrize("give", WITHOUT_TOKENIZER.values(), ids=WITHOUT_TOKENIZER)
def test_conversations_without_a_tokenizer_are_refused_everywhere(give, make_trainer):
    with pytest.raises(ValueError, match="pass processing_class=tokenizer"):
        give(make_trainer)
