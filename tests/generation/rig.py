"""
What the tests of generation share: plain `generate` as the reference for everything, and drafters with any pattern of
accepted drafts. Most mistakes show with one kind of drafter only, so each case runs with all of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

import tiny
from dspark_hf import Drafter, DSparkDrafter, Eagle3Drafter, SpeculationStats, record_speculation

NEW_TOKENS = 12
BLOCK_SIZE = tiny.BLOCK_SIZE
KINDS = ("rejecting", "accepting", "patterned")
EAGLE3_KINDS = ("rejecting EAGLE-3", "accepting EAGLE-3", "patterned EAGLE-3")

# Token positions where the patterned drafter is wrong: runs of right drafts of every length.
_rng = random.Random(0)
WRONG = frozenset(position for position in range(2048) if _rng.random() < 0.35)


@functools.cache
def target(family: str = "qwen3", **fields: Any) -> PreTrainedModel:
    """A shared target; tests that change one build their own. The usual one is as small as can be."""
    if family == "qwen3":
        fields = {"num_hidden_layers": 2} | fields
    return tiny.TARGETS[family](**fields)


class ScriptedDrafter(DSparkDrafter):
    """
    A drafter whose block logits are replaced by those of a script, so that any pattern of accepted drafts can be had.

    Args:
        config: Its configuration. The backbone runs as usual, for nothing.
        script: The token to draft at each position.
        wrong: Positions where it drafts another token.
    """

    def __init__(self, config, script: list[int], wrong: Iterable[int] = ()):
        super().__init__(config)
        self.script, self.wrong = list(script), frozenset(wrong)
        self.anchor = 0

    def forward(self, block_ids, position_ids, **kwargs):
        self.anchor = int(position_ids[0, 0])
        return super().forward(block_ids, position_ids, **kwargs)

    def base_logits(self, hidden_states, embeddings):
        first = self.anchor + 1
        token_ids = torch.tensor([self.token_at(first + k) for k in range(hidden_states.shape[1])])
        return 50 * torch.nn.functional.one_hot(token_ids, self.config.vocab_size).float()[None]

    def token_at(self, position: int) -> int:
        token_id = self.script[position] if position < len(self.script) else 1
        return (token_id + 1) % self.config.vocab_size if position in self.wrong else token_id


class ScriptedEagle3Drafter(Eagle3Drafter):
    """The same for a drafter that drafts token by token: its steps run as usual, for nothing."""

    def __init__(self, config, script: list[int], wrong: Iterable[int] = ()):
        super().__init__(config)
        self.script, self.wrong = list(script), frozenset(wrong)

    def step(self, token_ids, states, position_ids, *args):
        # The state of position t and the token after it predict the token at t + 2.
        self.next = int(position_ids[0]) + 2
        return super().step(token_ids, states, position_ids, *args)

    def base_logits(self, hidden_states, embeddings):
        token_id = torch.tensor([ScriptedDrafter.token_at(self, self.next)])  # type: ignore[arg-type]
        return 50 * torch.nn.functional.one_hot(token_id, self.config.vocab_size).float()


def scripted(target: PreTrainedModel, script: list[int], wrong: Iterable[int] = (), **fields: Any) -> ScriptedDrafter:
    own = {"num_hidden_layers": 1, "markov_rank": 0, "enable_confidence_head": False}
    with torch.random.fork_rng(devices=[]):
        return ScriptedDrafter(tiny.drafter_config(target, **(own | fields)), script, wrong).eval()


def drafter_of(kind: str, target: PreTrainedModel, script: list[int], **fields: Any) -> Drafter:
    """A drafter of one of `KINDS` or `EAGLE3_KINDS`; `script` is plain `generate`'s output, a token for each position."""
    if kind in EAGLE3_KINDS:
        template = tiny.eagle3_drafter(target, **fields)
        if kind == "rejecting EAGLE-3":
            return template
        wrong = WRONG if kind == "patterned EAGLE-3" else ()
        return ScriptedEagle3Drafter(template.config, script, wrong).eval()
    if kind == "rejecting":
        return tiny.random_drafter(target, **({"num_hidden_layers": 1} | fields))
    return scripted(target, script, WRONG if kind == "patterned" else (), **fields)


class ScriptedRows(DSparkDrafter):
    """
    Drafts what plain `generate` says, wrong at some positions. A row is known by its anchor: token and position.

    Args:
        scripts: For each row the token at each position.
        wrong: Positions where another token is drafted.
    """

    def __init__(self, config, scripts, wrong):
        super().__init__(config)
        self.scripts, self.wrong = scripts, wrong

    def forward(self, block_ids, position_ids, **kwargs):
        self.anchors = list(zip(block_ids[:, 0].tolist(), position_ids[:, 0].tolist(), strict=True))
        return super().forward(block_ids, position_ids, **kwargs)

    def base_logits(self, hidden_states, embeddings):
        rows = [
            [self.token_at(token, position, position + 1 + k) for k in range(hidden_states.shape[1])]
            for token, position in self.anchors
        ]
        return 50 * torch.nn.functional.one_hot(torch.tensor(rows), self.config.vocab_size).float()

    def token_at(self, anchor, anchor_position, position):
        for script in self.scripts:
            if anchor_position < len(script) and script[anchor_position] == anchor and position < len(script):
                return (script[position] + (position in self.wrong)) % self.config.vocab_size
        return 1


def drafters_of_rows(target: PreTrainedModel, scripts: list[list[int]]) -> dict[str, Drafter]:
    """A drafter of each of `KINDS` for several rows; `scripts` has a token for each position of each row."""
    config = tiny.drafter_config(target, num_hidden_layers=1, markov_rank=0, enable_confidence_head=False)
    return {
        "rejecting": tiny.random_drafter(target, num_hidden_layers=1),
        "accepting": ScriptedRows(config, scripts, frozenset()).eval(),
        "patterned": ScriptedRows(config, scripts, WRONG).eval(),
    }


class Outcome(NamedTuple):
    """What plain `generate` returned, and what each kind of drafter did."""

    plain: Any
    drafted: dict[str, Any]
    stats: dict[str, SpeculationStats]


def compare(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor] | None = None,
    fresh: Callable[[], dict[str, Any]] = dict,
    *,
    num_hidden: int = 0,
    drafter_fields: dict[str, Any] | None = None,
    kinds: Sequence[str] = KINDS,
    **kwargs: Any,
) -> Outcome:
    """
    Greedy output is that of plain `generate`, token for token, with every kind of drafter.

    Args:
        target: The target.
        inputs: Prompt; a random one of nine tokens by default.
        fresh: Makes those arguments of one call that keep a state (processors, caches).
        num_hidden: Tokens of the prompt that the output does not show (given as embeddings, or in the cache only).
        drafter_fields: For the drafter's configuration.
        kinds: Of drafters.
        kwargs: For `generate`; `None` takes one of the usual settings away.
    """
    inputs = tiny.prompt() if inputs is None else inputs
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | kwargs
    settings = {name: value for name, value in settings.items() if value is not None}

    plain = target.generate(**(inputs | settings | fresh()))
    script = [0] * num_hidden + unpadded(inputs, ids_of(plain))
    drafted, stats = {}, {}
    for kind in kinds:
        drafter = drafter_of(kind, target, script, **(drafter_fields or {}))
        call = inputs | settings | fresh() | {"assistant_model": drafter}
        with record_speculation() as stats[kind]:
            drafted[kind] = target.generate(**call)
        assert ids_of(drafted[kind]) == ids_of(plain), f"with a {kind} drafter"
    accepting = [r for kind in kinds if kind.startswith("accepting") for r in stats[kind].rounds]
    assert not any(r.accepted < r.verified for r in accepting), "the rig itself is wrong"
    return Outcome(plain, drafted, stats)


def ids_of(output: Any) -> list[int]:
    """The token ids of the one row that `generate` returned."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    assert sequences.shape[0] == 1
    return sequences[0].tolist()


def unpadded(inputs: dict[str, torch.Tensor], token_ids: list[int]) -> list[int]:
    """`token_ids` without the padding of the prompt, so that each is at its position."""
    mask = inputs.get("attention_mask")
    if mask is None or "input_ids" not in inputs or mask.shape != inputs["input_ids"].shape:
        return token_ids
    kept = mask[0].bool().tolist()
    return [t for i, t in enumerate(token_ids) if i >= len(kept) or kept[i]]


def refusing(target: PreTrainedModel, **kwargs: Any) -> str:
    """The message of the `ValueError` that a call with a drafter raises."""
    inputs = {} if {"input_ids", "inputs_embeds"} & kwargs.keys() else tiny.prompt()
    drafter = kwargs.pop("drafter", None)
    drafter = tiny.random_drafter(target, num_hidden_layers=1) if drafter is None else drafter
    try:
        target.generate(**({"max_new_tokens": 4, "do_sample": False} | inputs | kwargs), assistant_model=drafter)
    except ValueError as error:
        return str(error)
    raise AssertionError("was not refused")
