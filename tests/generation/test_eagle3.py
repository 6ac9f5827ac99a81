"""EAGLE-3 drafters in `generate`: the output of plain `generate`, and drafts that are those of the reference."""

import functools
import json

import pytest
import torch
from generation import rig
from transformers import AutoModelForCausalLM, DynamicCache

import tiny
from dspark_hf import Drafter, record_speculation
from dspark_hf.draft_cache import DraftCache
from dspark_hf.generation.eagle3_candidate_generator import Eagle3CandidateGenerator
from dspark_hf.transformers_names import CACHE_KEY

CASE = "g_qwen3_eagle3"


# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize("family", [f for f in tiny.TARGETS if f not in tiny.HYBRID_TARGETS])
def test_every_family_of_targets(family):
    rig.compare(rig.target(family), kinds=rig.EAGLE3_KINDS)


@pytest.mark.parametrize("length", [1, 2, 33], ids=lambda n: f"prompt of {n} tokens")
def test_any_prompt_length(length):
    rig.compare(rig.target(), tiny.prompt(length), kinds=rig.EAGLE3_KINDS)


@pytest.mark.parametrize("block_size", [1, 7], ids=lambda n: f"chains of {n}")
def test_chains_of_any_length(block_size):
    outcome = rig.compare(rig.target(), kinds=rig.EAGLE3_KINDS, drafter_fields={"block_size": block_size})
    assert max(r.accepted for r in outcome.stats["accepting EAGLE-3"].rounds) == block_size


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.6}, {"prefill_chunk_size": 4}, {"drafting_backoff": True, "max_new_tokens": 40}],
    ids=["a processor of the text", "a prompt in chunks", "pauses"],
)
def test_settings(settings):
    plain = {name: value for name, value in settings.items() if name != "drafting_backoff"}
    rig.compare(rig.target(), kinds=rig.EAGLE3_KINDS, **plain)


def test_a_prompt_of_embeddings():
    target = rig.target()
    inputs = tiny.prompt()
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    rig.compare(
        target,
        {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]},
        num_hidden=9,
        kinds=rig.EAGLE3_KINDS,
    )


# ---------------------------------------------------------------------- what the drafter makes of its context


@functools.cache
def bigram():
    return tiny.bigram(num_hidden_layers=2)


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampling"])
@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": tiny.VOCAB_SIZE - 1}], ids=["all tokens", "fewer tokens"])
def test_a_perfect_drafter_is_accepted_at_every_slot(do_sample, fields):
    drafter = tiny.perfect_eagle3_drafter(bigram(), **fields)
    rows = tiny.left_padded(tiny.prompt(5, 1), tiny.prompt(9, 2), tiny.prompt(1, 3))
    with record_speculation() as stats:
        bigram().generate(**rows, max_new_tokens=21, do_sample=do_sample, top_k=0, assistant_model=drafter)
    assert stats.acceptance_rate > (0.95 if do_sample and fields else 0.999)


def test_each_row_drafts_what_it_drafts_alone():
    target, drafter = rig.target(), tiny.eagle3_drafter(rig.target())
    prompts = [tiny.prompt(5, 1), tiny.prompt(9, 2), tiny.prompt(3, 3)]
    drafts = []
    generate = functools.partial(target.generate, max_new_tokens=10, do_sample=False, assistant_model=drafter)
    for inputs in (*prompts, tiny.left_padded(*prompts)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Eagle3CandidateGenerator, "draft", recording(drafts.append))
            generate(**inputs)
    firsts = [ids for ids in drafts if len(ids) == 1 and ids.shape[1] == tiny.BLOCK_SIZE]
    together = next(ids for ids in drafts if len(ids) == 3)
    starts = [next(row for row in firsts if torch.equal(row[0], own)) for own in together]
    assert len(starts) == 3


def recording(keep):
    draft = Eagle3CandidateGenerator.draft

    def spy(self, input_ids, max_drafts):
        result = draft(self, input_ids, max_drafts)
        keep(result.ids)
        return result

    return spy


def context_of(drafter, target, ids) -> DraftCache:
    """The cache of a drafter that sees a text at once, `[1, L]`: all its tokens but the last."""
    generator = Eagle3CandidateGenerator(drafter, target)
    states = target(ids, output_hidden_states=True).hidden_states
    features = torch.cat([states[i] for i in drafter.config.hidden_state_indices], dim=-1)
    generator.context.add_prompt(features[:, :-1], None)
    return generator.context.complete([ids])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["rejecting EAGLE-3", "patterned EAGLE-3"])
def test_the_context_after_all_rounds_is_that_of_the_whole_text(kind, monkeypatch):
    """Whatever was drafted and taken back, and in however many rounds: also what a next turn starts from."""
    target, left = rig.target(), {}
    script = target.generate(**tiny.prompt(), max_new_tokens=20, do_sample=False)[0].tolist()
    drafter = rig.drafter_of(kind, target, script)
    monkeypatch.setattr(
        "dspark_hf.generation.call.remember", lambda cache, drafter, ids, context: left.update(ids=ids, context=context)
    )
    kept = {CACHE_KEY: DynamicCache(config=target.config)}
    target.generate(**tiny.prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter, **kept)
    text = torch.tensor([script])
    assert torch.equal(left["ids"], text[:, :-1])
    expected, found = context_of(drafter, target, text), left["context"]
    assert found.lengths == expected.lengths == [text.shape[1] - 1]
    for ours, theirs in ((found._keys, expected._keys), (found._values, expected._values)):
        length = found.lengths[0]
        torch.testing.assert_close(ours[0][:, :, :length], theirs[0][:, :, :length], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("new_only", [False, True], ids=["all ids again", "new ids only"])
def test_a_second_turn(new_only):
    target, first = rig.target(), tiny.prompt()

    def turn(assistant, new_only=False):
        cache = DynamicCache(config=target.config)
        one = target.generate(
            **first, max_new_tokens=8, do_sample=False, assistant_model=assistant, **{CACHE_KEY: cache}
        )
        new = tiny.prompt(6, seed=4)["input_ids"]
        ids = torch.cat([one[:, -1:], new], dim=1) if new_only else torch.cat([one, new], dim=1)
        mask = torch.ones(1, one.shape[1] + new.shape[1], dtype=torch.long)
        return target.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=12,
            do_sample=False,
            assistant_model=assistant,
            **({} if assistant is None else {"drafting_backoff": False}),
            **{CACHE_KEY: cache},
        )

    plain = turn(None, new_only)
    script = turn(None)[0].tolist()
    for kind in rig.EAGLE3_KINDS:
        with record_speculation() as stats:
            assert torch.equal(turn(rig.drafter_of(kind, target, script), new_only), plain)
        if kind == "accepting EAGLE-3":
            assert stats.rounds[-2].accepted == stats.rounds[-2].verified > 0


# ---------------------------------------------------------------------- the reference's own loop


@functools.cache
def loaded(folder):
    return (
        AutoModelForCausalLM.from_pretrained(folder / "target").eval(),
        Drafter.from_pretrained(folder / "drafter").eval(),
        json.loads((folder / "generation.json").read_text()),
    )


@pytest.mark.parametrize("runs", ["runs", "stop_token_runs", "max_length_runs"])
def test_drafts_equal_those_of_the_reference_in_every_round(runs, shared, monkeypatch):
    """
    The reference ends a proposal at a stop token that it drafted, which ours does not, since nothing after it is ever
    committed; and it runs a round after the output is complete.
    """
    folder = shared / "parity" / CASE
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    target, drafter, golden = loaded(folder)
    assert golden[runs]
    drafts = []
    monkeypatch.setattr(Eagle3CandidateGenerator, "draft", recording(drafts.append))
    for run in golden[runs]:
        prompt = torch.tensor([run["prompt_ids"]])
        drafts.clear()
        with record_speculation() as stats:
            output = target.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=run["max_new_tokens"],
                do_sample=False,
                eos_token_id=run["stop_token_ids"],
                pad_token_id=0,
                assistant_model=drafter,
                drafting_backoff=False,
            )
        assert output[0, prompt.shape[1] :].tolist() == run["new_token_ids"]
        room = run["max_new_tokens"] - 1
        for theirs, ours, ids in zip(run["rounds"], stats.rounds, drafts, strict=False):
            num_drafts = min(theirs["draft_token_count"], room - 1)
            assert ids[0, :num_drafts].tolist() == theirs["proposed"][:num_drafts]
            committed = min(theirs["accepted_draft_tokens"] + (not theirs["terminated_by_stop_token"]), room)
            assert ours.committed == committed
            room -= committed
        assert len(drafts) == len(stats.rounds) >= len(run["rounds"]) - 1
