"""Writes the figures of the committed results into the documents, so that they agree everywhere.

    python docs/figures.py

The files in `docs/results` are `bench.json` (of `dspark-hf bench`), `serving.json` (of `dspark-hf serve-bench`) and those of the
scripts in `benchmarks`. Each passage between `<!-- figures: NAME -->` and `<!-- end of figures -->` is replaced by what the
function NAME below returns.
"""

import json
import re
from pathlib import Path

from dspark_hf.evaluation.serving_report import COLUMNS, table_of

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "docs/results.md", "docs/serving.md", "docs/recurrent_state.md")
PASSAGE = re.compile(r"(<!-- figures: (\w+) -->\n)(.*?)(<!-- end of figures -->)", re.DOTALL)
TASKS = {"gsm8k": "GSM8K", "humaneval": "HumanEval", "mt-bench": "MT-Bench"}


def bench():
    return json.loads((ROOT / "docs" / "results" / "bench.json").read_text())


def serving():
    return json.loads((ROOT / "docs" / "results" / "serving.json").read_text())


def hybrids():
    return json.loads((ROOT / "docs" / "results" / "hybrid_targets.json").read_text())


def launch_bound():
    return json.loads((ROOT / "docs" / "results" / "launch_bound.json").read_text())


def estimate(task, method, name):
    """A figure of `dspark-hf bench` with the ends of its 95 % interval."""
    result = next(r for r in bench()["results"] if (r["group"], r["method"]) == (task, method))
    return result["estimates"][name]


def plain(value):
    return f"{value['value']:.2f}"


def interval(value):
    return f"{value['value']:.2f} ({value['low']:.2f} to {value['high']:.2f})"


def cost_of_a_block(num_tokens=8):
    """A target pass over a whole block and its anchor, in passes over one token."""
    curve = serving()["curve"]
    seconds = dict(zip(curve["token_counts"], curve["pass_s"], strict=True))
    return seconds[num_tokens] / seconds[1]


def markdown_table(header, rows, alignment=""):
    """`alignment` has `l` or `r` for each column; left where it is too short."""
    marks = ["---:" if mark == "r" else "---" for mark in alignment.ljust(len(header), "l")]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (header, marks, *rows))


# ---------------------------------------------------------------------- the passages


def hybrid_targets():
    settings = hybrids()["settings"]
    rows = [
        [
            result["family"],
            str(result["rows"]),
            f"{result['tokens_per_row_and_pass']:.2f}",
            f"{result['tokens_per_pass']:.1f}",
            f"{result['fed_per_token']:.2f}",
            interval(result["speedup"]),
        ]
        for result in hybrids()["results"]
    ]
    header = [
        "target",
        "rows",
        "tokens per round of a row",
        "tokens per target pass",
        "tokens fed per token",
        "times the speed of plain `generate`",
    ]
    return (
        f"{markdown_table(header, rows, 'lrrrrr')}\n"
        f"Small random targets, greedy, {settings['num_tokens']} new tokens, at most 4 drafts per round, wrong at a third of the "
        f"positions; {settings['threads']} thread; median and range of {settings['repeats']} interleaved runs{settings['note']}. "
        "(`benchmarks/hybrid_targets.py`)\n"
    )


def quickstart_speed():
    threshold, fixed = "dspark threshold:0.45", "dspark fixed"
    settings = bench()["settings"]
    rows = [
        [
            TASKS.get(task, f"all {sum(settings['tasks'].values())} prompts"),
            plain(estimate(task, threshold, "acceptance_length")),
            interval(estimate(task, threshold, "speedup")),
            interval(estimate(task, fixed, "speedup")),
        ]
        for task in (*settings["tasks"], "all")
    ]
    header = [
        "prompts",
        "tokens per target pass",
        "times the speed of plain `generate`",
        "when every draft is verified",
    ]
    return (
        f"{markdown_table(header, rows, 'lrrr')}\n"
        f"One thread of an Intel Xeon, float32, greedy, {settings['max_new_tokens']} new tokens, 95 % intervals over prompts. "
        f"Drafts are verified while their confidence is at least 0.45; in the last column, all are. A pass over 8 tokens costs "
        f"{cost_of_a_block():.1f} times a pass over one on this CPU.\n"
    )


def bench_table():
    document, rows = bench(), []
    for result in document["results"]:
        estimates = result["estimates"]
        is_plain = result["method"] == "plain"
        rate = estimates["acceptance_rate"]["value"]
        rows.append(
            [
                TASKS.get(result["group"], result["group"]),
                result["method"],
                "1.00" if is_plain else interval(estimates["acceptance_length"]),
                "" if is_plain else f"{rate:.0%}",
                f"{estimates['tokens_per_second']['value']:.1f}",
                "1.00" if is_plain else interval(estimates["speedup"]),
            ]
        )
    header = ["prompts", "method", "tokens per target pass", "accepted of verified", "tokens/s", "times plain"]
    return markdown_table(header, rows, "llrrrr")


def round_table():
    parts = bench()["profile"]["dspark fixed"]["parts"]
    rows = [[part, f"{cost['ms']:.2f}", f"{cost['share']:.1%}"] for part, cost in parts.items() if cost["ms"]]
    models = ("target pass", "backbone", "draft LM head")
    rest = sum(cost["share"] for part, cost in parts.items() if part not in models and part != "context features")
    rows.append(["**outside the models**", "", f"**{rest:.1%}**"])
    return markdown_table(["part of a round", "ms", "share"], rows, "lrr")


def serving_table():
    return markdown_table(list(COLUMNS), list(table_of(serving()["results"])), "llrrrrrrr")


def launch_table():
    rows = [
        [
            mode,
            loop,
            f"{result['counts']['kernels']:.0f}",
            f"{result['counts']['operations']:.0f}",
            f"{result['counts']['reads']:.1f}",
            f"{result['tokens_per_round']:.2f}",
            f"{result['ms_per_round']:.1f}",
            "1" if loop == "dspark-hf" else interval(result["ours_over_this"]),
        ]
        for mode, loops in launch_bound()["modes"].items()
        for loop, result in loops.items()
    ]
    header = [
        "mode",
        "loop",
        "kernels",
        "operations",
        "reads",
        "tokens per round",
        "ms per round",
        "dspark-hf over this",
    ]
    busy = " **Other work was running**, so the times say little." if launch_bound()["other_work_was_running"] else ""
    return f"{markdown_table(header, rows, 'llrrrrrr')}\nOn {launch_bound()['environment']['cpu']}, one thread.{busy}\n"


def serving_margins():
    margins = ", ".join(f"{margin:+.1%} at {batch}" for batch, margin in serving()["margins"].items())
    return f"The throughput scheduler against the better of plain decoding and whole blocks, by rows: {margins}.\n"


# ---------------------------------------------------------------------- filling them in


def with_figures(text):
    """A document with its generated passages replaced by current ones."""
    return PASSAGE.sub(lambda match: match[1] + f"\n{globals()[match[2]]()}\n" + match[4], text)


def main():
    for name in DOCUMENTS:
        path = ROOT / name
        path.write_text(with_figures(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
