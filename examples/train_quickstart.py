"""Trains a drafter for SmolLM2-135M-Instruct on two CPU cores: prompts, responses, features, training, saving.

    python examples/train_quickstart.py --output runs/quickstart

    torchrun --nproc_per_node 2 examples/train_quickstart.py ...   # once features are there: a process a core, 1.5 x faster

Every stage picks up what an earlier call left behind, so a run that was stopped is started again with the same command.
Without data the target writes the prompts itself. `--responses FILE...` uses responses that exist already, JSON lines
as `python -m dspark_hf.training.regeneration` writes them.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
from smollm2 import ensure_target
from torch.utils.data import ConcatDataset
from transformers.trainer_utils import get_last_checkpoint

from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.chat import encode_rows
from dspark_hf.training.draft_vocab import select_draft_vocabulary, set_draft_vocabulary
from dspark_hf.training.features import CachedFeatureDataset, cache_features
from dspark_hf.training.regeneration import RegenerationSettings, Regenerator, load_target, read_prompts, self_prompt
from dspark_hf.training.trainer import DSparkTrainer

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


def write_responses(options: argparse.Namespace, target, tokenizer) -> list[Path]:
    """Stages 1 and 2: prompts by the target, and its answers to them."""
    prompts, responses = options.output / "prompts.jsonl", options.output / "responses.jsonl"
    options.output.mkdir(parents=True, exist_ok=True)
    self_prompt(target, tokenizer, options.num_prompts, prompts)
    settings = RegenerationSettings(
        max_new_tokens=options.max_new_tokens, temperature=0.6, top_k=0, save_token_ids=True
    )
    Regenerator(target, tokenizer, settings).run(read_prompts(prompts), responses)
    return [responses]


def is_held_out(row: dict) -> bool:
    """One prompt in a hundred is never trained on, the same one in every file."""
    prompt = row["prompt"] if "prompt" in row else json.dumps(row["messages"])
    return hashlib.sha256(prompt.encode()).digest()[0] * 100 < 256


def read_split(file: Path, tokenizer, held_out: bool) -> list[dict]:
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows = [row for row in rows if is_held_out(row) == held_out]
    return encode_rows(rows, tokenizer, max_length=512)


def make_config(options: argparse.Namespace, target, tokenizer) -> DSparkConfig:
    return DSparkConfig.for_target(
        target.config,
        num_hidden_layers=options.layers,
        target_layer_ids=options.taps,
        markov_rank=options.rank,
        draft_vocab_size=options.draft_vocab_size,
        mask_token_id=tokenizer.convert_tokens_to_ids(MASK_TOKEN),
        target_name_or_path="HuggingFaceTB/SmolLM2-135M-Instruct",
    )


def new_drafter(config: DSparkConfig, tokenizer, rows: dict[tuple, list[dict]]) -> DSparkDrafter:
    """A random drafter that speaks the most frequent tokens of the training responses."""
    drafter = DSparkDrafter(config)
    learned = (row for (split, _), some in rows.items() if split == "train" for row in some)
    ids = select_draft_vocabulary(learned, config.vocab_size, config.draft_vocab_size, [tokenizer.eos_token_id])
    set_draft_vocabulary(drafter, ids)
    return drafter


def train(
    options: argparse.Namespace, target, tokenizer, drafter: DSparkDrafter, datasets: dict, checkpoint: str | None
):
    arguments = DSparkTrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size // int(os.environ.get("WORLD_SIZE", "1")),
        per_device_eval_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        adam_beta2=0.98,
        matrix_optimizer="muon",
        warmup_steps=options.steps // 50,
        num_anchors=options.anchors,
        logits_chunk_size=256,  # What fits the caches of a CPU core; a GPU takes more at once.
        bf16=True,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=options.save_steps,
        save_steps=options.save_steps,
        save_total_limit=2,
        save_dtype="bfloat16",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DSparkTrainer(
        drafter,
        target,
        arguments,
        processing_class=tokenizer,
        train_dataset=datasets["train"],
        eval_dataset=datasets["eval"],
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def plot_curve(history: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for key, label in (("loss", "training"), ("eval_loss", "held out")):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        left.plot(*zip(*points, strict=True), label=label)
    for key in ("eval_greedy_acceptance_length", "eval_acceptance_length"):
        points = [(entry["step"], entry[key]) for entry in history if key in entry]
        right.plot(*zip(*points, strict=True), label=key.removeprefix("eval_").replace("_", " "))
    for axes, title in ((left, "loss"), (right, "held out: tokens a target pass (teacher forced)")):
        axes.set(xlabel="optimiser step", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    target, tokenizer = load_target(str(ensure_target()), dtype="bfloat16")
    files = options.responses or write_responses(options, target, tokenizer)
    if options.until == "responses":
        return
    config = make_config(options, target, tokenizer)
    folder = options.features or options.output / "features"
    rows = {
        (split, file): read_split(file, tokenizer, split == "eval") for split in ("train", "eval") for file in files
    }
    for (split, file), some in rows.items():
        cache_features(target, config, some, folder / f"{file.stem}-{split}")
    if options.until == "features":
        return
    datasets = {
        split: ConcatDataset([CachedFeatureDataset(folder / f"{file.stem}-{split}", config) for file in files])
        for split in ("train", "eval")
    }
    checkpoint = get_last_checkpoint(options.output) if options.output.is_dir() else None
    drafter = DSparkDrafter.from_pretrained(checkpoint) if checkpoint else new_drafter(config, tokenizer, rows)
    trainer = train(options, target, tokenizer, drafter, datasets, checkpoint)
    trainer.save_model()
    if trainer.is_world_process_zero():
        plot_curve(trainer.state.log_history, options.output / "training_curve.png")


if __name__ == "__main__":
    main()
