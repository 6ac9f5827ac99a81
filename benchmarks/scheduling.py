"""What scheduling a large batch costs, beside a pass of a small target over the same rows.

    python benchmarks/scheduling.py --target TARGET

Confidences are random; every scheduler decides for 256 rows of 16 drafts. Ends with one line of JSON.
"""

import argparse
import json
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

from dspark_hf.scheduling import (
    AsyncThroughputScheduler,
    ConfidenceThreshold,
    FixedLength,
    ThroughputCurve,
    ThroughputScheduler,
)


def median_ms(function, repeats):
    times = []
    for turn in range(repeats + 3):
        started = time.perf_counter()
        function()
        if turn >= 3:
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub name")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--context", type=int, default=16, help="tokens of each row in the cache")
    args = parser.parse_args()
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    measured = ThroughputCurve.measure(
        target, [args.rows], context_length=args.context, num_rows=args.rows, num_warmup=1, num_repeats=3
    )
    pass_ms = 1000 * float(measured.measured_s[0])
    # A cost that grows slowly, so that the search goes far.
    curve = ThroughputCurve([1, args.rows * (args.slots + 1)], [1.0, 2.0])
    confidence = torch.rand(args.rows, args.slots).sqrt()
    schedulers = {
        "fixed": FixedLength(),
        "threshold": ConfidenceThreshold(0.5),
        "throughput": ThroughputScheduler(curve),
        "asynchronous throughput": AsyncThroughputScheduler(curve),
    }
    lengths = [args.slots] * args.rows
    print(f"{args.rows} rows x {args.slots} slots; a pass of one token a row takes {pass_ms:.1f} ms")
    results = {}
    for name, scheduler in schedulers.items():
        results[name] = median_ms(lambda s=scheduler: s.schedule(confidence, lengths), args.repeats)
        print(f"{name:24} {results[name]:8.3f} ms   {results[name] / pass_ms:.3%} of the pass")
    print(json.dumps({"rows": args.rows, "slots": args.slots, "pass_ms": pass_ms, "schedule_ms": results}))


if __name__ == "__main__":
    main()
