"""Describes a drafter's results in words: for its card and for the last line of a training run."""

from __future__ import annotations

from typing import Any

# With fewer tokens per target pass than this, drafting is not expected to save time.
HARDLY_ANY_GAIN = 1.15

# Descriptions of the trainer's metrics.
RESULTS = {
    "acceptance_length": "Tokens per target pass, sampled drafts",
    "greedy_acceptance_length": "Tokens per target pass, greedy drafts",
    "loss": "Loss",
    "ce_loss": "Loss: cross-entropy with the responses",
    "tv_loss": "Loss: L1 distance to the target's distribution",
    "confidence_loss": "Loss: cross-entropy of the confidence",
    "confidence_error": "Mean absolute error of the confidence",
    "confidence_bias": "Mean signed error of the confidence",
    "confidence_ece": "Expected calibration error of the confidence",
    "epoch": "Epochs",
    "steps": "Optimiser steps",
    "best_checkpoint": "Best checkpoint",
    "hours": "Hours of training",
}
# Metrics about the run time of the evaluation, which say nothing about the drafter.
_LEFT_OUT = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
_BY_POSITION = "acceptance_"


def results_in_words(results: dict[str, Any]) -> dict[str, Any]:
    """The results of a training run with descriptive names; those of draft 1, 2, ... become one entry."""
    by_position = {
        int(name.removeprefix(_BY_POSITION)): value
        for name, value in results.items()
        if name.removeprefix(_BY_POSITION).isdigit()
    }
    known = {words: results[name] for name, words in RESULTS.items() if name in results}
    if by_position:
        known["Acceptance of drafts 1, 2, ..., given that those before were accepted"] = ", ".join(
            f"{by_position[position]:.2f}" for position in sorted(by_position)
        )
    others = {
        name: value
        for name, value in results.items()
        if name not in RESULTS and name not in _LEFT_OUT and not name.removeprefix(_BY_POSITION).isdigit()
    }
    return known | others


def gain_in_words(tokens_per_pass: float) -> str:
    """A sentence about the expected gain, from the tokens per target pass on held-out conversations."""
    text = f"On the held-out conversations a target pass gives {tokens_per_pass:.2f} tokens; plain decoding gives 1.00."
    if tokens_per_pass < HARDLY_ANY_GAIN:
        return f"{text} This drafter is not expected to save time: it needs more training or more data."
    return text


def speed_in_words(results: list[dict[str, Any]]) -> str | None:
    """
    A sentence about the speed of decoding with the drafter, from the results of `dspark-hf bench`.

    Args:
        results: One entry per group of prompts and method; the last group contains all prompts.

    Returns:
        The sentence, about the fastest setting of the drafter; `None` if it was not compared with plain `generate`.
    """
    last = results[-1]["group"] if results else None
    ours = [
        result
        for result in results
        if result["group"] == last and result.get("num_rounds") and result["estimates"]["speedup"]["value"] is not None
    ]
    if not ours:
        return None
    best = max(ours, key=lambda result: result["estimates"]["speedup"]["value"])
    speedup = best["estimates"]["speedup"]
    interval = f" (95 % interval {speedup['low']:.2f} to {speedup['high']:.2f})" if speedup["low"] is not None else ""
    measured = f"{best['method']}: {speedup['value']:.2f} times the speed of plain `generate`{interval}"
    if (speedup["low"] if speedup["low"] is not None else speedup["value"]) > 1:
        return f"The drafter saves time on this machine. {measured}."
    if (speedup["high"] if speedup["high"] is not None else speedup["value"]) > 1:
        return f"A gain in speed could not be shown on this machine. {measured}."
    return f"The drafter does not save time on this machine. {measured}."
