"""The fast loss is the readable one, and both are what the paper says."""

import pytest
import torch

import tiny
from dspark_hf.training.losses import DraftTargets, TargetDistribution, eager_losses, losses_and_gradient

TARGETS = {"qwen3": tiny.qwen3, "soft_capped": tiny.gemma4}
DRAFTERS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "no_heads": {"markov_rank": 0, "enable_confidence_head": False},
    "plain_confidence": {"markov_rank": 0, "confidence_head_with_markov": False},
    "anchor_slot_unused": {"sample_from_anchor": False},
    "reduced_vocabulary": {"draft_vocab_size": 50},
}


def losses_and_gradients(make_trainer, target, drafter, chunk_size: int):
    drafter.zero_grad()
    trainer = make_trainer(drafter, target, logits_chunk_size=chunk_size)
    batch = trainer.data_collator([trainer.train_dataset[i] for i in range(3)])
    loss, outputs = trainer.compute_loss(drafter.train(), batch, return_outputs=True)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    return loss.detach(), outputs.metrics, gradients


@pytest.mark.parametrize("target_name", TARGETS)
@pytest.mark.parametrize("drafter_name", DRAFTERS)
def test_chunks_change_neither_loss_nor_gradients(target_name, drafter_name, make_trainer):
    target = TARGETS[target_name]()
    drafter = tiny.random_drafter(target, **DRAFTERS[drafter_name])
    if drafter.draft_token_ids is not None:
        drafter.draft_token_ids.copy_(torch.arange(50) * 2 + 7)
    expected = losses_and_gradients(make_trainer, target, drafter, 0)
    for chunk_size in (3, 1000):
        found = losses_and_gradients(make_trainer, target, drafter, chunk_size)
        torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-6)
        assert found[1].keys() == expected[1].keys()
        for name, value in expected[1].items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-5)
        assert found[2].keys() == expected[2].keys() == {n for n, p in drafter.named_parameters() if p.requires_grad}
        for name, gradient in expected[2].items():
            torch.testing.assert_close(found[2][name], gradient, rtol=0, atol=1e-4 * float(gradient.abs().max()) + 1e-9)


@pytest.mark.parametrize("outside", [0.0, 0.3], ids=["full_vocabulary", "reduced"])
def test_the_gradient_equals_autograds(outside):
    torch.manual_seed(1)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    probs = torch.randn(6, 11, dtype=torch.float64).softmax(-1) * (1 - outside)
    labels = torch.tensor([0, 3, 10, 5, -1, 2])
    distribution = TargetDistribution(probs, 1 - probs.sum(-1), labels)
    ce_weights, tv_weights = torch.rand(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    losses = eager_losses(logits.double(), distribution, labels, labels)
    log_probs = logits.log_softmax(-1)  # eager_losses computes in float32
    tv = (log_probs.exp() - probs).abs().sum(-1) + distribution.outside
    ce = -log_probs.gather(-1, labels.clamp_min(0)[:, None]).squeeze(-1) * (labels >= 0)
    (ce_weights * ce + tv_weights * tv).sum().backward()
    fast, gradient = losses_and_gradient(
        logits.detach().clone(), distribution._replace(probs=probs.clone()), labels, labels, ce_weights, tv_weights
    )
    torch.testing.assert_close(gradient, logits.grad)
    torch.testing.assert_close(fast.cross_entropy, ce.detach())
    torch.testing.assert_close(fast.total_variation, tv.detach())
    torch.testing.assert_close(losses.total_variation.double(), tv, rtol=1e-5, atol=1e-6)
    assert torch.equal(fast.agrees, losses.agrees)


def test_total_variation_is_not_halved_and_counts_what_the_draft_vocabulary_lacks():
    distribution = TargetDistribution(torch.tensor([[0.5, 0.1]]), torch.tensor([0.4]), torch.tensor([1]))
    losses = eager_losses(torch.tensor([[0.25, 0.75]]).log(), distribution, torch.tensor([-1]), torch.tensor([1]))
    assert float(losses.total_variation) == pytest.approx(0.25 + 0.65 + 0.4)
    assert float(losses.cross_entropy) == 0  # The true token cannot be drafted: nothing to learn from it.
    assert bool(losses.agrees)


def test_cached_normalizers_give_the_distribution_over_the_full_vocabulary(make_trainer):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, draft_vocab_size=40)
    head = make_trainer(drafter, target).target_head
    states = torch.randn(5, tiny.HIDDEN_SIZE)
    logits = target.get_output_embeddings()(states)
    plain = DraftTargets(torch.zeros(5, dtype=torch.long), states, torch.ones(5))
    cached = plain._replace(log_normalizers=logits.logsumexp(-1), greedy_ids=logits.argmax(-1))
    for found, expected in zip(head.distribution(cached), head.distribution(plain), strict=True):
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(head.distribution(plain).probs, logits.softmax(-1)[:, :40])


def test_a_perfect_drafter_is_expected_to_pass_whole_blocks(make_trainer):
    target = tiny.bigram()
    trainer = make_trainer(tiny.perfect_drafter(target), target)
    trainer.compute_loss(trainer.model.train(), trainer.data_collator([trainer.train_dataset[0]]))
    metrics = trainer._take_metrics("train")
    assert metrics["tv_loss"] == pytest.approx(0, abs=1e-5)
    assert metrics["acceptance_length"] == pytest.approx(1 + tiny.BLOCK_SIZE, abs=1e-4)
    assert metrics["greedy_acceptance_length"] == 1 + tiny.BLOCK_SIZE


def test_only_the_confidence_label_is_detached(make_trainer):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    trainer = make_trainer(drafter, target, ce_weight=1e-30, tv_weight=0.0)
    trainer.compute_loss(drafter.train(), trainer.data_collator([trainer.train_dataset[0]])).backward()
    assert drafter.layers[0].mlp.up_proj.weight.grad.abs().max() > 1e-6  # Through the head's input.
    assert drafter.markov_head.markov_w1.weight.grad.abs().max() > 1e-6
    assert drafter.markov_head.markov_w2.weight.grad.abs().max() < 1e-20  # Only through its label, which is a constant.


def test_confidence_can_be_left_out(make_trainer):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    trainer = make_trainer(drafter, target, confidence_weight=0.0)
    trainer.compute_loss(drafter.train(), trainer.data_collator([trainer.train_dataset[0]])).backward()
    gradient = drafter.confidence_head.proj.weight.grad
    assert gradient is None or gradient.abs().max() == 0
