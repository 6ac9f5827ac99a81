"""What happens when a target of each family decodes with a drafter, compared with plain `generate` of the same model."""

from __future__ import annotations

import copy
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import family_images
import target_families
import torch
from generation import rig
from transformers import PreTrainedModel
from transformers.utils import logging

import dspark_hf
import tiny
from dspark_hf import record_speculation

NEW_TOKENS = 24
EQUAL, WRONG, REFUSED, CRASHED, NO_PLAIN = "equal", "wrong", "refused", "crashed", "plain generate fails"
UNTESTED = "untested"
SETTINGS = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "drafting_backoff": False}
LENGTHS = (9, 14, 5)  # Of the three rows, so that windows of 8 tokens are full in some of them only.


def outcomes(mapping: str, family: str) -> dict[str, str]:
    """
    By column, `equal`, or one of the other words with a message behind it.

    Args:
        mapping: Of transformers, `causal` or `image-text`.
        family: Its type of configuration.
    """
    try:
        target = target_families.build(mapping, family)
    except Exception as error:
        return {"model": f"{UNTESTED}: no tiny model, {_line(error)}"}
    inputs, rows = tiny.prompt(LENGTHS[0]), tiny.left_padded(*(tiny.prompt(n, seed=n) for n in LENGTHS))
    columns: dict[str, Callable[[], str]] = {
        "one row": lambda: decoded(target, inputs),
        "several rows": lambda: decoded(target, rows),
        "static cache": lambda: decoded(target, inputs, cache_implementation="static"),
        "second turn": lambda: second_turn(target, inputs),
    }
    if mapping == "image-text":
        columns["image"] = lambda: with_images(target)
        columns["rows with images"] = lambda: with_images(target, 2)
    found: dict[str, str] = {}
    for name, column in columns.items():
        if state(found.get("one row", EQUAL)) == NO_PLAIN and "image" not in name:
            continue  # As with one row.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[name] = column()
    return found


def decoded(target: PreTrainedModel, inputs: dict[str, torch.Tensor], **settings: Any) -> str:
    """Greedy decoding with a drafter that is nearly always wrong, and with one that is often right."""
    settings = SETTINGS | settings
    try:
        plain = target.generate(**copy.deepcopy(inputs), **_for_plain(settings))
    except Exception as error:
        return f"{NO_PLAIN}: {_line(error)}"
    if not isinstance(plain, torch.Tensor):
        return f"{NO_PLAIN}: it returns no tokens but a {type(plain).__name__}"
    return _compared(
        target,
        inputs,
        plain,
        lambda drafter: target.generate(**copy.deepcopy(inputs), **settings, assistant_model=drafter),
    )


def with_images(target: PreTrainedModel, num_rows: int = 1) -> str:
    """Prompts with an image each, which differ in text and pixels."""
    inputs = family_images.prompt_with_image(target)
    if inputs is None:
        return UNTESTED
    rows = [inputs, *(family_images.another(inputs, seed) for seed in range(1, num_rows))]
    return decoded(target, {name: torch.cat([row[name] for row in rows]) for name in inputs})


def second_turn(target: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> str:
    """A turn that continues from the cache of the turn before, both with a drafter."""

    def turns(**call: Any) -> Any:
        settings = call | {"return_dict_in_generate": True, "max_new_tokens": 10}
        first = target.generate(**inputs, **settings)
        ids = torch.cat([first.sequences, tiny.prompt(4, seed=7)["input_ids"]], dim=1)
        return target.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=first.past_key_values, **settings
        ).sequences

    try:
        plain = turns(**_for_plain(SETTINGS))
    except Exception as error:
        return f"{NO_PLAIN}: {_line(error)}"
    return _compared(target, inputs, plain, lambda drafter: turns(**SETTINGS, assistant_model=drafter))


def _compared(target: PreTrainedModel, inputs: Any, plain: torch.Tensor, draft: Callable[[Any], torch.Tensor]) -> str:
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    scripts = [row[len(kept) - int(kept.sum()) :].tolist() for row, kept in zip(plain, mask)]
    accepted = []
    for kind in ("rejecting", "patterned"):
        try:
            drafter = rig.drafters_of_rows(target, scripts)[kind]
            with record_speculation() as stats:
                found = draft(drafter)
        except Exception as error:
            if is_refusal(error):
                return f"{REFUSED}: {reason(error)}"
            return f"{CRASHED}: {_line(error)}"
        if not torch.equal(found, plain):
            first = (found != plain).any(0).nonzero() if found.shape == plain.shape else None
            return f"{WRONG}: with a drafter that is {kind}, from token {'?' if first is None else int(first[0])}"
        accepted.append(stats.acceptance_rate)
    # Rejected and accepted drafts are taken by different paths, so each has to have been seen.
    return (
        EQUAL if accepted[0] < 0.9 and accepted[1] > 0.1 else f"{UNTESTED}: drafts were accepted at rates of {accepted}"
    )


def is_refusal(error: Exception) -> bool:
    """Whether an error is a `ValueError` that this library raises itself."""
    frames = traceback.extract_tb(error.__traceback__)
    return isinstance(error, ValueError) and Path(frames[-1].filename).is_relative_to(Path(dspark_hf.__file__).parent)


def reason(error: Exception) -> str:
    """What a refusal says of the target, without the sentences that all refusals have."""
    text = str(error).removeprefix("DSpark cannot draft for this call: ")
    return text.removesuffix(" Generate without assistant_model=.").removesuffix(" Generate for each row alone.")


def state(outcome: str) -> str:
    """The first word or words of an outcome."""
    return outcome.split(":")[0]


def _for_plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name != "drafting_backoff"}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


logging.set_verbosity_error()
