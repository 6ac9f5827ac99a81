"""Generates with a drafter and says what its drafts were worth.

Usage:
    python examples/generate.py "Write a haiku about the sea."
    python examples/generate.py --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7 --temperature 0.7
"""

import argparse
from pathlib import Path

from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, record_speculation

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("question", nargs="?", default="What is 17 times 23? Think step by step.")
parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct out of a PyPI wheel by default")
parser.add_argument("--drafter", default=Path(__file__).parent / "quickstart_drafter", help="folder or Hub name")
parser.add_argument("--max-new-tokens", type=int, default=128)
parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily")
args = parser.parse_args()

name = args.target or ensure_target()
target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=target.dtype)
tokenizer = AutoTokenizer.from_pretrained(name)

messages = [{"role": "user", "content": args.question}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}

with record_speculation() as stats:
    output = target.generate(**inputs, **sampling, assistant_model=drafter, max_new_tokens=args.max_new_tokens)

print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(f"\n{stats.acceptance_length:.2f} tokens a target pass, {stats.acceptance_rate:.0%} of drafts accepted")
for slot, acceptance in enumerate(stats.conditional_acceptance, start=1):
    print(f"draft {slot}: accepted {acceptance:.0%} of the times that all before it were")
