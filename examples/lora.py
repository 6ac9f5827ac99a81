"""Fine-tunes a drafter for a domain with LoRA, then drafts with and without the adapter.

    python examples/lora.py                                    # a minute on a CPU: the quickstart drafter, a little code
    python examples/lora.py --prompts my_prompts.jsonl --steps 2000 --max-new-tokens 512

The target answers the prompts itself; the drafter's own weights stay as they are, so that one drafter serves several
domains. `dspark-hf train --drafter DRAFTER --lora-rank 8` does the training part for larger files.
"""

import argparse
import json
from pathlib import Path

import torch
from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.conversations.prompts import read_prompts
from dspark_hf.responses import RegenerationSettings, Regenerator
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, add_lora, encode_rows

TOPICS = """add two numbers; reverse a string; count words; sort a list; find the largest number; sum a list; check for a
palindrome; read a file; merge two lists; compute a factorial; count vowels; join strings; remove duplicates; find a
maximum; square numbers; check whether a number is even""".replace("\n", " ").split("; ")

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--prompts", type=Path, help="JSON lines of the domain; a few about Python by default")
parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct out of a PyPI wheel by default")
parser.add_argument("--drafter", default=Path(__file__).parent / "quickstart_drafter", help="where to start from")
parser.add_argument("--output", type=Path, default=Path("runs/lora"), help="folder; the adapter ends up here")
parser.add_argument("--rank", type=int, default=8, help="rank of the adapter")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--max-new-tokens", type=int, default=48, help="length of the target's answers")
args = parser.parse_args()

name = args.target or ensure_target()
target = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
tokenizer = AutoTokenizer.from_pretrained(name)
drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32)

# 1. The target's own words about the domain.
prompts = [{"prompt": f"Write a Python function to {topic}."} for topic in TOPICS]
if args.prompts:
    prompts = list(read_prompts(args.prompts))
args.output.mkdir(parents=True, exist_ok=True)
responses = args.output / "responses.jsonl"
settings = RegenerationSettings(max_new_tokens=args.max_new_tokens, temperature=0.0, save_token_ids=True)
Regenerator(target, tokenizer, settings).run(prompts, responses, progress=False)
rows = encode_rows(map(json.loads, responses.read_text().splitlines()), tokenizer, max_length=1024)
held_out = rows[:: max(len(rows) // 4, 1)]

# 2. An adapter for the backbone, and copies of the heads, are trained.
on_cpu = not torch.cuda.is_available()
adapted = add_lora(drafter, args.rank, ["q_proj", "k_proj", "v_proj", "o_proj", "fc"])
trainer = DSparkTrainer(
    model=adapted,
    target=target,
    args=DSparkTrainingArguments(args.output, max_steps=args.steps, learning_rate=1e-3, num_anchors=8, use_cpu=on_cpu),
    train_dataset=[row for row in rows if row not in held_out],
    eval_dataset=held_out,
    processing_class=tokenizer,
)
before = trainer.evaluate()["eval_acceptance_length"]
trainer.train()
print(f"Held out: {before:.2f} tokens a target pass before, {trainer.evaluate()['eval_acceptance_length']:.2f} after.")
trainer.save_model()

# 3. The adapter is loaded by name, and swapped between calls; what the target says never changes.
drafter = DSparkDrafter.from_pretrained(args.drafter, dtype=target.dtype).to(target.device).eval()
from peft import PeftModel  # noqa: E402 (only this part needs it)

drafter = PeftModel.from_pretrained(drafter, args.output, adapter_name="domain")
inputs = tokenizer("def double(x):", return_tensors="pt").to(target.device)
for label, context in (("without the adapter", drafter.disable_adapter()), ("with it", torch.no_grad())):
    with context, record_speculation() as stats:
        target.generate(**inputs, assistant_model=drafter, max_new_tokens=32, do_sample=False)
    print(f"{label}: {stats.acceptance_length:.2f} tokens a target pass")
