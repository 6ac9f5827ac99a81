"""What users of a Trainer count on: accumulation, resuming, precision, checkpoints, frozen targets."""

import math

import datasets
import pytest
import tiny_folders
import torch
from safetensors.torch import load_file
from training.runs import losses, weights
from transformers import AutoModelForCausalLM, TrainerCallback

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.features import CachedFeatureDataset, cache_features
from dspark_hf.training.trainer import DSparkTrainer


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


# ------------------------------------------------------------------ invariance


def test_accumulated_micro_batches_are_one_batch(new_drafter, make_trainer, rows):
    """Rows of different lengths, so that a mean of means would differ, and some with no anchor."""
    uneven = rows(8) + [{"input_ids": [5, 6, 7, 8, 9, 10, 11], "loss_mask": [0, 0, 0, 0, 0, 1, 1]}] * 6
    uneven += [{"input_ids": [5, 6, 7, 8], "loss_mask": [1, 1, 0, 0]}, {"input_ids": [5, 6], "loss_mask": [0, 0]}]
    results = []
    for size, accumulation in ((8, 1), (2, 4)):
        target = tiny.qwen3()
        trainer = make_trainer(
            new_drafter(target),
            target,
            rows=uneven,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            max_steps=3,
        )
        trainer.train()
        results.append((losses(trainer), weights(trainer)))
    assert all(math.isfinite(loss) for loss in results[0][0])
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-4)
    for name, weight in results[0][1].items():
        torch.testing.assert_close(results[1][1][name], weight, rtol=0, atol=2e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_resumed_run_equals_an_uninterrupted_one(accumulation, new_drafter, make_trainer):
    target = tiny.qwen3()
    options = {
        "max_steps": 7,
        "save_strategy": "steps",
        "save_steps": 3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
    }
    whole = make_trainer(new_drafter(target), target, folder="whole", **options)
    whole.train()
    stopped = make_trainer(new_drafter(target), target, folder="stopped", callbacks=[StopAt(3)], **options)
    stopped.train()
    resumed = make_trainer(new_drafter(target), target, folder="stopped", **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 7
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-6)
    rates = [[entry["learning_rate"] for entry in t.state.log_history if "loss" in entry] for t in (resumed, whole)]
    assert rates[0] == pytest.approx(rates[1])
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(resumed)[name], weight, rtol=0, atol=1e-7)


def test_gradient_checkpointing_gives_the_same_gradients(new_drafter, make_trainer):
    fields = DSparkTrainingArguments.__dataclass_fields__
    option = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in fields)
    gradients = []
    for checkpointing in (False, True):
        target = tiny.qwen3()
        trainer = make_trainer(new_drafter(target), target, max_steps=1, max_grad_norm=1e9, **{option: checkpointing})
        found = {}

        class Keep(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, found=found, **kwargs):
                found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

        trainer.add_callback(Keep())
        trainer.train()
        gradients.append(found)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_cached_features_train_as_those_computed_on_the_way(new_drafter, make_trainer, rows, tmp_path):
    target = tiny.qwen3()
    drafter = new_drafter(target, draft_vocab_size=60)
    start = {name: value.clone() for name, value in drafter.state_dict().items()}
    cache_features(target, drafter.config, rows(6), tmp_path / "cache", dtype=torch.float32, progress=False)
    results = []
    for data in (rows(6), CachedFeatureDataset(tmp_path / "cache", drafter.config)):
        drafter.load_state_dict(start)
        trainer = make_trainer(drafter, target, rows=data, max_steps=3)
        trainer.train()
        results.append(losses(trainer))
    assert results[0] == pytest.approx(results[1], rel=1e-4)


@pytest.mark.parametrize("place", ["disk", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_target_on_another_device_trains_the_same(place, make_trainer, tmp_path):
    """Layers offloaded to the disk, or the drafter on a GPU and the target beside it."""
    target = tiny.qwen3()
    target.save_pretrained(tmp_path / "target")
    parts = [
        "model.embed_tokens",
        "model.norm",
        "model.rotary_emb",
        "lm_head",
        *(f"model.layers.{i}" for i in range(4)),
    ]
    away = {"model.layers.1": place, "model.layers.2": place, "lm_head": place} if place == "disk" else {}
    elsewhere = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target", device_map=dict.fromkeys(parts, "cpu") | away, offload_folder=tmp_path / "offload"
    )
    results = []
    for some in (target, elsewhere):
        trainer = make_trainer(tiny.random_drafter(target), some, max_steps=3, use_cpu=place == "disk")
        trainer.train()
        results.append(losses(trainer))
    assert results[0] == pytest.approx(results[1], rel=1e-5 if place == "disk" else 1e-2)


def test_workers_give_the_anchors_of_the_main_process(make_trainer):
    results = []
    for workers in (0, 2):
        trainer = make_trainer(max_steps=5, dataloader_num_workers=workers, dataloader_persistent_workers=workers > 0)
        trainer.train()
        results.append(losses(trainer))
    assert results[0] == pytest.approx(results[1], rel=1e-6)


# ------------------------------------------------------------------ precision


def test_sixteen_bit_weights_move_at_a_small_learning_rate(make_trainer):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target).to(torch.bfloat16)
    before = drafter.fc.weight.detach().float().clone()
    trainer = make_trainer(drafter, target, bf16=True, learning_rate=1e-5, max_steps=20)
    trainer.train()
    moved = (drafter.fc.weight.detach().float() - before).abs()
    assert drafter.fc.weight.dtype == torch.float32
    assert (moved > 0).float().mean() > 0.99


def test_bfloat16_autocast_stays_close_to_float32(make_trainer):
    results = []
    for bf16 in (False, True):
        trainer = make_trainer(max_steps=4, bf16=bf16)
        trainer.train()
        results.append(losses(trainer))
    assert results[0] == pytest.approx(results[1], rel=0.03)


def test_saved_dtype_is_the_one_asked_for_and_checkpoints_keep_theirs(make_trainer, tmp_path):
    trainer = make_trainer(max_steps=2, save_strategy="steps", save_steps=2, save_dtype="bfloat16")
    trainer.train()
    trainer.save_model()
    final = load_file(tmp_path / "run" / "model.safetensors")
    checkpoint = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert final["fc.weight"].dtype == torch.bfloat16
    assert checkpoint["fc.weight"].dtype == torch.float32
    torch.testing.assert_close(final["fc.weight"].float(), checkpoint["fc.weight"], rtol=0.01, atol=0)


# ------------------------------------------------------------------ what is trained and what is not


def test_the_target_is_frozen_and_not_part_of_the_checkpoint(make_trainer, tmp_path):
    target = tiny.qwen3().requires_grad_(True)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    drafter = tiny.random_drafter(target)
    trainer = make_trainer(drafter, target, max_steps=2, save_strategy="steps", save_steps=2, learning_rate=0.1)
    trainer.train()
    assert not any(p.requires_grad for p in target.parameters())
    for name, value in target.state_dict().items():
        assert torch.equal(value, before[name])
    saved = load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")
    assert saved.keys() == drafter.state_dict().keys()
    assert not any("embed_tokens" in name or "lm_head" in name for name in saved)
    optimized = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in drafter.parameters() if p.requires_grad}


def test_the_drafters_own_embedding_and_head_are_not_trained(make_trainer):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, has_embed_tokens=True, has_lm_head=True)
    before = drafter.embed_tokens.weight.clone(), drafter.lm_head.weight.clone()
    make_trainer(drafter, target, max_steps=2, learning_rate=0.1).train()
    assert torch.equal(drafter.embed_tokens.weight, before[0])
    assert torch.equal(drafter.lm_head.weight, before[1])


def test_a_checkpoint_is_a_drafter(make_trainer, tmp_path):
    target = tiny.qwen3()
    trainer = make_trainer(target=target, max_steps=2, save_strategy="steps", save_steps=2)
    trainer.train()
    loaded = DSparkDrafter.from_pretrained(tmp_path / "run" / "checkpoint-2")
    for name, value in trainer.model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)


# ------------------------------------------------------------------ data


@pytest.mark.parametrize("remove_unused_columns", [True, False])
def test_data_sets_keep_the_columns_training_needs(remove_unused_columns, make_trainer, rows):
    plain = rows(4)
    data = datasets.Dataset.from_list([row | {"source": "somewhere"} for row in plain])
    results = []
    for some in (plain, data):
        trainer = make_trainer(rows=some, max_steps=2, remove_unused_columns=remove_unused_columns)
        trainer.train()
        results.append(losses(trainer))
    assert results[0] == pytest.approx(results[1])


HARMLESS = {
    "no_response": {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 0, 0, 0]},
    "one_response_token": {"input_ids": [3, 4, 5, 6], "loss_mask": [0, 0, 0, 1]},
    "three_response_tokens": {"input_ids": [3, 4, 5, 6, 7], "loss_mask": [0, 0, 1, 1, 1]},
    "empty": {"input_ids": [], "loss_mask": []},
    "response_from_the_start": {"input_ids": [3, 4, 5], "loss_mask": [1, 1, 1]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_short_and_empty_rows_give_no_nan(attention, dtype, make_trainer, rows):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    drafter.set_attn_implementation(attention)
    trainer = make_trainer(drafter, target, bf16=dtype == torch.bfloat16)
    for some in ([HARMLESS["no_response"]], [HARMLESS["one_response_token"], HARMLESS["no_response"]],
                 [*HARMLESS.values()], [*HARMLESS.values(), *rows(1)]):  # fmt: skip
        drafter.zero_grad()
        batch = trainer.data_collator(some)
        with trainer.compute_loss_context_manager(), trainer.accelerator.autocast():
            loss = trainer.compute_loss(drafter.train(), batch)
        loss.backward()
        assert torch.isfinite(loss)
        if batch["draft_weights"].sum() == 0:
            assert float(loss.detach()) == 0
        assert all(torch.isfinite(p.grad).all() for p in drafter.parameters() if p.grad is not None)
    assert not any(math.isnan(value) for value in trainer._take_metrics("train").values())


def test_lengths_may_change_from_step_to_step(make_trainer, rows):
    data = [row for length in (17, 31, 64) for row in rows(2, length=length)]
    trainer = make_trainer(rows=data, num_train_epochs=1)
    trainer.train()
    assert all(math.isfinite(loss) for loss in losses(trainer))


def test_conversations_are_written_with_the_options_of_their_chat_template(tmp_path):
    target, tokenizer = tiny.qwen3(), tiny_folders.tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content }}{{ '!' if not enable_thinking else '' }}{% endfor %}"
    )
    args = DSparkTrainingArguments(
        tmp_path, use_cpu=True, report_to="none", chat_template_kwargs='{"enable_thinking": false}'
    )
    rows = [{"prompt": "a b", "response": "c d"}]
    trainer = DSparkTrainer(tiny.random_drafter(target), target, args, train_dataset=rows, processing_class=tokenizer)
    assert tokenizer.decode(trainer.train_dataset[0]["input_ids"]).startswith("a b!c d")


def test_rows_without_a_loss_mask_are_refused(make_trainer):
    with pytest.raises(ValueError, match="no 'loss_mask'"):
        make_trainer(rows=[{"input_ids": [1, 2, 3]}])


def test_conversations_without_a_tokenizer_are_refused(make_trainer):
    with pytest.raises(ValueError, match="processing_class=tokenizer"):
        make_trainer(rows=[{"prompt": "a", "response": "b"}])


# ------------------------------------------------------------------ metrics


def test_repeated_evaluations_agree(make_trainer, rows):
    trainer = make_trainer(eval_rows=rows(5), max_steps=1, per_device_eval_batch_size=2)
    first = trainer.evaluate()
    trainer.data_collator.set_epoch(3)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-6)
    trainer.args.per_device_eval_batch_size = 5
    assert trainer.evaluate()["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)
    for name in ("acceptance_length", "greedy_acceptance_length", "acceptance_1", "confidence_error"):
        assert f"eval_{name}" in first
    trainer.train()
    assert {"ce_loss", "tv_loss", "acceptance_length", "acceptance_4"} <= trainer.state.log_history[0].keys()


def test_the_logged_loss_is_the_sum_of_its_terms(make_trainer):
    trainer = make_trainer(max_steps=2, ce_weight=0.2, tv_weight=0.7, confidence_weight=0.5)
    trainer.train()
    for entry in trainer.state.log_history[:2]:
        total = 0.2 * entry["ce_loss"] + 0.7 * entry["tv_loss"] + 0.5 * entry["confidence_loss"]
        assert entry["loss"] == pytest.approx(total, rel=1e-3)


def test_calibration_of_the_weights_before_is_dropped(make_trainer):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, confidence_temperatures=[1.5] * tiny.BLOCK_SIZE)
    trainer = make_trainer(drafter, target, max_steps=1)
    assert drafter.config.confidence_temperatures is not None  # Evaluation alone takes nothing away.
    trainer.train()
    assert drafter.config.confidence_temperatures is None


# ------------------------------------------------------------------ does it learn?


def test_one_sample_is_learned_until_all_drafts_pass(make_trainer, rows):
    target = tiny.qwen3()
    prompt = torch.tensor([rows(1)[0]["input_ids"][:6]])
    text = target.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=20, do_sample=False, pad_token_id=0
    )[0]
    row = {"input_ids": text.tolist(), "loss_mask": [0] * 6 + [1] * (len(text) - 6)}
    drafter = tiny.random_drafter(target, initializer_range=0.05)
    trainer = make_trainer(
        drafter, target, rows=[row] * 2, eval_rows=[row], max_steps=150, learning_rate=1e-2, num_anchors=32,
        logging_steps=50, matrix_optimizer="muon",
    )  # fmt: skip
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_greedy_acceptance_length"] == tiny.BLOCK_SIZE + 1
    assert metrics["eval_acceptance_length"] > tiny.BLOCK_SIZE


@pytest.mark.parametrize(
    "options",
    [
        {"ce_weight": -1.0},
        {"ce_weight": 0.0, "tv_weight": 0.0},
        {"logits_chunk_size": -1},
        {"chat_template_kwargs": "{'enable_thinking': false}"},
        {"chat_template_kwargs": "[1]"},
    ],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(options, tmp_path):
    with pytest.raises(ValueError, match=next(iter(options)).split("_")[0]):
        DSparkTrainingArguments(tmp_path, use_cpu=True, **options)


def test_a_target_of_another_shape_is_refused(tmp_path):
    drafter = tiny.random_drafter(tiny.qwen3())
    with pytest.raises(ValueError, match="train a drafter for this one"):
        DSparkTrainer(
            drafter, tiny.qwen3(hidden_size=48), DSparkTrainingArguments(tmp_path, use_cpu=True, report_to="none")
        )


def test_every_option_has_help():
    for name in DSparkTrainingArguments.__annotations__:
        assert DSparkTrainingArguments.__dataclass_fields__[name].metadata.get("help"), name
