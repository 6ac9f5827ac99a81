"""Loss terms and gradients against the reference vectors, where they are at hand."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDrafter
from dspark_hf.training.anchors import Anchors, anchor_candidates, counted_drafts, position_weights
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.trainer import DSparkTrainer

SHARED = Path(os.environ.get("DSPARK_HF_SHARED") or Path(__file__).parents[3] / "shared")
CASES = ("a_qwen3_vanilla_confmarkov", "c_qwen3_rnn_confmarkov", "d_qwen3_dflash", "f_gemma4_vanilla_confmarkov")

pytestmark = pytest.mark.skipif(not (SHARED / "parity").is_dir(), reason=f"no reference vectors in {SHARED}")


def load_case(name: str, tmp_path, **options):
    folder = SHARED / "parity" / name
    vectors, facts = load_file(folder / "training.safetensors"), json.loads((folder / "training.json").read_text())
    drafter = DSparkDrafter.from_pretrained(folder / "drafter")
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    args = DSparkTrainingArguments(tmp_path, use_cpu=True, report_to="none", **options)
    return vectors, facts, DSparkTrainer(model=drafter, target=target, args=args)


def batch_of(vectors, num_drafts: int, decay) -> dict:
    anchors = Anchors(vectors["anchor_positions"], vectors["block_keep_mask"])
    counted = counted_drafts(vectors["batch.loss_mask"], anchors, num_drafts)
    return {
        "input_ids": vectors["batch.input_ids"],
        "attention_mask": vectors["batch.attention_mask"].bool(),
        "anchor_positions": anchors.positions,
        "keep_anchors": anchors.keep,
        "draft_weights": counted * position_weights(num_drafts, decay),
        "context_features": vectors["batch.target_hidden_states"],
        "last_hidden_states": vectors["batch.target_last_hidden_states"],
    }


@pytest.mark.parametrize("chunk_size", [7, 0], ids=["chunked", "eager"])
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_the_reference(name, chunk_size, tmp_path):
    vectors, facts, trainer = load_case(name, tmp_path, logits_chunk_size=chunk_size)
    drafter = trainer.model
    batch = batch_of(vectors, drafter.config.num_draft_tokens, 4.0)
    assert torch.equal(batch["draft_weights"] > 0, vectors["eval_mask"])
    assert torch.equal(anchor_candidates(vectors["batch.loss_mask"])[:, :-1], vectors["anchor_candidate_mask"])
    anchors = Anchors(batch["anchor_positions"], batch["keep_anchors"])
    masks = drafter.training_masks(batch["attention_mask"], *anchors)
    reference_mask = vectors["dense_attention_mask"]
    assert torch.equal(next(iter(masks.values()))[0], reference_mask[0])
    # A filler block may see only itself; what the reference lets it see carries no meaning.
    kept = anchors.keep.repeat_interleave(drafter.config.block_size, dim=1)
    assert torch.equal(next(iter(masks.values()))[1, :, kept[1]], reference_mask[1, :, kept[1]])

    loss, outputs = trainer.compute_loss(drafter.train(), batch, return_outputs=True)
    variant = facts["variants"][0]
    terms, sums = variant["terms"], outputs.metrics
    for ours, theirs in (("ce", "ce_loss_num"), ("tv", "l1_loss_num"), ("weight", "ce_loss_den")):
        assert float(sums[ours]) == pytest.approx(terms[theirs], rel=1e-5)
    if drafter.confidence_head is not None:
        assert float(sums["confidence_loss"]) == pytest.approx(terms["confidence_loss_num"], rel=1e-5)
    assert float(loss.detach()) == pytest.approx(variant["total_loss"], abs=1e-5)

    loss.backward()
    compared = 0
    for key, expected in vectors.items():
        if key.startswith("grad."):
            gradient = drafter.get_parameter(key.removeprefix("grad.")).grad
            torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
            compared += 1
    assert compared == sum(p.requires_grad for p in drafter.parameters())


@pytest.mark.parametrize("variant_index", range(4), ids=["dspark", "dflash", "no_decay", "decay_7"])
def test_every_weighting_variant_gives_the_total_of_the_reference(variant_index, tmp_path):
    folder = SHARED / "parity" / CASES[0]
    variant = json.loads((folder / "training.json").read_text())["variants"][variant_index]
    vectors, _, trainer = load_case(
        CASES[0],
        tmp_path,
        ce_weight=variant["ce_loss_alpha"],
        tv_weight=variant["l1_loss_alpha"],
        confidence_weight=variant["confidence_head_alpha"],
    )
    batch = batch_of(vectors, trainer.model.config.num_draft_tokens, variant["loss_decay_gamma"])
    loss = trainer.compute_loss(trainer.model, batch)
    assert float(loss.detach()) == pytest.approx(variant["total_loss"], abs=1e-5)


def test_logged_acceptance_equals_that_of_the_reference(tmp_path):
    vectors, facts, trainer = load_case(CASES[0], tmp_path)
    trainer.compute_loss(trainer.model.train(), batch_of(vectors, 5, 4.0))
    metrics, expected = trainer._take_metrics("train"), facts["train_metrics"]
    for index in range(5):
        assert metrics[f"acceptance_{index + 1}"] == pytest.approx(expected[f"train/accept_rate@{index}"], abs=1e-5)
    assert metrics["confidence_error"] == pytest.approx(expected["train/confidence_abs_error"], abs=1e-5)
    assert metrics["confidence_bias"] == pytest.approx(expected["train/confidence_bias"], abs=1e-5)
