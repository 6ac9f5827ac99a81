"""
Drafters without heads in both slot layouts, blocks of one token, and DFlash drafters that are given heads.
"""

import math

import pytest
import torch
from training.runs import losses

import tiny
from dspark_hf import DSparkConfig, DSparkDrafter, record_speculation
from dspark_hf.generation.dspark_candidate_generator import DSparkCandidateGenerator
from dspark_hf.modeling_drafter import DrafterOutput
from dspark_hf.training.adaptation import warm_start

pytestmark = pytest.mark.integration

LAYOUTS = pytest.mark.parametrize("sample_from_anchor", [True, False], ids=["anchor predicts", "anchor is silent"])
NO_HEADS = {"markov_rank": 0, "enable_confidence_head": False}


# ------------------------------------------------------------------ both layouts


class OracleDrafter(DSparkDrafter):
    """
    Each slot's hidden state is the target's own where the token that the slot predicts is predicted: with a predicting
    anchor the slot at position `p` predicts the token at `p + 1`, otherwise the one at `p` itself.

    Args:
        states: The target's last hidden states of the one row that there is, `[1, T, D]`.
        shift: By how much the slots are wrong.
    """

    def __init__(self, config, states, shift=0):
        super().__init__(config)
        self.states, self.shift = states, shift

    def forward(self, block_ids, position_ids, objective=None, **kwargs):
        predicted = position_ids + int(self.config.sample_from_anchor)
        before = (predicted - 1 + self.shift).clamp(0, self.states.shape[1] - 1)
        loss, metrics = objective(self, self.states[:, before[0]] + 0 * self.norm.weight)
        return DrafterOutput(loss=loss, metrics=metrics)


@LAYOUTS
def test_labels_are_those_of_the_layout(make_trainer, rows, sample_from_anchor):
    target, row = tiny.qwen3(), rows(1)
    states = target.base_model(torch.tensor([row[0]["input_ids"]])).last_hidden_state
    config = tiny.drafter_config(target, sample_from_anchor=sample_from_anchor, **NO_HEADS)
    metrics = {}
    for shift in (0, 1):
        trainer = make_trainer(OracleDrafter(config, states, shift), target, rows=row, eval_rows=row, num_anchors=32)
        metrics[shift] = trainer.evaluate()
    assert metrics[0]["eval_tv_loss"] < 1e-4
    assert metrics[0]["eval_acceptance_length"] == pytest.approx(1 + config.num_draft_tokens, abs=1e-3)
    assert f"eval_acceptance_{config.num_draft_tokens}" in metrics[0]
    assert f"eval_acceptance_{config.num_draft_tokens + 1}" not in metrics[0]
    assert metrics[1]["eval_tv_loss"] > 0.2  # One position off is seen.


@LAYOUTS
def test_a_drafter_without_heads_learns(make_trainer, rows, sample_from_anchor):
    target = tiny.bigram()
    fields = {"sample_from_anchor": sample_from_anchor, "initializer_range": 0.1, "num_hidden_layers": 1} | NO_HEADS
    trainer = make_trainer(
        tiny.random_drafter(target, **fields), target, max_steps=10, learning_rate=1e-2, per_device_train_batch_size=8
    )
    trainer.train()
    found = losses(trainer)
    assert all(math.isfinite(loss) for loss in found)
    assert sum(found[-3:]) < 0.95 * sum(found[:3])
    assert "confidence_loss" not in trainer.state.log_history[0]


# ------------------------------------------------------------------ one token a block


def test_a_block_of_one_token_needs_no_mask_token():
    target = tiny.qwen3()
    assert DSparkConfig.for_target(target.config, block_size=1).mask_token_id is None
    with pytest.raises(ValueError, match="drafts nothing"):
        DSparkConfig.for_target(target.config, block_size=1, sample_from_anchor=False)


def test_a_block_of_one_token_trains_and_drafts(make_trainer, rows):
    target = tiny.bigram()
    config = DSparkConfig.for_target(target.config, block_size=1, num_hidden_layers=1, markov_rank=8)
    trainer = make_trainer(
        tiny.build_drafter(config), target, eval_rows=rows(4), max_steps=10, learning_rate=1e-2, num_anchors=16
    )
    trainer.train()
    found, metrics = losses(trainer), trainer.evaluate()
    assert sum(found[-3:]) < sum(found[:3])
    assert 1 < metrics["eval_acceptance_length"] <= 2
    assert "eval_acceptance_2" not in metrics
    inputs, settings = tiny.prompt(), {"max_new_tokens": 12, "do_sample": False}
    with record_speculation() as stats:
        drafted = target.generate(**inputs, **settings, assistant_model=trainer.model.eval())
    assert torch.equal(drafted, target.generate(**inputs, **settings))
    assert {r.drafted for r in stats.rounds} <= {0, 1}


def test_a_perfect_block_of_one_token_halves_the_passes():
    target = tiny.bigram()
    drafter = tiny.perfect_drafter(target, block_size=1)
    with record_speculation() as stats:
        target.generate(**tiny.prompt(), max_new_tokens=21, do_sample=True, top_k=0, assistant_model=drafter)
    assert stats.acceptance_length == 2


# ------------------------------------------------------------------ warm start


def drafts_of(drafter, target, do_sample):
    """A block after a prompt, and the distributions it was drawn from."""
    ids = tiny.prompt(11)["input_ids"]
    generator = DSparkCandidateGenerator(drafter, target, do_sample=do_sample)
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in drafter.config.hidden_state_indices], dim=-1)
    generator.context.add_prompt(features[:, :-1], None)
    torch.manual_seed(0)
    return generator.draft([ids], [tiny.BLOCK_SIZE])


@torch.no_grad()
@LAYOUTS
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_a_dflash_drafter_with_new_heads_drafts_the_same(head, sample_from_anchor):
    target = tiny.qwen3()
    dflash = tiny.random_drafter(target, sample_from_anchor=sample_from_anchor, draft_vocab_size=60, **NO_HEADS)
    dflash.draft_token_ids.copy_(torch.arange(60) * 2)
    warm = warm_start(dflash, markov_rank=6, markov_head_type=head).eval()
    assert (warm.config.markov_rank, warm.config.sample_from_anchor) == (6, sample_from_anchor)
    assert warm.markov_head.markov_w1.weight.any()  # Or the zero bias could never be learnt away.
    assert (dflash.markov_head, dflash.config.markov_rank) == (None, 0)
    for do_sample in (False, True):
        cold, ours = drafts_of(dflash, target, do_sample), drafts_of(warm, target, do_sample)
        assert torch.equal(ours.ids, cold.ids)
        if do_sample:
            torch.testing.assert_close(ours.probs, cold.probs)
    with torch.no_grad():
        warm.markov_head.markov_w2.weight.normal_(std=10)
    assert not torch.equal(drafts_of(warm, target, False).ids, drafts_of(dflash, target, False).ids)


@LAYOUTS
def test_new_heads_are_trained_with_the_backbone(make_trainer, rows, sample_from_anchor):
    target = tiny.bigram()
    fields = {"sample_from_anchor": sample_from_anchor, "initializer_range": 0.1, "num_hidden_layers": 1} | NO_HEADS
    dflash = tiny.random_drafter(target, **fields)
    cold = make_trainer(dflash, target, eval_rows=rows(4)).evaluate()
    trainer = make_trainer(
        warm_start(dflash, markov_rank=16),
        target,
        eval_rows=rows(4),
        max_steps=10,
        learning_rate=2e-2,
        per_device_train_batch_size=8,
    )
    before = trainer.evaluate()
    assert before["eval_tv_loss"] == pytest.approx(cold["eval_tv_loss"], rel=1e-6)
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_tv_loss"] < before["eval_tv_loss"]
    assert after["eval_confidence_loss"] < before["eval_confidence_loss"]
    head = trainer.model.markov_head
    assert head.markov_w2.weight.any()


def test_a_warm_start_drops_settings_that_no_longer_hold():
    target = tiny.qwen3()
    calibrated = tiny.random_drafter(target, confidence_temperatures=[1.5] * tiny.BLOCK_SIZE)
    longer = warm_start(calibrated, block_size=tiny.BLOCK_SIZE + 2)
    assert longer.config.block_size == tiny.BLOCK_SIZE + 2 and longer.config.confidence_temperatures is None
    with pytest.raises(ValueError, match="a separate LM head"):
        warm_start(tiny.random_drafter(target, has_lm_head=True), draft_vocab_size=60)
