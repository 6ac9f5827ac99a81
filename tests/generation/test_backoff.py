"""Drafting pauses while it does not pay: fewer drafts, the same output, the same distribution."""

import functools

import pytest
import scipy.stats
import torch
from generation import rig
from generation.rig import ScriptedRows
from generation.test_losslessness import (
    FAIL,
    PASS,
    bent_drafter,
    bigram_target,
    chain_p_value,
    random_drafter,
    transition_distribution,
)
from transformers import DynamicCache

import tiny
from dspark_hf import record_speculation
from dspark_hf.generation.candidate_generator import DrafterCandidateGenerator
from dspark_hf.generation.context_memory import recall
from dspark_hf.scheduling import RowsBackoff
from dspark_hf.transformers_names import CACHE_KEY

NEW_TOKENS = 80


def generate(target, drafter, inputs=None, **settings):
    inputs = tiny.prompt() if inputs is None else inputs
    with record_speculation() as stats:
        output = target.generate(**(inputs | {"max_new_tokens": NEW_TOKENS} | settings), assistant_model=drafter)
    return output, stats


def as_plain(target, inputs=None, **settings):
    return target.generate(**(inputs or tiny.prompt()), max_new_tokens=NEW_TOKENS, do_sample=False, **settings)


@pytest.mark.parametrize("num_rows", [1, 3], ids=["one row", "three rows"])
def test_a_useless_drafter_is_rarely_used_and_does_not_change_the_output(num_rows):
    target = rig.target()
    inputs = tiny.left_padded(*(tiny.prompt(5 + row, seed=row) for row in range(num_rows)))
    output, stats = generate(target, tiny.random_drafter(target), inputs, do_sample=False)
    assert torch.equal(output, as_plain(target, inputs))
    drafted = [r for r in stats.rounds if not r.skipped]
    assert 0 < len(drafted) < 0.25 * len(stats.rounds)
    assert all(r.drafted == r.verified == r.accepted == 0 and r.committed == 1 for r in stats.rounds if r.skipped)


def test_a_useful_drafter_drafts_in_every_round():
    target = rig.target()
    plain = as_plain(target)
    drafter = rig.drafter_of("accepting", target, plain[0].tolist())
    output, stats = generate(target, drafter, do_sample=False)
    assert torch.equal(output, plain)
    assert not any(r.skipped for r in stats.rounds)


class Useless(rig.ScriptedDrafter):
    """Right up to a position, and from another on."""

    def token_at(self, position):
        right = super().token_at(position)
        return right if not 20 <= position < 40 else (right + 1) % self.config.vocab_size


def test_drafting_resumes_with_the_whole_context():
    """After a pause the drafter's context is what it would have been without one."""
    target = rig.target()
    plain = as_plain(target)
    drafter = Useless(
        tiny.drafter_config(target, num_hidden_layers=1, markov_rank=0, enable_confidence_head=False), plain[0].tolist()
    ).eval()
    output, stats = generate(target, drafter, do_sample=False)
    assert torch.equal(output, plain)
    skipped = [r.skipped for r in stats.rounds]
    assert any(skipped) and not skipped[-2] and stats.rounds[-2].accepted == rig.BLOCK_SIZE


@pytest.mark.parametrize("max_pending", [5, 256], ids=["projected in between", "projected at the end"])
def test_pauses_do_not_change_the_draft_cache(monkeypatch, max_pending):
    target, drafter = rig.target(), tiny.random_drafter(rig.target())
    monkeypatch.setattr("dspark_hf.generation.draft_context._MAX_PENDING", max_pending)
    caches = {}
    for backoff in (True, False):
        cache = DynamicCache()
        output, stats = generate(target, drafter, do_sample=False, drafting_backoff=backoff, **{CACHE_KEY: cache})
        assert any(r.skipped for r in stats.rounds) == backoff
        caches[backoff] = recall(cache, drafter, output[:, :-1])
    with_pauses, without = caches[True], caches[False]
    assert with_pauses.lengths == without.lengths == [9 + NEW_TOKENS - 1]
    length = with_pauses.lengths[0]
    assert torch.equal(with_pauses.positions[:, :length], without.positions[:, :length])
    torch.testing.assert_close(with_pauses._keys[0][:, :, :length], without._keys[0][:, :, :length])


def test_a_row_whose_drafts_are_rejected_pauses_and_its_neighbour_continues():
    target = rig.target()
    inputs = tiny.left_padded(tiny.prompt(6, seed=1), tiny.prompt(9, seed=2))
    plain = as_plain(target, inputs)
    good = plain[0, 3:].tolist()
    config = tiny.drafter_config(target, num_hidden_layers=1, markov_rank=0, enable_confidence_head=False)
    drafter = ScriptedRows(config, [good], frozenset()).eval()
    output, stats = generate(target, drafter, inputs, do_sample=False)
    assert torch.equal(output, plain)
    assert not any(r.skipped for r in stats.rounds if r.row == 0)
    wasteful = [r for r in stats.rounds if r.row == 1]
    together = wasteful[: sum(r.row == 0 for r in stats.rounds)]
    assert any(r.skipped for r in together)


# ---------------------------------------------------------------------- switched on and off


def test_back_off_can_be_switched_off(monkeypatch):
    target, drafter = rig.target(), tiny.random_drafter(rig.target())
    assert not any(r.skipped for r in generate(target, drafter, do_sample=False, drafting_backoff=False)[1].rounds)
    drafter.generation_config.drafting_backoff = False
    assert not any(r.skipped for r in generate(target, drafter, do_sample=False)[1].rounds)
    assert any(r.skipped for r in generate(target, drafter, do_sample=False, drafting_backoff=True)[1].rounds)


def test_the_setting_of_back_off_is_saved_with_the_drafter(tmp_path):
    drafter = tiny.random_drafter(rig.target())
    drafter.generation_config.drafting_backoff = False
    drafter.save_pretrained(tmp_path)
    assert type(drafter).from_pretrained(tmp_path).generation_config.drafting_backoff is False


def test_the_same_seed_gives_the_same_output():
    """Pauses do not depend on a clock."""
    target, drafter = rig.target(), tiny.random_drafter(rig.target())
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(generate(target, drafter, do_sample=True)[0])
    assert torch.equal(*outputs)


# ---------------------------------------------------------------------- the distribution

IDS = ["a flattened drafter", "a random drafter"]


def chains(target, drafter, num_rows, num_tokens):
    inputs = {"input_ids": torch.tensor([[1, 3, 2]] * num_rows), "attention_mask": torch.ones(num_rows, 3).long()}
    settings = {"do_sample": True, "temperature": 0.7, "top_k": 0, "max_new_tokens": num_tokens}
    output, stats = generate(target, drafter, inputs, **settings)
    # One chain: rows start from the same token that the one before is followed by.
    return output[:, 2:].tolist(), stats


def pooled_p_value(rows, distribution):
    counts = torch.zeros_like(distribution)
    for row in rows:
        for pair in zip(row, row[1:]):
            counts[pair] += 1
    expected = distribution * counts.sum(1, keepdim=True)
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return scipy.stats.chi2.sf(statistic, distribution.numel() - len(distribution))


@pytest.mark.statistical
# A less flattened drafter would be accepted often enough to draft in every round with some seeds.
@pytest.mark.parametrize("make", [functools.partial(bent_drafter, scale=0.35), random_drafter], ids=IDS)
def test_the_distribution_of_several_rows_that_pause(make):
    target = bigram_target()
    rows, stats = chains(target, make(target), num_rows=6, num_tokens=150)
    assert {r.skipped for r in stats.rounds} == {True, False}
    assert pooled_p_value(rows, transition_distribution(target, {"temperature": 0.7}, order=1)) > PASS


@pytest.mark.statistical
def test_the_distribution_of_one_row_that_pauses():
    target = bigram_target()
    (row,), stats = chains(target, random_drafter(target), num_rows=1, num_tokens=800)
    assert {r.skipped for r in stats.rounds} == {True, False}
    assert chain_p_value(row, transition_distribution(target, {"temperature": 0.7}, order=1)) > PASS


@pytest.mark.statistical
def test_a_pause_that_looks_at_the_drafts_changes_the_distribution(monkeypatch):
    """The negative control: whether a round drafts is decided by what it has drafted."""
    draft = DrafterCandidateGenerator.draft

    def looking(self, *args, **kwargs):
        result = draft(self, *args, **kwargs)
        ids = result.ids[:, 0].tolist() if result.ids.shape[1] else [0] * len(result.lengths)
        lengths = [length if token >= 2 else 0 for length, token in zip(result.lengths, ids, strict=True)]
        return result._replace(lengths=lengths)

    monkeypatch.setattr(DrafterCandidateGenerator, "draft", looking)
    target = bigram_target()
    monkeypatch.setattr(RowsBackoff, "wants_drafts", lambda self, rows: [True] * len(rows))
    rows, _ = chains(target, bent_drafter(target), num_rows=6, num_tokens=300)
    assert pooled_p_value(rows, transition_distribution(target, {"temperature": 0.7}, order=1)) < FAIL
