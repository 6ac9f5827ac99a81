"""The paper's comparisons in small: drafters of several kinds, trained on equal data for equal steps, side by side.

    python benchmarks/comparison.py train  --features features/*-train --runs runs/comparison
    python benchmarks/comparison.py answer --runs runs/comparison gsm8k.jsonl humaneval.jsonl mt-bench.jsonl
    python benchmarks/comparison.py replay --runs runs/comparison
    python benchmarks/comparison.py report --runs runs/comparison --output docs

`train` trains every drafter of VARIANTS (or those named by `--only`) on cached features of the quickstart target; a run that
was stopped goes on at its last checkpoint. `answer` lets the target answer the benchmark prompts, greedily and at temperature
1. `replay` follows these answers with each drafter (see `dspark_hf.evaluation.replay`). `report` draws the figures and
writes the tables as Markdown. Everything finished is skipped.
"""

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import ConcatDataset
from transformers.trainer_utils import get_last_checkpoint

from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments
from dspark_hf.training.draft_vocab import select_draft_vocabulary, set_draft_vocabulary
from dspark_hf.training.features import CachedFeatureDataset
from dspark_hf.training.regeneration import load_target

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from smollm2 import ensure_target  # noqa: E402

TAPS = [3, 11, 19, 27]
MASK_TOKEN = "<reponame>"
DRAFT_VOCAB_SIZE = 8192
RANK = 64


@dataclass(frozen=True)
class Variant:
    """One drafter of the comparison."""

    kind: str  # dflash, markov, gated, rnn, eagle3
    layers: int = 2
    block: int = 7
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.layers}layers-block{self.block}" + (f"-seed{self.seed}" if self.seed else "")


KINDS = [Variant("dflash"), Variant("markov"), Variant("gated"), Variant("rnn"), Variant("eagle3", layers=1)]
DEPTHS = [Variant(kind, layers=layers) for kind in ("dflash", "markov") for layers in (1, 3)]
BLOCKS = [Variant(kind, block=block) for kind in ("dflash", "markov") for block in (4, 12)]
SEEDS = [Variant(kind, seed=1) for kind in ("dflash", "markov")]
VARIANTS = {variant.name: variant for variant in KINDS + BLOCKS + DEPTHS + SEEDS}


# ------------------------------------------------------------------------------------------------------------- training


def new_drafter(variant: Variant, target, tokenizer, rows):
    common = {
        "num_hidden_layers": variant.layers,
        "block_size": variant.block,
        "target_layer_ids": TAPS,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "target_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    }
    torch.manual_seed(variant.seed)
    head = {"markov_rank": 0, "enable_confidence_head": False}
    if variant.kind != "dflash":
        head = {"markov_rank": RANK, "markov_head_type": variant.kind.replace("markov", "vanilla")}
    config = DSparkConfig.for_target(
        target.config, mask_token_id=tokenizer.convert_tokens_to_ids(MASK_TOKEN), **common, **head
    )
    drafter = DSparkDrafter(config)
    ids = select_draft_vocabulary(rows, config.vocab_size, DRAFT_VOCAB_SIZE, [tokenizer.eos_token_id])
    set_draft_vocabulary(drafter, ids)
    return drafter


def train(options):
    target, tokenizer = load_target(str(ensure_target()), dtype="bfloat16")
    rows = ConcatDataset([CachedFeatureDataset(folder) for folder in options.features])
    for name in options.only or VARIANTS:
        if not (options.runs / name / "done.json").exists():
            train_one(VARIANTS[name], options, target, tokenizer, rows)


def train_one(variant: Variant, options, target, tokenizer, rows):
    folder = options.runs / variant.name
    checkpoint = get_last_checkpoint(folder) if folder.is_dir() else None
    drafter = new_drafter(variant, target, tokenizer, rows) if checkpoint is None else load_drafter(checkpoint)
    print(f"{variant.name}: {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters, {len(rows)} rows")
    arguments = DSparkTrainingArguments(
        folder,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        num_anchors=options.anchors,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 50,
        adam_beta2=0.98,
        matrix_optimizer="muon",
        logits_chunk_size=256,
        seed=variant.seed,
        bf16=True,
        use_cpu=True,
        logging_steps=20,
        save_steps=50,
        save_total_limit=1,
        save_dtype="bfloat16",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = DSparkTrainer(drafter, target, arguments, processing_class=tokenizer, train_dataset=rows)
    started = time.time()
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    done = asdict(variant) | {
        "steps": options.steps,
        "rows_a_step": options.batch_size,
        "anchors_a_row": options.anchors,
        "learning_rate": options.learning_rate,
        "rows": len(rows),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "seconds": round(time.time() - started),
        "log": trainer.state.log_history,
    }
    (folder / "done.json").write_text(json.dumps(done))


def load_drafter(folder):
    return DSparkDrafter.from_pretrained(folder, dtype=torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "answer", "replay", "report"])
    parser.add_argument("files", nargs="*", type=Path, help="answer: benchmark prompts, JSON lines with `turns`")
    parser.add_argument("--runs", type=Path, default=Path("runs/comparison"), help="folder of the comparison")
    parser.add_argument("--features", type=Path, nargs="+", default=[], help="train: folders of cached features")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="these drafters only")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step")
    parser.add_argument("--anchors", type=int, default=16, help="blocks a row")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"train": train}[options.stage](options)


if __name__ == "__main__":
    main()
