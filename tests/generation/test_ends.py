"""Where the output ends: end-of-sequence tokens, limits, stop strings, criteria. Exactly where plain `generate` ends it."""

import copy
import functools

import pytest
import torch
from generation import rig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, StoppingCriteria, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

import tiny

PROMPT = 9


@functools.cache
def reference() -> list[int]:
    """What plain `generate` says after the usual prompt."""
    return rig.ids_of(rig.target().generate(**tiny.prompt(), max_new_tokens=24, do_sample=False))


def cut_after_first(token_id: int) -> list[int]:
    return reference()[: reference().index(token_id, PROMPT) + 1]


# ---------------------------------------------------------------------- end-of-sequence tokens


@pytest.mark.parametrize("as_list", [False, True], ids=["one token", "a list"])
@pytest.mark.parametrize("slot", range(rig.BLOCK_SIZE + 2), ids=lambda n: f"after {n} tokens")
def test_end_of_sequence_at_every_slot(slot, as_list):
    eos = reference()[PROMPT + slot]
    outcome = rig.compare(rig.target(), eos_token_id=[eos, 0] if as_list else eos, pad_token_id=0, max_new_tokens=24)
    assert rig.ids_of(outcome.plain) == cut_after_first(eos)


def test_the_end_of_sequence_token_of_a_generation_config():
    config = GenerationConfig(eos_token_id=reference()[PROMPT + 3], max_new_tokens=24)
    outcome = rig.compare(rig.target(), generation_config=config, max_new_tokens=None, do_sample=None)
    assert rig.ids_of(outcome.plain) == cut_after_first(reference()[PROMPT + 3])


def test_the_end_is_not_found_in_the_prompt():
    eos = reference()[2]
    outcome = rig.compare(rig.target(), eos_token_id=eos, pad_token_id=0)
    assert len(rig.ids_of(outcome.plain)) > PROMPT


# ---------------------------------------------------------------------- limits


@pytest.mark.parametrize("limit", range(1, rig.BLOCK_SIZE + 3), ids=lambda n: f"{n} new tokens")
def test_limits_around_a_block(limit):
    outcome = rig.compare(rig.target(), max_new_tokens=limit)
    assert len(rig.ids_of(outcome.plain)) == PROMPT + limit


@pytest.mark.parametrize("extra", [1, 2, 7], ids=lambda n: f"{n} more than the prompt")
def test_max_length(extra):
    outcome = rig.compare(rig.target(), max_new_tokens=None, max_length=PROMPT + extra)
    assert len(rig.ids_of(outcome.plain)) == PROMPT + extra


def test_no_limit_given_means_the_usual_twenty_tokens():
    outcome = rig.compare(rig.target(), max_new_tokens=None)
    assert len(rig.ids_of(outcome.plain)) == PROMPT + 20


@pytest.mark.parametrize("limit", [5, PROMPT + 1, PROMPT + 6, PROMPT + 30], ids=lambda n: f"length of {n}")
def test_a_length_criterion_of_the_user_replaces_the_limit(limit):
    outcome = rig.compare(rig.target(), stopping_criteria=[MaxLengthCriteria(max_length=limit)])
    assert len(rig.ids_of(outcome.plain)) == max(limit, PROMPT + 1)


# ---------------------------------------------------------------------- criteria


class AtLength(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full(input_ids.shape[:1], input_ids.shape[1] >= self.length)


class LastTokenIs(StoppingCriteria):
    def __init__(self, token_id):
        self.token_id = token_id

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token_id


class Recorder(StoppingCriteria):
    """Never ends anything; notes what it is asked."""

    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else len(scores)))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("length", range(10, 18), ids=lambda n: f"at {n} tokens")
def test_a_criterion_ends_the_output_at_the_very_token(length):
    outcome = rig.compare(rig.target(), stopping_criteria=[AtLength(length)])
    assert len(rig.ids_of(outcome.plain)) == length


@pytest.mark.parametrize("slot", [0, 3, 5, 11], ids=lambda n: f"after {n} tokens")
def test_a_criterion_on_the_last_token(slot):
    token_id = reference()[PROMPT + slot]
    outcome = rig.compare(rig.target(), stopping_criteria=StoppingCriteriaList([LastTokenIs(token_id)]))
    assert rig.ids_of(outcome.plain) == cut_after_first(token_id)


@pytest.mark.parametrize("scores", [False, True], ids=["without scores", "with scores"])
def test_criteria_are_asked_once_a_token_in_order(scores):
    asked = []

    def fresh():
        asked.append([])
        return {"stopping_criteria": [Recorder(asked[-1])]}

    rig.compare(rig.target(), None, fresh, return_dict_in_generate=scores, output_scores=scores)
    assert len(asked) == 1 + len(rig.KINDS) and len(asked[0]) == rig.NEW_TOKENS
    assert all(calls == asked[0] for calls in asked)


def test_an_end_of_sequence_criterion_of_the_user():
    eos = reference()[PROMPT + 4]
    outcome = rig.compare(rig.target(), stopping_criteria=[EosTokenCriteria(eos)], pad_token_id=0)
    assert rig.ids_of(outcome.plain) == cut_after_first(eos)


def test_a_time_limit_of_zero_gives_one_token():
    outcome = rig.compare(rig.target(), max_time=0.0)
    assert len(rig.ids_of(outcome.plain)) == PROMPT + 1


def test_a_time_limit_that_is_not_reached():
    outcome = rig.compare(rig.target(), max_time=3600.0)
    assert len(rig.ids_of(outcome.plain)) == PROMPT + rig.NEW_TOKENS


# ---------------------------------------------------------------------- stop strings


@pytest.fixture(scope="module")
def tokenizer():
    """A character a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: tiny.VOCAB_SIZE]
    model = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token=alphabet[0])


def some_text(tokenizer, start: int, length: int) -> str:
    """What the tokenizer makes of some tokens of the usual output; the tokens there are plain characters."""
    text = tokenizer.convert_tokens_to_string(tokenizer.convert_ids_to_tokens(reference()[start : start + length]))
    assert "\N{REPLACEMENT CHARACTER}" not in text and text
    return text


@functools.cache
def printable_run(length: int) -> int:
    """Where the usual output has `length` tokens in a row that are printable ASCII characters."""
    ids = reference()
    return next(i for i in range(PROMPT + 1, len(ids)) if all(t < 94 for t in ids[i : i + length]))


@pytest.mark.parametrize("length", [1, 2], ids=lambda n: f"string of {n}")
@pytest.mark.parametrize("place", ["in the call", "in a generation_config", "in the target's", "in both"])
def test_stop_strings(tokenizer, place, length):
    start = printable_run(length)
    stop = some_text(tokenizer, start, length)
    target = copy.copy(rig.target())
    target.generation_config = copy.deepcopy(target.generation_config)
    kwargs = {"tokenizer": tokenizer}
    if place == "in the call":
        kwargs["stop_strings"] = stop
    if place in ("in a generation_config", "in both"):
        config = GenerationConfig(stop_strings=[stop], max_new_tokens=rig.NEW_TOKENS)
        kwargs |= {"generation_config": config, "max_new_tokens": None, "do_sample": None}
    if place in ("in the target's", "in both"):
        target.generation_config.stop_strings = ["never said", stop] if place != "in both" else ["never said"]
    outcome = rig.compare(target, **kwargs)
    assert rig.ids_of(outcome.plain)[-length:] == reference()[start : start + length]
    if place == "in a generation_config":
        assert config.stop_strings == [stop]  # The user's object is as it was.


def test_stop_strings_of_the_target_hold_beside_a_generation_config(tokenizer):
    target = copy.copy(rig.target())
    target.generation_config = copy.deepcopy(target.generation_config)
    start = printable_run(1)
    target.generation_config.stop_strings = some_text(tokenizer, start, 1)
    config = GenerationConfig(max_new_tokens=rig.NEW_TOKENS)
    outcome = rig.compare(target, generation_config=config, tokenizer=tokenizer, max_new_tokens=None, do_sample=None)
    assert rig.ids_of(outcome.plain)[-1] == reference()[start]
    assert len(rig.ids_of(outcome.plain)) < PROMPT + rig.NEW_TOKENS


def test_a_stop_string_criterion_of_the_user_has_precedence(tokenizer):
    start = printable_run(1)
    criterion = StopStringCriteria(tokenizer, some_text(tokenizer, start, 1))
    outcome = rig.compare(
        rig.target(),
        stopping_criteria=[criterion],
        stop_strings=some_text(tokenizer, start - 1, 1) if reference()[start - 1] < 94 else "never said",
        tokenizer=tokenizer,
    )
    assert rig.ids_of(outcome.plain)[-1] == reference()[start]


def test_stop_strings_without_a_tokenizer_say_so():
    assert "tokenizer=" in rig.refusing(rig.target(), stop_strings="x")
