"""Trains a drafter for SmolLM2-135M-Instruct on two CPU cores: prompts, responses, features, training, saving.

    python examples/train_quickstart.py --output runs/quickstart

    torchrun --nproc_per_node 2 examples/train_quickstart.py ...   # 1.5 times faster, one process per core, with cached features

It runs three commands, `dspark-hf regenerate`, `cache-features` and `train`, with settings that suit a small target and a
CPU; each resumes after an interruption. The target writes the prompts itself, unless `--responses FILE...` names responses
that exist already.
"""

import argparse
import os
from pathlib import Path

import torch
from smollm2 import ensure_target

from dspark_hf_cli.app import app

MASK_TOKEN = "<reponame>"  # A special token of SmolLM2's tokenizer that no conversation contains.


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the run; the drafter ends up here")
    parser.add_argument("--responses", type=Path, nargs="*", default=[], help="JSON-lines files of responses")
    parser.add_argument("--num-prompts", type=int, default=8000, help="prompts to write where no responses are given")
    parser.add_argument("--max-new-tokens", type=int, default=160, help="length of written responses")
    parser.add_argument("--features", type=Path, help="folder for cached features; OUTPUT/features by default")
    parser.add_argument("--layers", type=int, default=2, help="draft layers")
    parser.add_argument("--taps", type=int, nargs="+", default=[3, 11, 19, 27], help="target layers the drafter reads")
    parser.add_argument("--rank", type=int, default=64, help="rank of the Markov head")
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4000, help="optimiser steps")
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step")
    parser.add_argument("--anchors", type=int, default=16, help="blocks a row")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--save-steps", type=int, default=100)
    parser.add_argument(
        "--until", choices=["responses", "features", "train"], default="train", help="last stage to run"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    return parser.parse_args()


def dspark_hf(command: str, *arguments: object, **options: object) -> None:
    """Runs a command of `dspark-hf`; `max_length=512` is `--max-length 512`."""
    words = [command, *map(str, arguments)]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    app(words, standalone_mode=False)


def write_responses(options: argparse.Namespace, target: Path) -> list[Path]:
    """Stages 1 and 2: prompts by the target, and its answers to them."""
    responses = options.output / "responses.jsonl"
    dspark_hf(
        "regenerate", "--save-token-ids", target=target, self_prompt=options.num_prompts, output=responses,
        max_new_tokens=options.max_new_tokens, temperature=0.6, top_k=0, dtype="bfloat16", device="cpu",
    )  # fmt: skip
    return [responses]


def cache(options: argparse.Namespace, target: Path, files: list[Path], folder: Path) -> None:
    """Stage 3: what the drafter reads of the target."""
    data = [word for file in files for word in ("--data", file)]
    dspark_hf(
        "cache-features", "--normalizers", *data, target=target, output=folder, max_length=512, dtype="bfloat16",
        device="cpu", target_layer_ids=",".join(map(str, options.taps)),
    )  # fmt: skip


def train(options: argparse.Namespace, target: Path, folder: Path) -> None:
    """Stage 4."""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    further = ["adam_beta2=0.98", "target_name_or_path=HuggingFaceTB/SmolLM2-135M-Instruct"]
    if processes > 1:
        further += ["ddp_backend=gloo", "ddp_find_unused_parameters=false"]
    dspark_hf(
        "train", "--use-cpu", "--bf16", "--no-progress", *(word for setting in further for word in ("--set", setting)),
        target=target, data=folder, output=options.output, target_dtype="bfloat16", mask_token=MASK_TOKEN,
        num_hidden_layers=options.layers, target_layer_ids=",".join(map(str, options.taps)), markov_rank=options.rank,
        draft_vocab_size=options.draft_vocab_size,
        max_steps=options.steps, learning_rate=options.learning_rate, warmup_steps=options.steps // 50,
        lr_scheduler_type="cosine", matrix_optimizer="muon", num_anchors=options.anchors,
        per_device_train_batch_size=options.batch_size // processes,
        per_device_eval_batch_size=options.batch_size,
        logits_chunk_size=256,  # What fits the caches of a CPU core; a GPU takes more at once.
        save_steps=options.save_steps, save_dtype="bfloat16",
    )  # fmt: skip


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    target = ensure_target()
    files = options.responses or write_responses(options, target)
    if options.until == "responses":
        return
    folder = options.features or options.output / "features"
    cache(options, target, files, folder)
    if options.until == "train":
        train(options, target, folder)


if __name__ == "__main__":
    main()
