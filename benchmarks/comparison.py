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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspark_hf import DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter
from dspark_hf.conversations.rows import encode_rows
from dspark_hf.evaluation.figures import COLORS, LINES, MARKERS
from dspark_hf.evaluation.replay import replay
from dspark_hf.evaluation.statistics import NUM_RESAMPLES, ratio_of_sums
from dspark_hf.responses import RegenerationSettings, Regenerator
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments
from dspark_hf.training.checkpoints import last_checkpoint
from dspark_hf.training.draft_vocab import select_draft_vocabulary, set_draft_vocabulary
from dspark_hf.training.features import CachedFeatureDataset, target_features
from dspark_hf.training.target_logits import logit_rule

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from smollm2 import ensure_target  # noqa: E402

TAPS = [3, 11, 19, 27]
MASK_TOKEN = "<reponame>"
DRAFT_VOCAB_SIZE = 8192
RANK = 64
MODES = {"t1": 1.0, "greedy": 0.0}  # Temperatures of the answers.
TITLES = {"t1": "temperature 1", "greedy": "greedy"}
TASKS = ["gsm8k", "humaneval", "mt-bench", "aime25"]
FEW, MANY = 300, 1000  # Optimiser steps.
MIN_TRIED = 40  # Drafts; a share of fewer is not shown.
MARKS = ("<!-- comparison begins -->", "<!-- comparison ends -->")  # In results.md, around what `report` writes.
LABELS = {
    "dflash": "DFlash",
    "markov": "DSpark, Markov head",
    "gated": "DSpark, gated head",
    "rnn": "DSpark, RNN head",
    "eagle3": "EAGLE-3",
}


@dataclass(frozen=True)
class Variant:
    """One drafter of the comparison."""

    kind: str  # dflash, markov, gated, rnn, eagle3
    layers: int = 2
    block: int = 7
    seed: int = 0
    steps: int = FEW

    @property
    def name(self) -> str:
        name = f"{self.kind}-{self.layers}layers-block{self.block}"
        name += f"-seed{self.seed}" if self.seed else ""
        return name + (f"-{self.steps}steps" if self.steps != FEW else "")


KINDS = [Variant("dflash"), Variant("markov"), Variant("gated"), Variant("rnn"), Variant("eagle3", layers=1)]
LONGER = [replace(variant, steps=MANY) for variant in KINDS]
DEPTHS = [Variant(kind, layers=layers) for kind in ("dflash", "markov") for layers in (1, 3)]
BLOCKS = [Variant(kind, block=block) for kind in ("dflash", "markov") for block in (4, 12)]
SEEDS = [
    Variant(kind, seed=seed, steps=steps) for steps in (FEW, MANY) for seed in (0, 1) for kind in ("dflash", "markov")
]
VARIANTS = {variant.name: variant for variant in KINDS + LONGER + BLOCKS + DEPTHS + SEEDS}


# ------------------------------------------------------------------------------------------------------------- training


def new_drafter(variant: Variant, target, tokenizer, rows):
    config = new_config(variant, target, tokenizer)
    torch.manual_seed(variant.seed)
    drafter = drafter_class(variant)(config)
    ids = select_draft_vocabulary(rows, config.vocab_size, DRAFT_VOCAB_SIZE, [tokenizer.eos_token_id])
    set_draft_vocabulary(drafter, ids)
    return drafter


def new_config(variant: Variant, target, tokenizer) -> DSparkConfig:
    common = {
        "block_size": variant.block,
        "target_layer_ids": TAPS,
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "mask_token_id": tokenizer.convert_tokens_to_ids(MASK_TOKEN),
        "target_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    }
    if variant.kind == "eagle3":
        return Eagle3Config.for_target(target.config, **common)
    head = {"markov_rank": 0, "enable_confidence_head": False}
    if variant.kind != "dflash":
        head = {"markov_rank": RANK, "markov_head_type": variant.kind.replace("markov", "vanilla")}
    return DSparkConfig.for_target(target.config, num_hidden_layers=variant.layers, **common, **head)


def drafter_class(variant: Variant):
    return Eagle3Drafter if variant.kind == "eagle3" else DSparkDrafter


def load_target(dtype: str) -> tuple[Any, Any]:
    """The target, made where it is missing, and its tokenizer."""
    folder = ensure_target()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)


def train(options):
    target, tokenizer = load_target("bfloat16")
    rows = ConcatDataset([CachedFeatureDataset(folder) for folder in options.features])
    for name in options.only or VARIANTS:
        if not (options.runs / name / "done.json").exists():
            train_one(VARIANTS[name], options, target, tokenizer, rows)


def train_one(variant: Variant, options, target, tokenizer, rows):
    folder = options.runs / variant.name
    checkpoint = last_checkpoint(folder)
    drafter = new_drafter(variant, target, tokenizer, rows) if checkpoint is None else load_drafter(variant, checkpoint)
    print(f"{variant.name}: {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters, {len(rows)} rows")
    arguments = DSparkTrainingArguments(
        folder,
        max_steps=variant.steps,
        per_device_train_batch_size=options.batch_size,
        num_anchors=options.anchors,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=variant.steps // 50,
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
        "rows_a_step": options.batch_size,
        "anchors_a_row": options.anchors,
        "learning_rate": options.learning_rate,
        "rows": len(rows),
        "parameters": sum(p.numel() for p in drafter.parameters()),
        "seconds": round(time.time() - started),
        "log": trainer.state.log_history,
    }
    (folder / "done.json").write_text(json.dumps(done))


def load_drafter(variant: Variant, folder, dtype: torch.dtype = torch.float32):
    return drafter_class(variant).from_pretrained(folder, dtype=dtype)


# ------------------------------------------------------------------------------------------------- answers, and replays


def answer(options):
    """The target's answers to the first turns, as token ids, in float32: greedy output has to be the target's own."""
    target, tokenizer = load_target("float32")
    for file in options.files:
        lines = file.read_text().splitlines()[: options.max_prompts]
        prompts = [{"prompt": json.loads(line)["turns"][0]} for line in lines]
        for mode, temperature in MODES.items():
            settings = RegenerationSettings(
                max_new_tokens=options.max_new_tokens,
                do_sample=temperature > 0,
                temperature=temperature or None,
                top_k=0,
                top_p=1.0,
                save_token_ids=True,
                slots=40,
            )
            Regenerator(target, tokenizer, settings).run(
                prompts, options.runs / "answers" / f"{file.stem}-{mode}.jsonl"
            )


def follow(options):
    """Every drafter along every answer. Drafters run in bfloat16, as they were saved; the target's distribution is float32."""
    target, tokenizer = load_target("float32")
    todo = [name for name in options.only or VARIANTS if (options.runs / name / "done.json").exists()]
    todo = [name for name in todo if not replays_file(options, name).exists()]
    drafters = {name: load_drafter(VARIANTS[name], options.runs / name, torch.bfloat16) for name in todo}
    replays, rule = {name: [] for name in drafters}, logit_rule(target)
    for file in tqdm(sorted((options.runs / "answers").glob("*.jsonl"))) if drafters else []:
        task, _, mode = file.stem.rpartition("-")
        rows = encode_rows(map(json.loads, file.read_text().splitlines()), tokenizer)
        for index, row in enumerate(tqdm(rows, leave=False, desc=file.stem)):
            ids = torch.tensor(row["input_ids"])[None]
            features = target_features(target, next(iter(drafters.values())).config.hidden_state_indices, ids)
            for name, drafter in drafters.items():
                found = replay(drafter, target, row, MODES[mode], features, rule)
                replays[name].append({"task": task, "mode": mode, "prompt": index} | asdict(found))
    for name, found in replays.items():
        replays_file(options, name).write_text("\n".join(json.dumps(one) for one in found) + "\n")


def replays_file(options, name: str) -> Path:
    return options.runs / name / "replays.jsonl"


# -------------------------------------------------------------------------------------------------------------- report


class Results:
    """Replays of all drafters, and the figures of merit made of them."""

    def __init__(self, runs: Path):
        self.done = {
            name: json.loads((runs / name / "done.json").read_text())
            for name in VARIANTS
            if (runs / name / "replays.jsonl").exists()
        }
        self.replays = {
            name: [json.loads(line) for line in (runs / name / "replays.jsonl").read_text().splitlines()]
            for name in self.done
        }
        answers = self.replays[next(iter(self.done))]
        self.tasks = [task for task in TASKS if any(one["task"] == task for one in answers)]

    def kinds(self, steps: int) -> list[Variant]:
        """The kinds that were trained for so many steps."""
        return [kind for variant in KINDS if (kind := replace(variant, steps=steps)).name in self.done]

    def of(self, name: str, mode: str, task: str) -> list[dict]:
        return [one for one in self.replays[name] if (one["mode"], one["task"]) == (mode, task)]

    def length(self, name: str, mode: str, task: str):
        """Acceptance length with its bootstrap interval over prompts."""
        some = self.of(name, mode, task)
        return ratio_of_sums(*(np.array([one[key] for one in some]) for key in ("tokens", "rounds")))

    def macro(self, names: list[str], mode: str):
        """
        Macro means over the tasks of several drafters, `[N]`, and each of `NUM_RESAMPLES` draws of the prompts, `[R, N]`; the
        same prompts for all drafters, so that ratios are paired.
        """
        rng, means, draws = np.random.default_rng(0), [], []
        for task in self.tasks:
            tokens, rounds = (
                np.array([[one[key] for one in self.of(name, mode, task)] for name in names])
                for key in ("tokens", "rounds")
            )
            picks = rng.integers(tokens.shape[1], size=(NUM_RESAMPLES, tokens.shape[1]))
            means.append(tokens.sum(1) / rounds.sum(1))
            draws.append(tokens[:, picks].sum(2) / rounds[:, picks].sum(2))
        return np.mean(means, axis=0), np.mean(draws, axis=0).T

    def conditional(self, name: str, mode: str) -> np.ndarray:
        """Acceptance by slot over all tasks, given that all before passed, as far as slots were reached often."""
        some = [one for one in self.replays[name] if one["mode"] == mode]
        tried, passed = (np.array([one[key] for one in some]).sum(0) for key in ("tried", "passed"))
        enough = tried >= MIN_TRIED
        return passed[enough] / tried[enough]


def interval(values: np.ndarray) -> str:
    low, high = np.percentile(values, [2.5, 97.5])
    return f"{low:.2f} to {high:.2f}"


def gain(mean: float, base: float, draws: np.ndarray | None = None, base_draws: np.ndarray | None = None) -> str:
    """By how much one mean is above another, with its interval where there are draws of both."""
    text = f"{100 * (mean / base - 1):+.1f} %"
    if draws is None:
        return text
    low, high = np.percentile(100 * (draws / base_draws - 1), [2.5, 97.5])
    return f"{text} ({low:+.1f} to {high:+.1f})"


def kinds_table(results: Results, mode: str) -> str:
    variants = results.kinds(MANY)
    names = [variant.name for variant in variants]
    means, draws = results.macro(names, mode)
    base = [variant.kind for variant in variants].index("dflash")
    lines = [
        f"| drafter | parameters | {' | '.join(results.tasks)} | mean | over DFlash |",
        f"| --- | ---: |{' ---: |' * len(results.tasks)} ---: | ---: |",
    ]
    for i, variant in enumerate(variants):
        lengths = [results.length(variant.name, mode, task) for task in results.tasks]
        cells = [f"{e.value:.2f} ({e.low:.2f} to {e.high:.2f})" for e in lengths]
        over = "" if i == base else gain(means[i], means[base], draws[:, i], draws[:, base])
        parameters = results.done[variant.name]["parameters"] / 1e6
        cells += [f"**{means[i]:.2f}** ({interval(draws[:, i])})", over]
        lines.append(f"| {LABELS[variant.kind]} | {parameters:.1f} M | {' | '.join(cells)} |")
    return "\n".join(lines)


def gain_table(results: Results, axis: str, values: list[int]) -> str:
    """DFlash and DSpark over block length or depth, as far as they were trained."""
    lines = [f"| {axis} | temperature | DFlash | DSpark | gain |", "| ---: | --- | ---: | ---: | ---: |"]
    for value in values:
        names = [replace(Variant(kind), **{axis: value}).name for kind in ("dflash", "markov")]
        trained = [name for name in names if name in results.done]
        for mode, temperature in MODES.items() if trained else ():
            means, draws = results.macro(trained, mode)
            cells = dict.fromkeys(names, "") | {
                name: f"{mean:.2f} ({interval(draws[:, i])})" for i, (name, mean) in enumerate(zip(trained, means))
            }
            over = gain(means[1], means[0], draws[:, 1], draws[:, 0]) if len(trained) == 2 else ""
            lines.append(f"| {value} | {temperature or 'greedy'} | {' | '.join(cells.values())} | {over} |")
    return "\n".join(lines)


def steps_table(results: Results) -> str:
    """Macro means of the kinds, and gains over DFlash, after few and after many steps, as far as they were trained."""
    lines = [
        "| drafter | temperature |" + "".join(f" {steps:,} steps | over DFlash |" for steps in (FEW, MANY)),
        "| --- | --- |" + " ---: | ---: |" * 2,
    ]
    for variant in results.kinds(FEW):
        for mode, temperature in MODES.items():
            cells = [after_steps(results, replace(variant, steps=steps), mode) for steps in (FEW, MANY)]
            lines.append(f"| {LABELS[variant.kind]} | {temperature or 'greedy'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def after_steps(results: Results, variant: Variant, mode: str) -> str:
    """Two cells: macro mean, and gain over the DFlash drafter of as many steps."""
    if variant.name not in results.done:
        return " | "
    (base, mean), _ = results.macro([Variant("dflash", steps=variant.steps).name, variant.name], mode)
    return f"{mean:.2f} | " + ("" if variant.kind == "dflash" else gain(mean, base))


def seeds_table(results: Results) -> str:
    """DFlash and DSpark once more with other initial weights, rows in another order and other anchors."""
    lines = ["| steps | seed | temperature | DFlash | DSpark | gain |", "| ---: | ---: | --- | ---: | ---: | ---: |"]
    for dflash, markov in zip(SEEDS[::2], SEEDS[1::2], strict=True):
        if dflash.name in results.done and markov.name in results.done:
            for mode, temperature in MODES.items():
                means, _ = results.macro([dflash.name, markov.name], mode)
                lines.append(
                    f"| {dflash.steps:,} | {dflash.seed} | {temperature or 'greedy'} | {means[0]:.2f} | {means[1]:.2f} | "
                    f"{gain(means[1], means[0])} |"
                )
    return "\n".join(lines)


def positions_figure(results: Results):
    """Conditional acceptance by slot of the five kinds (paper Fig. 2)."""
    figure, panels = new_figure(2)
    for axes, mode in zip(panels, MODES, strict=True):
        for i, variant in enumerate(results.kinds(MANY)):
            shares = results.conditional(variant.name, mode)
            slots = range(1, len(shares) + 1)
            axes.plot(
                slots, shares, LINES[i % len(LINES)], marker=MARKERS[i], color=COLORS[i], label=LABELS[variant.kind]
            )
        axes.set(title=TITLES[mode], xlabel="slot")
    panels[0].set_ylabel("accepted, given all before were")
    panels[0].set_ylim(bottom=0)
    return legend_below(figure, panels[0])


def gains_figure(results: Results, axis: str, values: list[int], label: str):
    """Acceptance length of DFlash and DSpark over block length or depth (paper Figs. 3, 4)."""
    figure, panels = new_figure(2)
    for axes, mode in zip(panels, MODES, strict=True):
        for i, kind in enumerate(("dflash", "markov")):
            variants = {value: replace(Variant(kind), **{axis: value}).name for value in values}
            variants = {value: name for value, name in variants.items() if name in results.done}
            means, draws = results.macro(list(variants.values()), mode)
            low, high = np.percentile(draws, [2.5, 97.5], axis=0)
            style = {"marker": MARKERS[i], "color": COLORS[i], "linestyle": LINES[i], "capsize": 3}
            axes.errorbar(list(variants), means, [means - low, high - means], label=LABELS[kind], **style)
        axes.set(title=TITLES[mode], xlabel=label, xticks=values)
    panels[0].set_ylabel("tokens a target pass")
    return legend_below(figure, panels[0])


def new_figure(num_panels: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    panels = figure.subplots(1, num_panels, sharey=True)
    for axes in panels:
        axes.grid(alpha=0.3)
    return figure, panels


def legend_below(figure, axes):
    figure.legend(
        handles=axes.get_legend_handles_labels()[0], loc="outside lower center", ncols=5, frameon=False, fontsize=8
    )
    return figure


def cost_note(results: Results) -> str:
    done = list(results.done.values())
    hours = sum(one["seconds"] for one in done) / 3600
    return (
        f"Every drafter: {done[0]['rows']:,} rows, {done[0]['rows_a_step']} of them a step, with {done[0]['anchors_a_row']} "
        f"anchors each. Training all {len(done)} took {hours:.1f} hours on one core."
    )


def report(options):
    """Figures into `images/`, tables into `results.md` between its marks."""
    results = Results(options.runs)
    images = options.output / "images"
    images.mkdir(parents=True, exist_ok=True)
    figures = {
        "comparison_positions": positions_figure(results),
        "comparison_blocks": gains_figure(results, "block", [4, 7, 12], "drafts a block"),
        "comparison_depths": gains_figure(results, "layers", [1, 2, 3], "draft layers"),
    }
    for name, figure in figures.items():
        figure.savefig(images / f"{name}.png", dpi=130)
    tables = [
        f"After {MANY:,} steps, temperature 1:\n\n{kinds_table(results, 't1')}",
        f"After {MANY:,} steps, greedy:\n\n{kinds_table(results, 'greedy')}",
        f"By steps of training:\n\n{steps_table(results)}",
        f"By block length (2 layers, {FEW} steps):\n\n{gain_table(results, 'block', [4, 7, 12])}",
        f"By depth (block 7, {FEW} steps):\n\n{gain_table(results, 'layers', [1, 2, 3])}",
        f"By seed (2 layers, block 7):\n\n{seeds_table(results)}",
        cost_note(results),
    ]
    page = options.output / "results.md"
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text("\n\n".join([before + MARKS[0], *tables, MARKS[1] + rest.partition(MARKS[1])[2]]))
    print("\n\n".join(tables))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["train", "answer", "replay", "report"])
    parser.add_argument("files", nargs="*", type=Path, help="answer: benchmark prompts, JSON lines with `turns`")
    parser.add_argument("--runs", type=Path, default=Path("runs/comparison"), help="folder of the comparison")
    parser.add_argument("--features", type=Path, nargs="+", default=[], help="train: folders of cached features")
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), help="these drafters only")
    parser.add_argument("--max-prompts", type=int, default=40, help="answer: prompts of each file")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="answer: length of an answer")
    parser.add_argument("--output", type=Path, default=ROOT / "docs", help="report: folder")
    parser.add_argument("--batch-size", type=int, default=8, help="rows a step")
    parser.add_argument("--anchors", type=int, default=16, help="blocks a row")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    {"train": train, "answer": answer, "replay": follow, "report": report}[options.stage](options)


if __name__ == "__main__":
    main()
