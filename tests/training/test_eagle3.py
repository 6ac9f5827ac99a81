"""Training EAGLE-3 drafters: the reference's training-time test, and the same trainer, data and metrics as for blocks."""

import json
import math
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from training.runs import losses

import tiny
from dspark_hf import Drafter, Eagle3Drafter
from dspark_hf.draft_cache import DraftCache
from dspark_hf.masks import chain_training_mask

SHARED = Path(os.environ.get("DSPARK_HF_SHARED") or Path(__file__).parents[3] / "shared")
CASE = SHARED / "parity" / "g_qwen3_eagle3"

pytestmark = pytest.mark.integration
with_vectors = pytest.mark.skipif(not CASE.is_dir(), reason=f"no reference vectors in {CASE}")


# ------------------------------------------------------------------ the reference


@with_vectors
def test_logits_loss_and_gradients_of_training_time_test_equal_those_of_the_reference():
    """
    The reference computes every position; chains at all anchors are the same. Position `i` there is anchor `i + 1` here.
    Its loss is a cross-entropy with the target's distribution, which is ours with other weights, so it is written out.
    """
    vectors, facts = load_file(CASE / "training.safetensors"), json.loads((CASE / "training.json").read_text())
    drafter = Eagle3Drafter.from_pretrained(CASE / "drafter").train()
    batch, length = vectors["batch.input_ids"].shape
    anchors = torch.arange(1, length).expand(batch, -1)
    output = drafter(vectors["batch.input_ids"], anchors, vectors["batch.target_hidden_states"])
    steps = output.last_hidden_state.unflatten(1, (length - 1, -1))  # [B, A, G, D]
    logits = drafter.base_logits(steps, drafter.bind()).permute(2, 0, 1, 3)  # [G, B, A, V]
    counted = vectors["step_position_mask"][:, :, :-1].bool()
    torch.testing.assert_close(logits[counted], vectors["step_draft_logits"][:, :, :-1][counted], atol=2e-5, rtol=0)

    entropies = -(vectors["step_target_probs"][:, :, :-1] * logits.log_softmax(-1)).sum(-1)  # [G, B, A]
    by_step = (entropies * counted).sum((1, 2)) / (batch * length)
    assert by_step.detach().tolist() == pytest.approx(facts["step_losses"], abs=1e-5)
    loss = (by_step * torch.tensor(facts["step_weights"])).sum()
    assert float(loss.detach()) == pytest.approx(facts["total_loss"], abs=1e-5)
    loss.backward()
    expected = {name.removeprefix("grad."): value for name, value in vectors.items() if name.startswith("grad.")}
    assert expected.keys() == dict(drafter.named_parameters()).keys() - {"embed_tokens.weight", "lm_head.weight"}
    for name, gradient in expected.items():
        found = drafter.get_parameter(name).grad
        torch.testing.assert_close(found, gradient, rtol=0, atol=1e-4 * float(gradient.abs().max()), msg=name)


@with_vectors
@pytest.mark.parametrize("steps", range(1, 6))
def test_masks_equal_those_of_the_reference(steps):
    """There a step's first keys are the sequence's own, up to the position itself; here that one is the chain's first."""
    theirs = load_file(CASE / "training.safetensors")[f"step_attention_mask.{steps - 1}"][0, 0]
    length = len(theirs)
    known = length - steps  # There the last rows, whose tokens lie past the end, see nothing.
    ours = chain_training_mask(torch.arange(length)[None], length, steps)[0, 0]
    context, chain = ours[:, :length], ours[:, length:]
    assert torch.equal((context | chain[:, :length])[:known], theirs[:known, :length])
    assert not (context & torch.eye(length, dtype=torch.bool)).any()
    assert torch.equal(chain[:known, length:], theirs[:known, length:])


# ------------------------------------------------------------------ drafting and training agree


@torch.no_grad()
def test_chains_are_what_drafting_computes():
    """Step by step with the cache, tokens of the text fed: the states of training."""
    target = tiny.qwen3()
    drafter = tiny.eagle3_drafter(target)
    ids = tiny.prompt(14)["input_ids"]
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in drafter.config.hidden_state_indices], dim=-1)
    embeddings = drafter.bind(target)
    anchors = torch.tensor([[1, 4, 9]])
    trained = drafter(ids, anchors, features).last_hidden_state.view(3, tiny.BLOCK_SIZE, -1)
    fused = drafter.project_context(features)
    for anchor, expected in zip(anchors[0].tolist(), trained, strict=True):
        cache = DraftCache(len(drafter.layers))
        start = anchor - 1
        if start:
            drafter.extend_cache(cache, ids[:, 1:anchor], fused[:, :start], torch.arange(start)[None], None, embeddings)
        state = fused[:, start]
        for step in range(tiny.BLOCK_SIZE):
            state = drafter.step(ids[:, anchor + step], state, torch.tensor([start + step]), cache, embeddings)
            torch.testing.assert_close(drafter.norm(state)[0], expected[step], atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------ the trainer


def test_a_perfect_drafter_scores_a_whole_round(make_trainer, rows):
    """Labels, distributions and weights are aligned with what each step predicts: one token off and nothing would fit."""
    target = tiny.bigram()
    trainer = make_trainer(tiny.perfect_eagle3_drafter(target), target, eval_rows=rows(6), num_anchors=32)
    metrics = trainer.evaluate()
    assert metrics["eval_tv_loss"] < 1e-4
    # Blocks that reach the end of a row count as far as they go, so that the sum over slots is of conditional means.
    assert metrics["eval_acceptance_length"] == pytest.approx(1 + tiny.BLOCK_SIZE, abs=1e-3)
    assert metrics["eval_greedy_acceptance_length"] == pytest.approx(1 + tiny.BLOCK_SIZE, abs=1e-3)
    assert "eval_confidence_loss" not in metrics


@pytest.mark.parametrize("chunk_size", [0, 5], ids=["eager", "chunked"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_loss_falls(make_trainer, rows, optimizer, chunk_size):
    target = tiny.bigram()
    trainer = make_trainer(
        tiny.eagle3_drafter(target, initializer_range=0.1, draft_vocab_size=60),
        target,
        rows=rows(8),
        max_steps=12,
        learning_rate=1e-2,
        per_device_train_batch_size=8,
        matrix_optimizer=optimizer,
        logits_chunk_size=chunk_size,
        bf16=chunk_size == 5,
    )
    trainer.train()
    found = losses(trainer)
    assert all(math.isfinite(loss) for loss in found)
    assert sum(found[-3:]) < 0.93 * sum(found[:3])


def test_a_saved_drafter_drafts(make_trainer, tmp_path):
    target = tiny.qwen3()
    trainer = make_trainer(tiny.eagle3_drafter(target), target, max_steps=2, save_dtype="bfloat16")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    drafter = Drafter.from_pretrained(tmp_path / "saved")
    assert type(drafter) is Eagle3Drafter
    assert drafter.dtype == torch.bfloat16
    inputs = tiny.prompt()
    plain, drafted = (
        target.generate(**inputs, max_new_tokens=6, do_sample=False, **extra)
        for extra in ({}, {"assistant_model": drafter.float()})
    )
    assert torch.equal(plain, drafted)
