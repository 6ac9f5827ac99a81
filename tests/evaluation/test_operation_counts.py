"""Kernels, operations and reads are counted between the passes of the target."""

import pytest
import torch

from dspark_hf.evaluation.operation_counts import count_operations


@pytest.fixture
def target():
    return torch.nn.Linear(4, 4, bias=False).requires_grad_(False)


def counts_of(target, step, num_passes=3):
    state = torch.ones(2, 4)
    with torch.no_grad(), count_operations(target) as counts:
        target(state)  # The prompt's.
        for _ in range(num_passes):
            step(state)
            target(state)
    return counts


def test_the_targets_passes_are_counted_apart(target):
    counts = counts_of(target, lambda state: (state + 1).view(4, 2))
    assert (counts.rounds, counts.kernels, counts.operations, counts.reads) == (3, 3, 6, 0)
    assert counts.target_kernels == 3
    assert counts.per_round()["operations"] == 2


def test_nothing_is_counted_before_the_first_pass_ends(target):
    with torch.no_grad(), count_operations(target) as counts:
        torch.ones(3).add(1).tolist()
        target(torch.ones(2, 4))
    assert (counts.rounds, counts.kernels, counts.reads) == (0, 0, 0)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (lambda state: state.tolist(), 1),
        (lambda state: state.sum().item(), 1),
        (lambda state: bool(state.any()), 1),
        (lambda state: state.cpu(), 1),
        (lambda state: state.to("cpu"), 1),
        (lambda state: state.nonzero(), 1),
        (lambda state: state[state > 0], 1),
        (lambda state: torch.tensor([1], device=state.device), 1),
        (lambda state: torch.tensor([1]).to(state.device, non_blocking=True), 0),
        (lambda state: state[torch.tensor([0])], 0),
        (lambda state: state.exp().argmax(-1), 0),
    ],
)
def test_calls_that_wait_for_the_device(target, step, expected):
    assert counts_of(target, step, num_passes=1).reads == expected


def test_hooks_are_gone_afterwards(target):
    other = torch.nn.Linear(2, 2)
    with count_operations(target, other):
        assert other._forward_pre_hooks
    assert not (target._forward_hooks or target._forward_pre_hooks or other._forward_pre_hooks)
