"""What a round costs where arithmetic costs nothing: a deep target so narrow that Python and launches are all that takes time.

So it is on an accelerator, where transformers in eager mode waits for launches. The pair is built here: the target's next token
depends on the last one alone, and the drafter knows it with a given probability, so that rounds accept as many drafts as those
of a trained drafter. The script counts the operations and takes the times, interleaved, of plain `generate`, dspark-hf,
transformers' DFlash generator, and the loop of the PyPI package `dflash` where that is installed (in an environment of its own,
as it requires other versions: `pip install --no-deps dflash`). It ends with one JSON line.

Counts are the same on every machine. Times say something only if the machine is idle; whether it was is printed and recorded.

    python benchmarks/launch_bound.py --calls 15 --output docs/results/launch_bound.json
    python docs/figures.py
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import time
import warnings
from pathlib import Path

import numpy as np
import torch
from overhead import Loop, dflash_package_loop, generate, transformers_loop
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.evaluation.environment import environment
from dspark_hf.evaluation.operation_counts import count_operations
from dspark_hf.evaluation.statistics import ratio_of_sums

OURS = "dspark-hf"
MODES = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
    "top-p": {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95},
}


@torch.no_grad()
def models(
    num_layers: int = 36, hidden: int = 64, vocab: int = 1024, block_size: int = 7, agreement: float = 0.7
) -> tuple[Qwen3ForCausalLM, DSparkDrafter]:
    """A target whose next token depends on the last one alone, and a drafter that knows it with probability `agreement`."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    target = Qwen3ForCausalLM(config).eval()
    target.model.embed_tokens.weight.normal_()
    target.lm_head.weight.normal_()
    for layer in target.model.layers:  # The residual stream stays the embedding of the last token.
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    rank = 4 * hidden
    fields = {"block_size": block_size, "num_hidden_layers": 5, "markov_rank": rank, "mask_token_id": vocab - 1}
    drafter = DSparkDrafter(DSparkConfig.for_target(config, enable_confidence_head=True, **fields)).eval()
    drafter.norm.weight.zero_()  # The base logits are 0, so that the transition bias decides.
    normed = nn.functional.rms_norm(target.model.embed_tokens.weight, (hidden,))
    is_known = torch.rand(vocab) < agreement
    drafter.markov_head.markov_w1.weight.zero_()
    drafter.markov_head.markov_w1.weight[:, :hidden] = torch.where(is_known[:, None], normed, normed.roll(1, 0))
    drafter.markov_head.markov_w2.weight.zero_()
    drafter.markov_head.markov_w2.weight[:, :hidden] = target.lm_head.weight
    drafter.bind(target)
    return target, drafter


def loops_of(target: Qwen3ForCausalLM, drafter: DSparkDrafter, settings: dict) -> dict[str, Loop]:
    """The loops that run here, by name."""
    whole_blocks = {"assistant_model": drafter, "drafting_backoff": False, "assistant_confidence_threshold": 0.0}
    loops = {
        "plain": lambda ids: generate(target, ids, settings),
        OURS: lambda ids: generate(target, ids, settings, **whole_blocks),
        "transformers DFlash": transformers_loop(target, drafter, settings),
    }
    try:
        loops["dflash (PyPI)"] = dflash_package_loop(target, drafter, settings, None)
    except ImportError:
        print("The package dflash is not installed, so its loop is left out.")
    return loops


class RoundClock:
    """The time from the end of the prompt's pass to the end of the call, and the passes in it."""

    def __init__(self, target: nn.Module):
        self.target = target
        # On one thread of a CPU, the thread's own time is that of a machine without other work.
        self.now = time.perf_counter if torch.cuda.is_available() else time.thread_time

    def __call__(self, loop: Loop, ids: torch.Tensor) -> tuple[float, int, torch.Tensor]:
        """Milliseconds of all rounds, their number, and the output."""
        times, forward = [], self.target.forward

        def timed(*args, **kwargs):
            output = forward(*args, **kwargs)
            times.append(self.now())
            return output

        timed.__wrapped__ = forward  # `generate` reads the signature. A hook would switch inference mode off.
        self.target.forward = timed
        try:
            with torch.no_grad():
                output = loop(ids)
            end = self.now()
        finally:
            del self.target.forward
        return 1e3 * (end - times[0]), len(times) - 1, output


def measure(target, drafter, settings: dict, ids: torch.Tensor, num_calls: int) -> dict:
    """Counts and times of every loop in one mode."""
    loops, clock = loops_of(target, drafter, settings), RoundClock(target)
    for loop in loops.values():  # What is made in the first call is not timed.
        loop(ids)
    results: dict[str, dict] = {}
    for name, loop in loops.items():
        torch.manual_seed(0)
        with torch.no_grad(), count_operations(target, drafter) as counts:
            output = getattr(loop, "outside_inference_mode", loop)(ids)
        results[name] = {"counts": counts.per_round(), "output": output}

    totals: dict[str, list[float]] = {name: [] for name in loops}
    rounds: dict[str, list[int]] = {name: [] for name in loops}
    for repeat in range(num_calls):
        names = list(loops)[repeat % len(loops) :] + list(loops)[: repeat % len(loops)]
        for name in names:
            torch.manual_seed(repeat)
            milliseconds, num_rounds, _ = clock(loops[name], ids)
            totals[name].append(milliseconds)
            rounds[name].append(num_rounds)

    plain = results["plain"]["output"]
    for name, result in results.items():
        per_round = [np.divide(totals[n], rounds[n]) for n in (OURS, name)]
        result |= {
            "ms_per_round": sum(totals[name]) / sum(rounds[name]),
            "tokens_per_round": num_calls * (settings["max_new_tokens"] - 1) / sum(rounds[name]),
            "ours_over_this": vars(ratio_of_sums(*per_round)),
            "same_as_plain": bool(torch.equal(result.pop("output")[:, : plain.shape[1]], plain)),
        }
    return results


def other_work_is_running(own: int = 0) -> bool:
    """Whether more than half of the processors are busy with something else than `own` processes of this script."""
    return os.getloadavg()[0] - own > (os.cpu_count() or 1) / 2


def dflash_version() -> str | None:
    try:
        return importlib.metadata.version("dflash")
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each call")
    parser.add_argument("--calls", type=int, default=9, help="calls of each loop that are timed")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--output", type=Path, help="a JSON file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # The package `dflash` uses an older name of an argument.
    is_busy = other_work_is_running()
    target, drafter = models(arguments.layers, arguments.hidden, arguments.vocab)
    ids = torch.randint(0, arguments.vocab - 1, (1, 32), generator=torch.Generator().manual_seed(1))

    modes = {}
    for mode in arguments.modes:
        settings = {"max_new_tokens": arguments.tokens} | MODES[mode]
        modes[mode] = measure(target, drafter, settings, ids, arguments.calls)
        for name, result in modes[mode].items():
            counts, ratio = result["counts"], result["ours_over_this"]
            print(
                f"{mode:9} {name:20} {result['ms_per_round']:7.2f} ms per round, ours over this {ratio['value']:.3f} "
                f"({ratio['low']:.3f} to {ratio['high']:.3f}); beside the target {counts['kernels']:.0f} kernels, "
                f"{counts['operations']:.0f} operations, {counts['reads']:.2f} reads"
            )
    is_busy |= other_work_is_running(own=1)
    if is_busy:
        print("Other work was running, so the times say little. The counts are valid.")
    settings = {name: value for name, value in vars(arguments).items() if name != "output"}
    document = {
        "benchmark": "launch_bound",
        "settings": settings | {"finished": time.strftime("%Y-%m-%d")},
        "other_work_was_running": is_busy,
        "dflash": dflash_version(),
        "environment": environment(),
        "modes": modes,
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
