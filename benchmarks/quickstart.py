"""What the quickstart's drafter is worth on this machine: acceptance, speed beside plain `generate`, the cost of a pass.

    python benchmarks/quickstart.py gsm8k.jsonl humaneval.jsonl --max-prompts 40

Each file is a task: JSON lines with `turns`, of which the first is asked. Greedy, float32. Acceptance comes from all prompts,
several rows at once, every draft verified; speed from the first `--timed-prompts` of each file, one row, plain and DSpark
in turn on each prompt, with the settings saved with the drafter. Prints tables and ends with one line of JSON.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.transformers_names import CACHE_KEY

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from quickstart import compare, speedup  # noqa: E402
from smollm2 import ensure_target  # noqa: E402


def prompts_of(file, tokenizer, max_prompts):
    lines = Path(file).read_text().splitlines()[:max_prompts]
    return [[{"role": "user", "content": json.loads(line)["turns"][0]}] for line in lines]


def encode(tokenizer, conversations):
    return tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )


def acceptance(target, drafter, tokenizer, conversations, max_new_tokens, num_rows):
    """Rounds of all prompts, `num_rows` at once."""
    ordered = sorted(conversations, key=lambda conversation: len(conversation[0]["content"]))
    with record_speculation() as stats:
        for start in range(0, len(ordered), num_rows):
            inputs = encode(tokenizer, ordered[start : start + num_rows])
            target.generate(
                **inputs,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                assistant_model=drafter,
                assistant_confidence_threshold=0.0,
                drafting_backoff=False,
            )
            print(f"\r  {min(start + num_rows, len(ordered))}/{len(ordered)} prompts", end="", file=sys.stderr)
    print(file=sys.stderr)
    return stats


@torch.no_grad()
def pass_ms(target, num_tokens, context=256, repeats=15):
    """Median milliseconds of a pass over `num_tokens` tokens behind a context."""
    cache, ids = DynamicCache(config=target.config), torch.randint(100, 1000, (1, context))
    target(ids, **{CACHE_KEY: cache}, use_cache=True)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        target(ids[:, :num_tokens], **{CACHE_KEY: cache}, use_cache=True)
        times.append(1000 * (time.perf_counter() - started))
        cache.crop(-num_tokens)
    return statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", help="JSON lines with `turns`")
    parser.add_argument("--drafter", default=ROOT / "examples" / "quickstart_drafter")
    parser.add_argument("--max-prompts", type=int, default=40)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--timed-prompts", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    args = parser.parse_args()

    folder = ensure_target()
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32)
    report = {"tasks": {}, "pass_ms": {n: round(pass_ms(target, n), 1) for n in (1, 4, 8)}}
    print("one pass over 1 / 4 / 8 tokens:", " / ".join(f"{ms:.0f}" for ms in report["pass_ms"].values()), "ms\n")

    print(
        f"{'task':12}{'prompts':>8}{'acceptance':>12}{'plain tok/s':>13}{'DSpark tok/s':>14}{'ratio':>7}{'identical':>11}"
    )
    all_timed = []
    for file in args.files:
        conversations = prompts_of(file, tokenizer, args.max_prompts)
        stats = acceptance(target, drafter, tokenizer, conversations, args.max_new_tokens, args.rows)
        timed = [encode(tokenizer, [conversation]) for conversation in conversations[: args.timed_prompts]]
        timed = list(compare(target, drafter, timed, args.max_new_tokens))
        num_tokens = sum(c.num_tokens for c in timed)
        row = {
            "prompts": len(conversations),
            "acceptance_length": round(stats.acceptance_length, 3),
            "conditional_acceptance": [round(share, 3) for share in stats.conditional_acceptance],
            "plain_tokens_per_second": round(num_tokens / sum(c.plain_s for c in timed), 2),
            "dspark_tokens_per_second": round(num_tokens / sum(c.dspark_s for c in timed), 2),
            "ratio": round(speedup(timed), 3),
            "identical": all(c.identical for c in timed),
        }
        report["tasks"][Path(file).stem] = row
        print(
            f"{Path(file).stem:12}{row['prompts']:8}{row['acceptance_length']:12.2f}{row['plain_tokens_per_second']:13.1f}"
            f"{row['dspark_tokens_per_second']:14.1f}{row['ratio']:7.2f}{row['identical']!s:>11}"
        )
        all_timed += timed
    lengths = [row["acceptance_length"] for row in report["tasks"].values()]
    report["acceptance_length"] = round(statistics.mean(lengths), 3)
    report["ratio"] = round(speedup(all_timed), 3)
    print(
        f"\nmean acceptance length {report['acceptance_length']:.2f}, speed {report['ratio']:.2f} times plain generate over "
        f"{sum(c.num_tokens for c in all_timed)} tokens"
    )
    report["environment"] = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
