"""What a drafter that is always wrong costs against plain `generate`, with back-off and without.

    python benchmarks/hostile.py --target TARGET --drafter DRAFTER --prompts prompts.jsonl

The drafter's weights are replaced by random ones, so its drafts cost what they cost and nearly none passes. The methods take
turns on each prompt or batch of prompts, in changing order. Ends with one line of JSON.
"""

import argparse
import json
import statistics

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkDrafter
from dspark_hf.conversations import Chat
from dspark_hf.evaluation import Method, load_task, plain_method
from dspark_hf.evaluation.environment import environment
from dspark_hf.evaluation.runner import rotated
from dspark_hf.evaluation.serving import batch_of, measure_load


def hostile_twin(drafter):
    """A drafter of the same shape that has learnt nothing; it keeps its draft vocabulary."""
    torch.manual_seed(0)
    twin = DSparkDrafter(drafter.config).to(drafter.dtype).eval()
    if drafter.draft_token_ids is not None:
        twin.draft_token_ids.copy_(drafter.draft_token_ids)
    twin.throughput_curve = drafter.throughput_curve
    return twin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub name")
    parser.add_argument("--drafter", required=True, help="folder or Hub name")
    parser.add_argument("--prompts", required=True, help="a task of `dspark-hf bench`, or a JSONL file of prompts")
    parser.add_argument("--max-prompts", type=int, default=6)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1, help="prompts decoded together")
    args = parser.parse_args()
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32).eval()
    drafter = hostile_twin(DSparkDrafter.from_pretrained(args.drafter, dtype=torch.float32))
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = [
        Chat(tokenizer, prompt.system).ask(prompt.turns[0])
        for prompt in load_task(args.prompts, args.max_prompts, 0).prompts
    ]
    own = {"assistant_model": drafter}
    methods = [
        plain_method(),
        Method("with back-off", own, drafter),
        Method("without", own | {"drafting_backoff": False}, drafter),
    ]
    ratios = {method.name: [] for method in methods[1:]}
    for method in methods:
        measure_load(target, batch_of(prompts[:1], args.rows, target.device), method, 8, 0.0, 0)
    for index in range(0, len(prompts), args.rows):
        inputs = batch_of(prompts[index : index + args.rows], args.rows, target.device)
        loads = {m.name: measure_load(target, inputs, m, args.max_new_tokens, 0.0, 0) for m in rotated(methods, index)}
        for name, values in ratios.items():
            values.append(loads[name].seconds / loads["plain"].seconds - 1)
            print(
                f"prompt {index}, {name}: {values[-1]:+.1%}, {loads[name].drafted_share:.0%} of rounds drafted",
                flush=True,
            )
    medians = {name: statistics.median(values) for name, values in ratios.items()}
    for name, value in medians.items():
        print(f"{name:14} {value:+.1%} against plain generate (median)")
    print(json.dumps({"extra_time": medians, "settings": vars(args), "environment": environment()}))


if __name__ == "__main__":
    main()
