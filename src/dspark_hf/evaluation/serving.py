"""
Speed under load: batches of rising size decoded plainly and with each schedule (the shape of the paper's Figures 7 and 8).

    python -m dspark_hf.evaluation.serving --target TARGET --drafter DRAFTER --prompts prompts.jsonl --output serving

Every row of a batch decodes the same number of tokens; the time of prompts does not count. The methods take turns within a
repeat, in changing order. Measurements are kept as they are made, so a run that was stopped continues. Written to the output
folder: `serving.json`, `serving.md`, and with matplotlib `throughput.png` and `budget.png`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checkpoints.files import THROUGHPUT_CURVE_NAME
from ..drafter import Drafter
from ..generation.telemetry import record_speculation
from ..scheduling import (
    AsyncThroughputScheduler,
    ConfidenceThreshold,
    FixedLength,
    ThroughputCurve,
    ThroughputScheduler,
)
from ..storage.json_lines import ResumableLines
from .conversation import Conversation
from .costs import measure_costs
from .environment import environment
from .meter import measured
from .methods import PLAIN, Method, plain_method
from .runner import rotated
from .tasks import load_task

FIXED, THROUGHPUT, ASYNC = "fixed block", "throughput", "async throughput"
COLUMNS = (
    "batch",
    "method",
    "tokens/s",
    "per row",
    "x plain",
    "verified a row",
    "accepted",
    "tokens a pass",
    "drafted",
)


@dataclass(frozen=True)
class Load:
    """
    One batch decoded by one method.

    Args:
        batch: Rows.
        method: Its name.
        repeat: Which of the measurements of this batch and method, from 0.
        seconds: Of decoding, without the prompts' pass.
        tokens: Decoded in that time, all rows together.
        passes: Of the target.
        verify_length: Drafts sent to the target, a row and round; 0 where none are made.
        acceptance_rate: Of those, the share that passed; `None` where there are none.
        drafted_share: Rounds of rows that drafted; 0 for plain decoding.
    """

    batch: int
    method: str
    repeat: int
    seconds: float
    tokens: int
    passes: int
    verify_length: float = 0.0
    acceptance_rate: float | None = None
    drafted_share: float = 0.0

    @property
    def key(self) -> tuple[int, str, int]:
        return self.batch, self.method, self.repeat


class LoadFile:
    """The measurements of a run on the disk, from which an interrupted run resumes; arguments as for `RecordFile`."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self._lines = ResumableLines(path, settings, kinds=("batch",))
        found = [Load(**line) for line in self._lines.written]
        self.loads = {load.key: load for load in found}

    def close(self) -> None:
        self._lines.close()

    def add(self, load: Load) -> None:
        """Keeps a finished measurement."""
        self.loads[load.key] = load
        self._lines.append(asdict(load))


def serving_methods(drafter: Drafter, curve: ThroughputCurve, threshold: float = 0.5) -> list[Method]:
    """
    Plain batched `generate`, whole blocks, a static threshold, and both throughput schedulers with back-off.

    Args:
        drafter: The drafter; without a confidence head only the first two apply.
        curve: What rounds cost.
        threshold: Of the static one.
    """
    static = {"assistant_model": drafter, "drafting_backoff": False}
    methods = [plain_method(), Method(FIXED, static | {"verify_scheduler": FixedLength()}, drafter)]
    if drafter.confidence_head is not None:
        by_threshold = static | {"verify_scheduler": ConfidenceThreshold(threshold)}
        methods.append(Method(f"threshold {threshold:g}", by_threshold, drafter))
        for name, scheduler in ((THROUGHPUT, ThroughputScheduler(curve)), (ASYNC, AsyncThroughputScheduler(curve))):
            by_cost = {"assistant_model": drafter, "verify_scheduler": scheduler, "drafting_backoff": True}
            methods.append(Method(name, by_cost, drafter))
    return methods


def run_serving(
    target: PreTrainedModel,
    prompt_ids: Sequence[torch.Tensor],
    methods: list[Method],
    batches: Sequence[int],
    file: LoadFile,
    *,
    num_new_tokens: int = 128,
    num_repeats: int = 3,
    temperature: float = 0.0,
    on_load: Callable[[Load, int, int], None] = lambda load, done, total: None,
) -> None:
    """
    Measures what `file` does not hold yet.

    Args:
        target: The target.
        prompt_ids: Prompts, `[1, L]` each; batches take them in turn.
        methods: As [`serving_methods`] makes them.
        batches: Rows decoded together.
        file: Where the measurements go.
        num_new_tokens: Tokens of each row.
        num_repeats: Measurements of each batch and method.
        temperature: 0 decodes greedily.
        on_load: Called after each measurement, with how many there are and their total.
    """
    total = len(batches) * len(methods) * num_repeats
    for batch in batches:
        inputs = batch_of(prompt_ids, batch, target.device)
        wanted = [key for method in methods for key in [(batch, method.name, r) for r in range(num_repeats)]]
        if all(key in file.loads for key in wanted):
            continue
        for method in methods:  # Kernels are chosen, buffers grow.
            measure_load(target, inputs, method, min(8, num_new_tokens), temperature, 0)
        for repeat in range(num_repeats):
            for method in rotated(methods, repeat):
                if (batch, method.name, repeat) not in file.loads:
                    file.add(measure_load(target, inputs, method, num_new_tokens, temperature, repeat))
                    on_load(file.loads[batch, method.name, repeat], len(file.loads), total)


@torch.no_grad()
def measure_load(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    method: Method,
    num_new_tokens: int,
    temperature: float,
    repeat: int,
) -> Load:
    """One batch decoded by one method, every row to its full length."""
    torch.manual_seed(repeat)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    settings = {"max_new_tokens": num_new_tokens, "eos_token_id": None, "pad_token_id": 0} | sampling
    with record_speculation() as stats, measured(target) as meter:
        target.generate(**inputs, **settings, **method.arguments)
    batch, rounds = len(inputs["input_ids"]), stats.rounds
    verified = sum(r.verified for r in rounds)
    return Load(
        batch,
        method.name,
        repeat,
        meter.seconds - meter.prefill_s,
        batch * (num_new_tokens - 1),  # The first ones come from the prompts' pass.
        len(meter.passes),
        verified / len(rounds) if rounds else 0.0,
        stats.acceptance_rate if verified else None,
        sum(not r.skipped for r in rounds) / len(rounds) if rounds else 0.0,
    )


def batch_of(prompt_ids: Sequence[torch.Tensor], num_rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`num_rows` prompts in turn, padded on the left."""
    rows = [prompt_ids[row % len(prompt_ids)][0] for row in range(num_rows)]
    longest = max(len(row) for row in rows)
    ids = torch.stack([torch.nn.functional.pad(row, (longest - len(row), 0)) for row in rows])
    mask = torch.stack([torch.nn.functional.pad(torch.ones_like(row), (longest - len(row), 0)) for row in rows])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


# ---------------------------------------------------------------------- results


def results_of(loads: Sequence[Load]) -> list[dict[str, Any]]:
    """Medians over the repeats of each batch and method, in the order they were measured in."""
    groups: dict[tuple[int, str], list[Load]] = {}
    for load in sorted(loads, key=lambda load: load.batch):
        groups.setdefault((load.batch, load.method), []).append(load)
    results = [_result(batch, method, group) for (batch, method), group in groups.items()]
    plain = {r["batch"]: r["tokens_per_second"] for r in results if r["method"] == PLAIN}
    for result in results:
        result["speedup"] = result["tokens_per_second"] / plain[result["batch"]] if result["batch"] in plain else None
    return results


def _result(batch: int, method: str, loads: list[Load]) -> dict[str, Any]:
    rates = [load.tokens / load.seconds for load in loads]
    median = statistics.median(rates)
    accepted = [load.acceptance_rate for load in loads if load.acceptance_rate is not None]
    return {
        "batch": batch,
        "method": method,
        "tokens_per_second": median,
        "tokens_per_second_range": [min(rates), max(rates)],
        "per_row": median / batch,
        "verify_length": statistics.median(load.verify_length for load in loads),
        "acceptance_rate": statistics.median(accepted) if accepted else None,
        "tokens_a_pass": statistics.median(load.tokens / load.passes / batch for load in loads),
        "drafted_share": statistics.median(load.drafted_share for load in loads),
        "num_repeats": len(loads),
    }


def margins_of(results: Sequence[dict[str, Any]]) -> dict[int, float]:
    """For each batch, the throughput scheduler's tokens a second over those of the better of plain and whole blocks, minus 1."""
    rates = {(r["batch"], r["method"]): r["tokens_per_second"] for r in results}
    return {
        batch: rate / max(rates[batch, other] for other in (PLAIN, FIXED) if (batch, other) in rates) - 1
        for (batch, method), rate in rates.items()
        if method == THROUGHPUT
    }


def table_of(results: Sequence[dict[str, Any]]) -> Iterator[list[str]]:
    """Rows of text under `COLUMNS`."""
    for r in results:
        accepted, speedup = r["acceptance_rate"], r["speedup"]
        yield [
            str(r["batch"]),
            r["method"],
            f"{r['tokens_per_second']:.1f}",
            f"{r['per_row']:.2f}",
            "-" if speedup is None else f"{speedup:.2f}",
            f"{r['verify_length']:.2f}",
            "-" if accepted is None else f"{accepted:.0%}",
            f"{r['tokens_a_pass']:.2f}",
            f"{r['drafted_share']:.0%}",
        ]


def markdown_of(document: dict[str, Any]) -> str:
    """The table and where it was measured."""
    env, settings = document["environment"], document["settings"]
    packages = env["packages"]
    device = ", ".join(env["accelerators"]) if settings["device"] != "cpu" else env["cpu"]
    where = (
        f"{settings['target']} with {settings['drafter']}, {settings['dtype']}, on {device} ({env['threads']} threads), "
        f"torch {packages['torch']}, transformers {packages['transformers']}. {settings['num_new_tokens']} tokens a row, "
        f"medians of {settings['num_repeats']}."
    )
    lines = [
        where,
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{'---|' * len(COLUMNS)}",
        *(f"| {' | '.join(row)} |" for row in table_of(document["results"])),
        "",
        "The throughput scheduler against the better of plain and whole blocks: "
        + ", ".join(f"{margin:+.1%} at {batch}" for batch, margin in document["margins"].items())
        + ".",
    ]
    return "\n".join(lines) + "\n"


def throughput_figure(results: Sequence[dict[str, Any]]) -> Any:
    """Tokens a second in total against those of one row, a line a method through its batches (as in Fig. 7)."""
    figure, axes, styles = _figure(results)
    for method, style in styles.items():
        own = [r for r in results if r["method"] == method]
        axes.plot([r["per_row"] for r in own], [r["tokens_per_second"] for r in own], label=method, **style)
        for r in own:
            axes.annotate(str(r["batch"]), (r["per_row"], r["tokens_per_second"]), fontsize=7, alpha=0.7)
    axes.set_xlabel("tokens/s of one row")
    axes.set_ylabel("tokens/s of all rows")
    axes.set_title("Throughput against speed for each user (numbers: rows)")
    axes.legend(fontsize=8)
    return figure


def budget_figure(results: Sequence[dict[str, Any]]) -> Any:
    """Drafts verified a row and round against the rows decoded together (as in Fig. 8)."""
    figure, axes, styles = _figure(results)
    for method, style in styles.items():
        own = [r for r in results if r["method"] == method and method != PLAIN]
        if own:
            axes.plot([r["batch"] for r in own], [r["verify_length"] for r in own], label=method, **style)
    axes.set_xscale("log", base=2)
    batches = sorted({r["batch"] for r in results})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("rows decoded together")
    axes.set_ylabel("drafts verified, a row and round")
    axes.set_title("Verification budget")
    axes.legend(fontsize=8)
    return figure


def _figure(results: Sequence[dict[str, Any]]) -> tuple[Any, Any, dict[str, dict[str, Any]]]:
    from .figures import COLORS, LINES, MARKERS, WIDTH, _new_figure

    figure = _new_figure(WIDTH, 3.6)
    axes = figure.subplots()
    axes.grid(color="#dddddd", linewidth=0.6)
    methods = dict.fromkeys(r["method"] for r in results)
    styles = {
        method: {"color": COLORS[i], "marker": MARKERS[i], "linestyle": LINES[i % len(LINES)], "markersize": 4}
        for i, method in enumerate(methods)
    }
    return figure, axes, styles


# ---------------------------------------------------------------------- command


def curve_for(
    path: Path, target: PreTrainedModel, drafter: Drafter, batches: Sequence[int], context_length: int
) -> ThroughputCurve:
    """The curve of an earlier run in the same folder, or a new one that reaches to the largest batch's whole blocks."""
    if path.exists():
        return ThroughputCurve.load(path, target)
    most = max(batches) * (drafter.config.num_draft_tokens + 1)
    counts = [n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512) if n <= most]
    bar = _progress("costs")
    curve = measure_costs(
        target, drafter, counts, batches, context_length=context_length, num_repeats=11, on_progress=bar
    )
    curve.save(path)
    return curve


def _progress(what: str) -> Callable[[int, int], None]:
    started = time.perf_counter()

    def show(done: int, total: int) -> None:
        left = (time.perf_counter() - started) / max(done, 1) * (total - done)
        end = "\r" if sys.stderr.isatty() and done < total else "\n"
        if end == "\r" or done == total or done % max(total // 10, 1) == 0:
            print(f"{what}: {done}/{total}, {left:.0f} s left   ", end=end, file=sys.stderr, flush=True)

    return show


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or Hub name")
    parser.add_argument("--drafter", required=True, help="folder or Hub name")
    parser.add_argument("--prompts", required=True, help="a task of `dspark-hf bench`, or a JSONL file of prompts")
    parser.add_argument("--output", type=Path, default=Path("serving"))
    parser.add_argument("--batches", default="1,2,4,8,16,32", help="rows decoded together, comma-separated")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threshold", type=float, default=0.5)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    args = parser.parse_args(arguments)
    batches = sorted({int(part) for part in args.batches.split(",")})
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).to(args.device).eval()
    drafter = Drafter.from_pretrained(args.drafter, dtype=target.dtype).to(args.device).eval()
    prompt_ids = _prompts(args.prompts, AutoTokenizer.from_pretrained(args.target), max(batches))
    args.output.mkdir(parents=True, exist_ok=True)
    context_length = sum(ids.shape[1] for ids in prompt_ids) // len(prompt_ids) + args.max_new_tokens // 2
    curve = curve_for(args.output / THROUGHPUT_CURVE_NAME, target, drafter, batches, context_length)
    methods = serving_methods(drafter, curve, args.threshold)
    settings = {
        "target": args.target,
        "drafter": args.drafter,
        "prompts": args.prompts,
        "num_new_tokens": args.max_new_tokens,
        "num_repeats": args.repeats,
        "temperature": args.temperature,
        "threshold": args.threshold,
        "dtype": args.dtype,
        "device": args.device,
    }
    bar = _progress("loads")
    file = LoadFile(args.output / "loads.jsonl", settings)
    try:
        run_serving(
            target,
            prompt_ids,
            methods,
            batches,
            file,
            num_new_tokens=args.max_new_tokens,
            num_repeats=args.repeats,
            temperature=args.temperature,
            on_load=lambda load, done, total: bar(done, total),
        )
    finally:
        file.close()
    results = results_of([load for load in file.loads.values() if load.batch in batches])
    document = {
        "settings": settings,
        "environment": environment(),
        "curve": curve.to_dict(),
        "results": results,
        "margins": margins_of(results),
    }
    write(document, args.output)


def write(document: dict[str, Any], output: Path) -> None:
    """Writes the document, the table and the figures, and prints the table."""
    from .figures import as_png

    (output / "serving.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    markdown = markdown_of(document)
    (output / "serving.md").write_text(markdown, encoding="utf-8")
    print(markdown)
    try:
        figures = {"throughput": throughput_figure(document["results"]), "budget": budget_figure(document["results"])}
    except ImportError as error:
        print(f"{error} There are no figures.", file=sys.stderr)
        return
    for name, figure in figures.items():
        (output / f"{name}.png").write_bytes(as_png(figure))


def _prompts(name: str, tokenizer: PreTrainedTokenizerBase, num_prompts: int) -> list[torch.Tensor]:
    task = load_task(name, num_prompts, 0)
    return [Conversation(tokenizer, prompt.system).ask(prompt.turns[0]) for prompt in task.prompts]


if __name__ == "__main__":
    main()
