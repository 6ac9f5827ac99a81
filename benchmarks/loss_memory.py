"""Peak memory of the training loss, by blocks and vocabulary: in chunks, as training computes it, and all at once.

    python benchmarks/loss_memory.py --output docs/images

Prints a table and one line of JSON, and draws `loss_memory.png`. Every measurement is a process of its own, forked from this
one: its peak resident memory over a forward and a backward pass, minus what it had before. On a GPU, torch's own count.
"""

import argparse
import json
import multiprocessing
import os
import resource
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.embeddings import SharedEmbeddings
from dspark_hf.training.losses import DraftTargets, DSparkObjective, LossWeights, TargetHead

HIDDEN_SIZE, BLOCK_SIZE, CHUNK_SIZE = 64, 7, 256


def objective(num_anchors: int, vocab_size: int, chunk_size: int, device: str):
    """A drafter, the hidden states of its blocks `[1, A * G, D]`, and the loss over them."""
    config = DSparkConfig(
        hidden_size=HIDDEN_SIZE, intermediate_size=HIDDEN_SIZE, num_hidden_layers=1, num_attention_heads=4, markov_rank=16,
        vocab_size=vocab_size, target_layer_ids=[0], block_size=BLOCK_SIZE, mask_token_id=0,
    )  # fmt: skip
    drafter = DSparkDrafter(config).to(device)
    lm_head = nn.Linear(HIDDEN_SIZE, vocab_size, bias=False, device=device).requires_grad_(False)
    embeddings = SharedEmbeddings(nn.Embedding(vocab_size, HIDDEN_SIZE, device=device), lm_head)
    shape = (1, num_anchors, BLOCK_SIZE)
    ids = torch.randint(vocab_size, shape, device=device)
    states = torch.randn(*shape, HIDDEN_SIZE, device=device)
    targets = DraftTargets(ids, states, torch.ones(shape, device=device))
    loss = DSparkObjective(TargetHead(embeddings), embeddings, targets, ids, LossWeights(), chunk_size=chunk_size)
    hidden = torch.randn(1, num_anchors * BLOCK_SIZE, HIDDEN_SIZE, device=device, requires_grad=True)
    return drafter, hidden, loss


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(num_anchors: int, vocab_size: int, chunk_size: int, device: str, results) -> None:
    """Puts the bytes that one forward and backward pass needs at its peak into the queue."""
    drafter, hidden, loss = objective(num_anchors, vocab_size, chunk_size, device)
    if device == "cpu":
        before = resident_bytes()
        loss(drafter, hidden)[0].backward()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss(drafter, hidden)[0].backward()
        peak = torch.cuda.max_memory_allocated()
    results.put(peak - before)


def in_its_own_process(*arguments) -> int:
    context = multiprocessing.get_context("fork" if arguments[-1] == "cpu" else "spawn")
    results = context.Queue()
    process = context.Process(target=measure, args=(*arguments, results))
    process.start()
    found = results.get(timeout=300)
    process.join()
    return found


def draw(rows: list[dict], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for vocab_size in sorted({row["vocabulary"] for row in rows}):
        some = [row for row in rows if row["vocabulary"] == vocab_size]
        for name, style in (("whole", "o--"), ("chunks", "o-")):
            label = f"{vocab_size:,} tokens, " + (
                "all at once" if name == "whole" else f"{CHUNK_SIZE} drafts at a time"
            )
            axes.plot([row["blocks"] for row in some], [row[f"{name}_mb"] for row in some], style, label=label)
    axes.set(xlabel="blocks", ylabel="MB at the peak", title="memory of the loss, forward and backward", xscale="log")
    axes.set_ylim(0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def give_back_at_once() -> None:
    """Starts anew with a C allocator that returns freed tensors to the system, or the peak would count what it hoards."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**16)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, nargs="+", default=[32, 64, 128, 256])
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[8_000, 16_000])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path(tempfile.gettempdir()), help="folder for the picture")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print(f"{'blocks':>7} {'vocabulary':>11} {'in chunks':>11} {'all at once':>12}   (MB)")
    for vocab_size in options.vocabulary:
        for num_anchors in options.blocks:
            chunks, whole = (
                in_its_own_process(num_anchors, vocab_size, size, options.device) / 1e6 for size in (CHUNK_SIZE, 0)
            )
            rows.append({"blocks": num_anchors, "vocabulary": vocab_size, "chunks_mb": chunks, "whole_mb": whole})
            print(f"{num_anchors:>7} {vocab_size:>11,} {chunks:>11.0f} {whole:>12.0f}", flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    draw(rows, options.output / "loss_memory.png")
    print(json.dumps(rows))


if __name__ == "__main__":
    give_back_at_once()
    main()
