"""Muon trains the matrices and AdamW the rest, as one optimiser that a trainer schedules, saves and resumes."""

import copy

import pytest
import torch

import tiny
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.muon import MuonAdamW, split_parameters


@pytest.mark.parametrize("shape", [(24, 24), (12, 40), (40, 12)], ids=str)
def test_a_step_is_nearly_orthogonal(shape):
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = torch.randn(shape) @ torch.diag(torch.logspace(-1, 1, shape[1]))
    MuonAdamW([weight], [], lr=1.0).step()
    values = torch.linalg.svdvals(weight.detach()) / (0.2 * max(shape) ** 0.5)
    assert values.median() > 0.6
    assert values.max() < 1.4


def test_updates_are_as_large_as_those_of_adamw():
    weight = torch.nn.Parameter(torch.zeros(64, 96))
    weight.grad = torch.randn(64, 96)
    MuonAdamW([weight], [], lr=0.1).step()
    assert float(weight.detach().square().mean().sqrt()) == pytest.approx(0.1 * 0.2, rel=0.2)


def test_other_parameters_are_trained_by_adamw():
    mine, theirs = (torch.nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    optimizers = (
        MuonAdamW([], [mine], lr=0.01, weight_decay=0.1),
        torch.optim.AdamW([theirs], lr=0.01, weight_decay=0.1),
    )
    for step in range(5):
        for parameter, optimizer in zip((mine, theirs), optimizers, strict=True):
            parameter.grad = torch.sin(torch.arange(6.0) * (step + 1))
            optimizer.step()
    torch.testing.assert_close(mine, theirs)


def parameters():
    torch.manual_seed(1)
    return torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(6))


def optimizer_of(matrix, vector):
    return MuonAdamW([matrix], [vector], lr=0.01, weight_decay=0.1)


def steps(optimizer, parameters, numbers):
    for number in numbers:
        for parameter in parameters:
            parameter.grad = torch.sin(torch.arange(float(parameter.numel())) * (number + 1)).view_as(parameter)
        optimizer.step()


def test_a_learning_rate_schedule_reaches_both():
    trained = parameters()
    start = [parameter.detach().clone() for parameter in trained]
    optimizer = optimizer_of(*trained)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0)
    steps(optimizer, trained, range(3))
    for parameter, before in zip(trained, start, strict=True):
        assert torch.equal(parameter, before)


def test_a_loaded_state_continues_both():
    whole, resumed = parameters(), parameters()
    first, second = optimizer_of(*whole), optimizer_of(*resumed)
    steps(first, whole, range(4))
    state = copy.deepcopy(first.state_dict())
    for parameter, weight in zip(resumed, whole, strict=True):
        parameter.data.copy_(weight)
    second.load_state_dict(state)
    steps(first, whole, range(4, 8))
    steps(second, resumed, range(4, 8))
    for found, expected in zip(resumed, whole, strict=True):
        torch.testing.assert_close(found, expected)


def test_an_older_torch_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(ImportError, match=r"needs torch 2\.9 or newer"):
        optimizer_of(*parameters())


def test_every_trained_parameter_has_one_optimiser():
    drafter = tiny.random_drafter(tiny.qwen3(), has_lm_head=True)
    matrices, others = split_parameters(drafter)
    assert {id(p) for p in matrices}.isdisjoint(id(p) for p in others)
    assert {id(p) for p in (*matrices, *others)} == {id(p) for p in drafter.parameters() if p.requires_grad}
    assert len(matrices) == 1 + 2 * 7
    assert all(id(p) not in {id(q) for q in matrices} for p in drafter.markov_head.parameters())


def test_a_resumed_run_keeps_its_momentum(make_trainer):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "matrix_optimizer": "muon"}
    whole = make_trainer(folder="whole", **options)
    whole.train()
    resumed = make_trainer(folder="whole", **options)
    resumed.train(resume_from_checkpoint=str(resumed.args.output_dir) + "/checkpoint-2")
    for (name, expected), found in zip(whole.model.named_parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-7, msg=name)


def test_an_unknown_optimiser_is_refused(tmp_path):
    with pytest.raises(ValueError, match="'adamw' or 'muon'"):
        DSparkTrainingArguments(tmp_path, use_cpu=True, matrix_optimizer="sgd")
