"""Trains a drafter on conversations that the target has answered, as JSON lines with `messages` (or `prompt` and `response`).

    python examples/train.py responses.jsonl --output runs/drafter --target Qwen/Qwen3-4B --max-steps 10000

`dspark-hf regenerate` writes such a file; `train_quickstart.py` is the whole way from no data at all to a finished drafter.
"""

import argparse
import json
from pathlib import Path

from smollm2 import ensure_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, encode_rows

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("responses", type=Path, help="JSON lines")
parser.add_argument("--output", required=True, help="folder of the run; the drafter ends up here")
parser.add_argument("--target", help="folder or Hub name; SmolLM2-135M-Instruct out of a PyPI wheel by default")
parser.add_argument("--layers", type=int, default=2, help="layers of the drafter")
parser.add_argument("--block-size", type=int, default=7, help="drafts a round")
parser.add_argument("--rank", type=int, default=64, help="rank of the sequential head")
parser.add_argument("--mask-token", default="<reponame>", help="a token that no conversation contains")
parser.add_argument("--max-steps", type=int, default=1000)
parser.add_argument("--batch-size", type=int, default=8, help="conversations a step")
parser.add_argument("--learning-rate", type=float, default=6e-4)
args = parser.parse_args()

name = args.target or ensure_target()
target = AutoModelForCausalLM.from_pretrained(name, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(name)
rows = encode_rows(map(json.loads, args.responses.read_text().splitlines()), tokenizer, max_length=1024)

config = DSparkConfig.for_target(
    target.config,
    num_hidden_layers=args.layers,
    block_size=args.block_size,
    markov_rank=args.rank,
    mask_token_id=tokenizer.get_vocab().get(args.mask_token),  # None: one that the vocabulary leaves unused.
)
trainer = DSparkTrainer(
    model=DSparkDrafter(config),
    target=target,
    args=DSparkTrainingArguments(
        args.output,
        max_steps=args.max_steps,
        per_device_train_batch_size=args.batch_size,
        learning_rate=args.learning_rate,
        lr_scheduler_type="cosine",
        report_to="none",
    ),
    processing_class=tokenizer,
    train_dataset=rows,
)
trainer.train()
trainer.save_model()
print(f"The drafter is in {args.output}: python examples/generate.py --target {name} --drafter {args.output}")
