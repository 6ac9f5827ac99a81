"""What a drafter brings to small random targets with recurrent state, against plain `generate`.

    python benchmarks/hybrid_targets.py --output docs/results/hybrid_targets.json

The drafter knows the target's answer and is wrong at about a third of the positions, so a round accepts nothing, part of
its drafts or all of them. Drafting costs next to nothing, so that the times show what verification and rollback cost. Both
methods take turns. Ends with one line of JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from dspark_hf import record_speculation
from dspark_hf.evaluation.environment import environment

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from generation import hybrids, rig  # noqa: E402

import tiny  # noqa: E402

FAMILIES = ("qwen3_5", "bamba", "nemotron_h", "deepseek_v4")
PROMPT_LENGTH = 32
NUM_ROWS = (1, 4)


def fields_of(family):
    """Wider and deeper than in the tests, so that a pass costs more than what surrounds it."""
    size = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.1}
    if family == "nemotron_h":
        return size | {"hybrid_override_pattern": "M*M-" * 2, "mamba_num_heads": 8, "mamba_head_dim": 64}
    if family == "deepseek_v4":
        return size
    if family == "bamba":
        return size | {"num_hidden_layers": 8, "attn_layer_indices": [1, 3, 5, 7], "mamba_d_head": 64}
    return size | {"num_hidden_layers": 8}


class Counter:
    """Counts the passes of a target."""

    def __init__(self, target):
        self.passes = 0
        self._hook = target.get_decoder().register_forward_pre_hook(self._count)

    def _count(self, module, args):
        self.passes += 1

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._hook.remove()


def measure(family, num_rows, num_tokens, repeats):
    target = hybrids.build(family, **fields_of(family))
    inputs = tiny.prompt(PROMPT_LENGTH, num_rows=num_rows)
    settings = {"max_new_tokens": num_tokens, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    drafter = rig.drafters_of_rows(target, plain.tolist())["patterned"]
    drafting = settings | {"assistant_model": drafter, "drafting_backoff": False}
    assert torch.equal(target.generate(**inputs, **drafting), plain), family
    with Counter(target) as counter, record_speculation() as stats:
        target.generate(**inputs, **drafting)
    times = {"plain": [], "drafted": []}
    for repeat in range(repeats):
        methods = [("plain", settings), ("drafted", drafting)]
        for name, arguments in methods if repeat % 2 else reversed(methods):
            started = time.perf_counter()
            target.generate(**inputs, **arguments)
            times[name].append(time.perf_counter() - started)
    speedups = sorted(a / b for a, b in zip(times["plain"], times["drafted"], strict=True))
    return {
        "family": family,
        "rows": num_rows,
        "tokens_per_row_and_pass": stats.acceptance_length,
        "tokens_per_pass": stats.num_committed / (counter.passes - 1),  # One pass is that of the prompt.
        "fed_per_token": stats.num_fed / stats.num_committed,
        "speedup": {"value": statistics.median(speedups), "low": speedups[0], "high": speedups[-1]},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--note", default="", help="about the machine, for the table")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    results = []
    for family in FAMILIES:
        for num_rows in NUM_ROWS:
            results.append(measure(family, num_rows, args.num_tokens, args.repeats))
            print(results[-1], file=sys.stderr)
    settings = {"num_tokens": args.num_tokens, "repeats": args.repeats, "threads": args.threads, "note": args.note}
    document = {"settings": settings, "environment": environment(), "results": results}
    if args.output is not None:
        args.output.write_text(json.dumps(document, indent=2) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
