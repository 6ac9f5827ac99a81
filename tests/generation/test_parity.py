"""
The reference's own decoding loop, round for round: drafts, confidences, what was verified and what passed.

The reference leaves plain `generate` in two places: it may run a round after the output is complete, and it neither
shortens nor trims the round that reaches the limit. There ours follows plain `generate`.
"""

import functools
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.generation.candidate_generator import DrafterCandidateGenerator

CASES = {
    "a_qwen3_vanilla_confmarkov": "Qwen3, vanilla head",
    "c_qwen3_rnn_confmarkov": "Qwen3, recurrent head and embedding tap",
    "d_qwen3_dflash": "no head",
    "f_gemma4_vanilla_confmarkov": "Gemma 4",
}


@functools.cache
def loaded(folder):
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    return (
        target,
        DSparkDrafter.from_pretrained(folder / "drafter").eval(),
        json.loads((folder / "generation.json").read_text()),
    )


@pytest.fixture(params=CASES, ids=CASES.values())
def case(request, shared):
    folder = shared / "parity" / request.param
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    return loaded(folder)


@pytest.fixture
def drafts(monkeypatch):
    made, draft = [], DrafterCandidateGenerator.draft

    def spy(self, input_ids, max_drafts):
        result = draft(self, input_ids, max_drafts)
        made.append((input_ids[0].shape[1] - 1, input_ids[0][0, -1].item(), result.ids[0].tolist()))
        return result

    monkeypatch.setattr(DrafterCandidateGenerator, "draft", spy)
    return made


def check(run, target, drafter, drafts):
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
            assistant_confidence_threshold=run["confidence_threshold"],
            drafting_backoff=False,
        )
    assert output[0, prompt.shape[1] :].tolist() == run["new_token_ids"]

    num_rounds, room = 0, run["max_new_tokens"] - 1  # The prompt's pass gave the first token.
    for theirs in run["rounds"]:
        if room == 0:
            break  # The reference drafts once more, for nothing.
        ours, (start, anchor, ids) = stats.rounds[num_rounds], drafts[num_rounds]
        num_drafts = min(theirs["draft_token_count"], room - 1)
        assert (start, anchor) == (theirs["start"], theirs["anchor"])
        assert ids == theirs["proposed"][:num_drafts]
        assert ours.verified == min(theirs["effective_proposal_length"], num_drafts)
        committed = min(theirs["accepted_draft_tokens"] + (not theirs["terminated_by_stop_token"]), room)
        assert ours.committed == committed
        assert ours.accepted == min(theirs["accepted_draft_tokens"], num_drafts)
        logits = torch.tensor(theirs.get("full_block_confidence_logits") or [])
        confidence = torch.tensor(ours.confidence)
        assert len(confidence) >= min(ours.drafted, len(logits))
        torch.testing.assert_close(confidence, logits[: len(confidence)].sigmoid(), atol=2e-5, rtol=1e-4)
        num_rounds, room = num_rounds + 1, room - committed
    assert len(stats.rounds) == len(drafts) == num_rounds


def test_runs_at_every_threshold(case, drafts):
    target, drafter, golden = case
    assert len({run["confidence_threshold"] for run in golden["runs"]}) >= 2
    for run in golden["runs"]:
        check(run, target, drafter, drafts)


def test_runs_that_a_token_stops(case, drafts):
    target, drafter, golden = case
    assert golden["stop_token_runs"]
    for run in golden["stop_token_runs"]:
        # The reference names the token; where it is the bonus token, the round counts as any other.
        check(run, target, drafter, drafts)


def test_runs_that_the_limit_stops(case, drafts):
    target, drafter, golden = case
    assert golden["max_length_runs"]
    for run in golden["max_length_runs"]:
        check(run, target, drafter, drafts)
