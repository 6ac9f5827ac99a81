"""Criteria and streamers of several rows: shown the batches that plain `generate` shows them, and ending where it ends."""

import pytest
import torch
from generation import rig
from generation.test_row_processors import LENGTHS, NEW_TOKENS, batch, drafters
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tiny

PROMPT = max(LENGTHS)


def plain_ids(**settings):
    return rig.target().generate(**batch(), max_new_tokens=NEW_TOKENS, do_sample=False, **settings)


class Counting(StoppingCriteria):
    """Keeps what it was asked."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids.tolist(), None if scores is None else [s.clone() for s in scores]))
        return self.ends(input_ids[:, PROMPT:])

    def ends(self, new_ids):
        return torch.zeros(len(new_ids), dtype=torch.bool)


class LengthPerRow(Counting):
    """A limit for each row, by its index."""

    def ends(self, new_ids):
        return torch.tensor([new_ids.shape[1] >= limit for limit in (5, 11, 8)])


class OnlyTheSecondRow(Counting):
    def ends(self, new_ids):
        return torch.tensor([False, new_ids.shape[1] >= 4, False])


class AnyRow(Counting):
    """Ends the whole batch as soon as one row has said a token; returns no tensor."""

    def ends(self, new_ids):
        return bool((new_ids[:, -1] % 16 == 0).any())


class AllRows(Counting):
    """Ends the batch once every row has said a token."""

    def ends(self, new_ids):
        return bool((new_ids % 8 == 0).any(1).all())


class WholeBatchAsTensor(Counting):
    def ends(self, new_ids):
        return torch.full((len(new_ids),), bool((new_ids[:, -1] % 16 == 0).any()))


class ComparesRows(Counting):
    """A row ends when another has just said a larger token, and it is long enough."""

    def ends(self, new_ids):
        return (new_ids[:, -1] < new_ids[:, -1].max()) & (new_ids.shape[1] > 6)


class CountsCalls(Counting):
    """Ends the second row at the sixth call, whatever is said."""

    def ends(self, new_ids):
        return torch.tensor([False, len(self.calls) == 6, False])


class LastToken(Counting):
    """Row by row, by what the row itself has said."""

    def ends(self, new_ids):
        return new_ids[:, -1] % 8 == 0


CRITERIA = [
    LengthPerRow,
    OnlyTheSecondRow,
    AnyRow,
    AllRows,
    WholeBatchAsTensor,
    ComparesRows,
    CountsCalls,
    LastToken,
]


def end_token():
    """A token that one row says in the middle."""
    return int(plain_ids()[2, PROMPT + 6])


@pytest.mark.parametrize("with_eos", [False, True], ids=["no end token", "with an end token"])
@pytest.mark.parametrize("make", CRITERIA, ids=lambda c: c.__name__)
def test_a_batch_ends_where_plain_generate_ends_it(make, with_eos):
    settings = {"eos_token_id": end_token(), "pad_token_id": tiny.PAD_ID} if with_eos else {}
    asked = make()
    plain = plain_ids(stopping_criteria=[asked], **settings)
    if not with_eos:
        assert asked.calls[-1][0] == plain.tolist()
    for kind, drafter in drafters(rig.target(), plain).items():
        ours = make()
        drafted = plain_ids(stopping_criteria=[ours], assistant_model=drafter, **settings)
        assert torch.equal(drafted, plain), kind
        assert [ids for ids, _ in ours.calls] == [ids for ids, _ in asked.calls], kind


def test_the_cases_end_rows_at_different_lengths():
    lengths = {make.__name__: plain_ids(stopping_criteria=[make()]).shape[1] - PROMPT for make in CRITERIA}
    assert len(set(lengths.values())) > 3 and min(lengths.values()) < NEW_TOKENS, lengths


@pytest.mark.parametrize("make", [LengthPerRow, AnyRow, LastToken], ids=lambda c: c.__name__)
def test_scores_states_and_cache_end_with_the_batch(make):
    settings = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    asked = make()
    plain = plain_ids(stopping_criteria=[asked], **settings)
    for drafter in drafters(rig.target(), plain.sequences).values():
        ours = make()
        drafted = plain_ids(stopping_criteria=[ours], assistant_model=drafter, **settings)
        assert torch.equal(drafted.sequences, plain.sequences)
        for name in ("scores", "logits", "hidden_states"):
            assert len(drafted[name]) == len(plain[name])
        torch.testing.assert_close(drafted.scores, plain.scores, atol=2e-4, rtol=1e-4)
        torch.testing.assert_close(drafted.hidden_states[1:], plain.hidden_states[1:], atol=2e-4, rtol=1e-3)
        for (_, seen), (_, expected) in zip(ours.calls, asked.calls, strict=True):
            torch.testing.assert_close(seen, expected, atol=2e-4, rtol=1e-4)
        key = "cache" if "cache" in plain else "past_key_values"
        assert drafted[key].get_seq_length() == plain[key].get_seq_length()


class Puts(BaseStreamer):
    def __init__(self):
        self.puts, self.num_ends = [], 0

    def put(self, value):
        self.puts.append(value.tolist())

    def end(self):
        self.num_ends += 1


@pytest.mark.parametrize("criteria", [[], [LengthPerRow()], [AnyRow()]], ids=["no criterion", "per row", "whole batch"])
@pytest.mark.parametrize("with_eos", [False, True], ids=["no end token", "with an end token"])
def test_a_streamer_gets_the_steps_of_the_batch(criteria, with_eos):
    settings = {"eos_token_id": end_token(), "pad_token_id": tiny.PAD_ID} if with_eos else {}
    expected = Puts()
    plain = plain_ids(streamer=expected, stopping_criteria=criteria, **settings)
    for drafter in drafters(rig.target(), plain).values():
        ours = Puts()
        plain_ids(streamer=ours, stopping_criteria=criteria, assistant_model=drafter, **settings)
        assert ours.puts == expected.puts and ours.num_ends == 1
