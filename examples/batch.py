"""Several prompts at once: each row accepts its own number of drafts and ends at its own time.

Usage:
    python examples/batch.py
    python examples/batch.py "Name three rivers." "What is a prime number?" --threshold 0.5
"""

import argparse
from pathlib import Path

from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.scheduling import ConfidenceThreshold, FixedLength

QUESTIONS = ["Name three rivers in Europe.", "Write a Python function that adds two numbers.", "What is 12 times 12?"]

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("questions", nargs="*", default=QUESTIONS)
parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct out of a PyPI wheel by default")
parser.add_argument("--drafter", default=Path(__file__).parent / "quickstart_drafter", help="folder or Hub name")
parser.add_argument("--max-new-tokens", type=int, default=64)
parser.add_argument("--threshold", type=float, help="verify drafts up to the first less confident than this")
args = parser.parse_args()

name = args.target or ensure_target()
target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=target.dtype)
tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")

chats = [[{"role": "user", "content": question}] for question in args.questions]
inputs = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
)
scheduler = FixedLength() if args.threshold is None else ConfidenceThreshold(args.threshold)

with record_speculation() as stats:
    output = target.generate(
        **inputs,
        do_sample=False,
        assistant_model=drafter,
        verify_scheduler=scheduler,
        max_new_tokens=args.max_new_tokens,
    )

for row, (question, ids) in enumerate(zip(args.questions, output, strict=True)):
    rounds = [r for r in stats.rounds if r.row == row]
    length = sum(r.committed for r in rounds) / max(len(rounds), 1)
    print(f"> {question}\n{tokenizer.decode(ids[inputs['input_ids'].shape[1] :], skip_special_tokens=True)}")
    print(f"  ({len(rounds)} rounds of {length:.2f} tokens)\n")
