"""
What a round costs beside its two passes, in kernels, operations and reads from the device: limits that only changes of code move.

`benchmarks/launch_bound.py` times the same where launches are all that a round costs.
"""

import functools
import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer

import dspark_hf
import tiny
from dspark_hf import record_speculation
from dspark_hf.evaluation.operation_counts import count_operations
from dspark_hf.generation.candidate_generator import DrafterCandidateGenerator
from dspark_hf.scheduling import AsyncThroughputScheduler, ConfidenceThreshold, ThroughputCurve, ThroughputScheduler

GREEDY = {"do_sample": False}
TOP_P = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}


# Older versions hand a mask without padding to the model, which looks for padding in it in every pass.
keeps_full_masks = transformers.__version__ < "5.24"


@functools.cache
def models(num_layers=tiny.NUM_LAYERS):
    """A narrow pair; what is counted does not depend on the depth of the target."""
    target = tiny.bigram(num_hidden_layers=num_layers)
    fields = {"num_hidden_layers": 5, "block_size": 7, "markov_rank": 16, "enable_confidence_head": True}
    drafter = tiny.random_drafter(target, **fields)
    # What is tried once for each target is not counted.
    target.generate(**tiny.prompt(num_rows=2), assistant_model=drafter, max_new_tokens=2)
    return target, drafter


@pytest.fixture
def whole_blocks(monkeypatch):
    """Drafts as on an accelerator."""
    monkeypatch.setattr(DrafterCandidateGenerator, "ends_early", False)


def counted(num_rows=1, max_new_tokens=24, num_layers=tiny.NUM_LAYERS, **settings):
    target, drafter = models(num_layers)
    torch.manual_seed(0)
    inputs = tiny.prompt(9, num_rows=num_rows)
    settings = {"drafting_backoff": False, "assistant_model": drafter, "max_new_tokens": max_new_tokens} | settings
    with count_operations(target, drafter) as counts:
        target.generate(**inputs, **settings)
    assert counts.rounds > 3
    assert not counts.target_reads or keeps_full_masks, (
        "our attention of rows and our caches are part of the target's passes"
    )
    return counts.per_round()


@pytest.mark.parametrize(
    ("settings", "max_kernels", "max_operations"), [(GREEDY, 330, 620), (TOP_P, 445, 760)], ids=["greedy", "top-p"]
)
def test_one_row(settings, max_kernels, max_operations):
    counts = counted(num_layers=36, **settings)
    assert counts["kernels"] <= max_kernels
    assert counts["operations"] <= max_operations
    assert counts["reads"] <= 1.2


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("name", ["threshold", "throughput", "async_throughput"])
def test_schedulers_read_once_more(name, num_rows, whole_blocks):
    curve = ThroughputCurve([1, 8, 64], [1.0, 1.1, 2.0])
    scheduler = {
        "threshold": ConfidenceThreshold(0.5),
        "throughput": ThroughputScheduler(curve),
        "async_throughput": AsyncThroughputScheduler(curve),
    }[name]
    assert counted(num_rows, verify_scheduler=scheduler, **GREEDY)["reads"] <= 2.3


@pytest.mark.parametrize("settings", [GREEDY, TOP_P], ids=["greedy", "top-p"])
def test_four_rows(settings):
    assert counted(4, **settings)["reads"] <= 1.3


class Listening(BaseStreamer):
    def put(self, value):
        pass

    def end(self):
        pass


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("settings", [GREEDY, TOP_P], ids=["greedy", "top-p"])
def test_streamers_read_nothing(settings, num_rows):
    heard, alone = counted(num_rows, streamer=Listening(), **settings), counted(num_rows, **settings)
    assert (heard["reads"], heard["kernels"]) == (alone["reads"], alone["kernels"])


class Unknown(LogitsProcessor):
    """One that could remember its calls, so that it is called token by token."""

    def __call__(self, input_ids, scores):
        return scores


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("settings", [GREEDY, TOP_P], ids=["greedy", "top-p"])
def test_processors_that_run_token_by_token_read_once_per_token(settings, num_rows):
    target, drafter = models()
    torch.manual_seed(0)
    with count_operations(target, drafter) as counts:
        target.generate(
            **tiny.prompt(9, num_rows=num_rows),
            assistant_model=drafter,
            drafting_backoff=False,
            max_new_tokens=24,
            logits_processor=LogitsProcessorList([Unknown()]),
            **settings,
        )
    once_per_call = 3
    assert counts.reads <= 24 * num_rows + once_per_call
    assert not counts.target_reads or keeps_full_masks


def test_nothing_but_attention_grows_with_the_context():
    short, long = (counted(max_new_tokens=n, **GREEDY) for n in (40, 120))
    for name in ("kernels", "operations", "reads", "target_kernels"):
        assert long[name] <= 1.03 * short[name], name


@pytest.mark.parametrize("name", ["threshold", "throughput"])
@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_block_drafted_whole_is_verified_as_far_as_one_that_ends_early(do_sample, num_rows, name, monkeypatch):
    target, drafter = models()
    scheduler = (
        ConfidenceThreshold(0.5)
        if name == "threshold"
        else ThroughputScheduler(ThroughputCurve([1, 2, 8], [1.0, 1.3, 4.0]))
    )
    outcomes = []
    for ends_early in (True, False):
        monkeypatch.setattr(DrafterCandidateGenerator, "ends_early", ends_early)
        torch.manual_seed(1)
        settings = {"do_sample": do_sample, "verify_scheduler": scheduler, "max_new_tokens": 24}
        with record_speculation() as stats:
            output = target.generate(**tiny.prompt(9, num_rows=num_rows), assistant_model=drafter, **settings)
        # Further draws change what is drawn next, so sampled calls are compared by their first round.
        rounds = stats.rounds[:num_rows] if do_sample else stats.rounds
        outcomes.append([(r.row, r.verified) for r in rounds])
        if not do_sample:
            assert torch.equal(
                output, target.generate(**tiny.prompt(9, num_rows=num_rows), **GREEDY, max_new_tokens=24)
            )
    assert outcomes[0] == outcomes[1]
    assert len({verified for _, verified in outcomes[0]}) > 1 or do_sample


# Where tensors are read from the device, and why that is no more than once per round.
READS = {
    # Confidences, for whoever records the rounds; and the tokens of targets that do not count every token (Kosmos-2).
    "generation/call.py": 3,
    "generation/context_memory.py": 1,  # Once per call, for a cache that holds tokens without ids.
    "generation/stopping.py": 2,  # Once per call; and what the caller's criteria answer.
    "generation/streamer.py": 1,  # What a streamer was given, which is on the CPU.
    "generation/token_choice.py": 2,  # What was accepted: once per round, or per token where processors need that.
    "ragged/cache.py": 3,  # Once per call.
    "scheduling/schedulers.py": 2,  # The confidences of a round, once.
}


def test_nothing_else_reads_from_the_device():
    root = Path(dspark_hf.__file__).parent
    pattern = re.compile(r"\.(tolist|item|cpu)\(\)|\.to\(\"cpu\"|bool\(torch|int\(torch")
    files = [*(root / "generation").glob("*.py"), *(root / "ragged").glob("*.py")]
    files += [root / "scheduling" / name for name in ("schedulers.py", "survival.py", "backoff.py")]
    files += [
        root / name for name in ("sampling.py", "draft_cache.py", "layers.py", "masks.py", "context_projection.py")
    ]
    files += [root / "kinds" / "dspark" / name for name in ("modeling_dspark.py", "heads.py")]
    found = {str(file.relative_to(root)): len(pattern.findall(file.read_text())) for file in files}
    assert {name: count for name, count in found.items() if count} == READS
