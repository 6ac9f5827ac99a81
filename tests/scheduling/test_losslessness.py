"""The output distribution under each scheduler, through a small simulated speculative loop; with schedulers that break it."""

import math

import pytest
import torch

from dspark_hf.sampling import draw, verify_sampled
from dspark_hf.scheduling import (
    AsyncThroughputScheduler,
    ConfidenceThreshold,
    FixedLength,
    ThroughputCurve,
    ThroughputScheduler,
)
from dspark_hf.scheduling.admission import count_of_best, throughputs

pytestmark = pytest.mark.statistical

P_VALUE = 1e-4  # A right sampler fails one run in ten thousand; the seeds are fixed.
APPENDIX_CURVE = ThroughputCurve.from_steps_per_second({1: 1.0, 2: 0.5, 3: 0.45})
STEPS = ThroughputCurve.from_steps_per_second({b: 1 / (1 + 0.5 * (b // 8)) for b in range(1, 65)})


class Unconstrained(ThroughputScheduler):
    """The best choice over all confidences of the round: WRONG, since those of later slots know the tokens of earlier ones."""

    def _count(self, ranking, row_ids, rates):
        return count_of_best(throughputs(ranking, len(row_ids), rates))


def chi_squared_p_value(counts, probs):
    """Of counts `[..., V]`, the rows independent, against distributions `[..., V]`: Wilson and Hilferty's approximation."""
    counts, probs = counts.double(), probs.double()
    expected = counts.sum(-1, keepdim=True) * probs
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    freedom = counts.shape[:-1].numel() * (counts.shape[-1] - 1)
    if freedom == 1:
        return math.erfc(math.sqrt(statistic / 2))
    z = ((statistic / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    return math.erfc(z / math.sqrt(2)) / 2


# ---------------------------------------------------------------------- the counterexample of appendix A

TARGET = torch.tensor([0.7, 0.3])
DRAFT = torch.tensor([0.5, 0.5])


def first_tokens(scheduler, num_rounds=1000):
    """The first token of each of many rounds, counted, `[2]`: it is drawn right after a decision that must not know it."""
    counts = torch.zeros(2)
    for _ in range(num_rounds):
        draft_ids = draw(DRAFT.expand(1, 2, 2))  # [1, 2]
        confidence = torch.tensor([[0.8, 0.9 if draft_ids[0, 0] == 0 else 0.0]])
        (length,) = scheduler.schedule(confidence, [2])
        accepted, follow = verify_sampled(
            draft_ids[:, :length], DRAFT.expand(1, length, 2), TARGET.expand(1, length + 1, 2)
        )
        counts[draft_ids[0, 0] if accepted[0] else follow[0]] += 1
    return counts


@pytest.mark.parametrize(
    "scheduler",
    [
        ThroughputScheduler(APPENDIX_CURVE),
        AsyncThroughputScheduler(APPENDIX_CURVE),
        ConfidenceThreshold(0.85),
        FixedLength(1),
    ],
    ids=["throughput", "asynchronous", "threshold", "fixed length"],
)
def test_the_appendix_example_keeps_the_distribution(scheduler):
    assert chi_squared_p_value(first_tokens(scheduler), TARGET) > P_VALUE


def test_an_unconstrained_search_breaks_the_distribution_as_the_appendix_says():
    counts = first_tokens(Unconstrained(APPENDIX_CURVE))
    assert chi_squared_p_value(counts, TARGET) < 1e-6
    assert chi_squared_p_value(counts, torch.tensor([0.85, 0.15])) > P_VALUE


# ---------------------------------------------------------------------- whole batched generations

NUM_ROWS, NUM_SLOTS, LENGTH = 16, 3, 24
# A Markov chain over three tokens and a drafter that knows it well after token 0, badly after token 2.
CHAIN = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.1, 0.6]])
DRAFT_CHAIN = torch.tensor([[0.58, 0.32, 0.1], [0.4, 0.4, 0.2], [0.02, 0.9, 0.08]])
CONFIDENCE = 1 - (CHAIN - DRAFT_CHAIN).abs().sum(1) / 2  # after each token, exact


def draft_block(anchors):
    """Drafts `[R, G]` and, for each, the token before it `[R, G]`, on which its distribution and its confidence depend."""
    previous, drafts = [anchors], []
    for _ in range(NUM_SLOTS):
        drafts.append(draw(DRAFT_CHAIN[previous[-1]]))
        previous.append(drafts[-1])
    return torch.stack(drafts, 1), torch.stack(previous[:-1], 1)


def generate(scheduler):
    """Rows of `LENGTH` tokens after token 0, by rounds of all unfinished rows, `NUM_ROWS` lists."""
    scheduler.start()
    rows = [[0] for _ in range(NUM_ROWS)]
    while active := [r for r, row in enumerate(rows) if len(row) <= LENGTH]:
        anchors = torch.tensor([rows[r][-1] for r in active])
        drafts, previous = draft_block(anchors)
        room = [min(NUM_SLOTS, LENGTH - len(rows[r])) for r in active]
        lengths = scheduler.schedule(CONFIDENCE[previous], room, rows=active)
        for n in set(lengths):
            same = [i for i, length in enumerate(lengths) if length == n]
            fed = torch.cat([anchors[same, None], drafts[same, :n]], 1)
            accepted, follow = verify_sampled(drafts[same, :n], DRAFT_CHAIN[previous[same, :n]], CHAIN[fed])
            for i, a, token in zip(same, accepted.tolist(), follow.tolist(), strict=True):
                rows[active[i]] += [*drafts[i, :a].tolist(), token]
    return rows


def transitions(scheduler, num_runs=20):
    """Counts of each pair of neighbouring tokens over many batched generations, `[3, 3]`."""
    counts = torch.zeros(3, 3)
    for _ in range(num_runs):
        for row in generate(scheduler):
            pairs = torch.tensor(row)
            counts.index_put_((pairs[:-1], pairs[1:]), torch.ones(LENGTH), accumulate=True)
    return counts


@pytest.mark.parametrize(
    "scheduler",
    [FixedLength(), ConfidenceThreshold(0.8), ThroughputScheduler(STEPS), AsyncThroughputScheduler(STEPS)],
    ids=["fixed length", "threshold", "throughput", "asynchronous"],
)
def test_batched_generation_keeps_the_distribution(scheduler):
    assert chi_squared_p_value(transitions(scheduler), CHAIN) > P_VALUE


def test_a_scheduler_that_reads_the_drafts_breaks_the_distribution():
    class Peeking(FixedLength):
        def schedule(self, confidence, max_lengths, rows=None):
            # The confidence of slot 2 betrays the token of slot 1.
            sure = confidence[:, 1] >= confidence[:, 0]
            return [n if s else 0 for n, s in zip(max_lengths, sure.tolist(), strict=True)]

    assert chi_squared_p_value(transitions(Peeking()), CHAIN) < 1e-6
