"""Criteria and streamers of several rows: shown the batches that plain `generate` shows them, and ending where it ends."""

import pytest
import torch
from generation import rig
from generation.rig import ScriptedRows
from generation.test_row_processors import LENGTHS, NEW_TOKENS, batch, drafters
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

import tiny
from dspark_hf.transformers_names import CACHE_KEY

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


class AtStepThree(Counting):
    """Ends the batch before a row that is ahead has said its end token."""

    def ends(self, new_ids):
        return new_ids.shape[1] >= 3


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
    AtStepThree,
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


@pytest.mark.parametrize("with_eos", [False, True], ids=["no end token", "with an end token"])
@pytest.mark.parametrize("make", [LengthPerRow, AnyRow, LastToken, AtStepThree], ids=lambda c: c.__name__)
def test_scores_states_and_cache_end_with_the_batch(make, with_eos):
    settings = {"eos_token_id": end_token(), "pad_token_id": tiny.PAD_ID} if with_eos else {}
    settings |= {
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
        if not with_eos:  # Of rows that have ended, plain `generate` returns what padding gave.
            torch.testing.assert_close(drafted.scores, plain.scores, atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(drafted.hidden_states[1:], plain.hidden_states[1:], atol=2e-4, rtol=1e-3)
            for (_, seen), (_, expected) in zip(ours.calls, asked.calls, strict=True):
                torch.testing.assert_close(seen, expected, atol=2e-4, rtol=1e-4)
        assert drafted[CACHE_KEY].get_seq_length() == plain[CACHE_KEY].get_seq_length()


def test_a_row_that_has_ended_beyond_the_end_of_the_batch_leaves_nothing_behind():
    """Only the third row is drafted right: it has said its end token, and left, when the others come to the third step."""
    settings = {"eos_token_id": end_token(), "pad_token_id": tiny.PAD_ID, "return_dict_in_generate": True}
    script = plain_ids(eos_token_id=end_token(), pad_token_id=tiny.PAD_ID)[2, PROMPT - LENGTHS[2] :].tolist()
    config = tiny.drafter_config(rig.target(), num_hidden_layers=1, markov_rank=0, enable_confidence_head=False)
    drafter = ScriptedRows(config, [script], frozenset()).eval()
    plain = plain_ids(stopping_criteria=[AtStepThree()], output_scores=True, **settings)
    drafted = plain_ids(stopping_criteria=[AtStepThree()], output_scores=True, assistant_model=drafter, **settings)
    assert torch.equal(drafted.sequences, plain.sequences)
    assert len(drafted.scores) == len(plain.scores) == 3
    for ours, theirs in zip(drafted[CACHE_KEY].layers, plain[CACHE_KEY].layers, strict=True):
        padding = batch()["attention_mask"][:, None, :, None].bool().logical_not()
        padding = torch.nn.functional.pad(padding, (0, 0, 0, 2))
        torch.testing.assert_close(
            ours.keys.masked_fill(padding, 0), theirs.keys.masked_fill(padding, 0), atol=2e-4, rtol=1e-3
        )


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
