"""Many requests in shared rows: each output is that of the request alone, whatever shares its passes."""

import threading

import pytest
import scipy.stats
import torch
from generation import rig
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import tiny
from dspark_hf import GenerationRequest, generate_many
from dspark_hf.ragged.cache import RaggedCache
from dspark_hf.scheduling import FixedLength

LENGTHS = (9, 4, 1, 12, 6, 2, 15, 3)
LIMITS = (16, 5, 9, 1, 12, 7, 3, 10)
ROWS = (1, 3, 8)
GREEDY = {"do_sample": False, "max_new_tokens": 6}


def prompt(length, seed=0):
    return tiny.prompt(length, seed=seed)["input_ids"][0].tolist()


PROMPTS = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def alone(ids, **settings):
    return rig.target().generate(torch.tensor([ids]), **settings)[0, len(ids) :].tolist()


def outputs(drafter, requests, **settings):
    """The tokens of each request by its key."""
    results = {result.key: result for result in generate_many(rig.target(), drafter, requests, **settings)}
    for result in results.values():
        if result.error is not None:
            raise result.error
    return {key: result.token_ids for key, result in results.items()}


def greedy_requests():
    pairs = zip(PROMPTS, LIMITS, strict=True)
    return [GenerationRequest(ids, key, settings=GREEDY | {"max_new_tokens": n}) for key, (ids, n) in enumerate(pairs)]


def drafters():
    target, scripts = rig.target(), [ids + alone(ids, do_sample=False, max_new_tokens=20) for ids in PROMPTS]
    own = {"random EAGLE-3": tiny.eagle3_drafter(target), "none": None}
    return rig.drafters_of_rows(target, scripts) | own


def sampled(ids, key=0, seed=0, **settings):
    usual = {"do_sample": True, "max_new_tokens": 8, "temperature": 0.8, "top_k": 0}
    return GenerationRequest(ids, key, seed=seed, settings=usual | settings)


# ---------------------------------------------------------------------- exactness


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", ["rejecting", "accepting", "patterned", "random EAGLE-3", "none"])
def test_greedy_output_is_that_of_generate(kind, rows):
    expected = {r.key: alone(list(r.input_ids), **r.settings) for r in greedy_requests()}
    assert outputs(drafters()[kind], greedy_requests(), rows=rows, drafting_backoff=False) == expected


def test_accepted_drafts_save_passes_and_are_counted():
    settings = {"rows": 3, "drafting_backoff": False}
    results = list(generate_many(rig.target(), drafters()["accepting"], greedy_requests(), **settings))
    assert all(result.num_accepted == result.num_drafted for result in results)
    longest = next(result for result in results if result.key == 0)
    assert longest.num_passes < 8 and longest.acceptance_rate == 1 and longest.acceptance_length > 2
    plain = next(r for r in generate_many(rig.target(), None, greedy_requests()) if r.key == 0)
    assert (plain.num_passes, plain.num_drafted) == (16, 0)


@pytest.mark.parametrize("family", ["gemma3", "llama"])
def test_other_families(family):
    target = rig.target(family)
    expected = [target.generate(torch.tensor([ids]), **GREEDY)[0, len(ids) :].tolist() for ids in PROMPTS]
    requests = [GenerationRequest(ids, key, settings=GREEDY) for key, ids in enumerate(PROMPTS)]
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    results = generate_many(target, drafter, requests, rows=3, drafting_backoff=False)
    assert {r.key: r.token_ids for r in results} == dict(enumerate(expected))


def test_one_seed_gives_one_output_whatever_shares_its_passes_and_is_drafted():
    settings = [{}, {"top_p": 0.9}, {"temperature": 1.5}, {"top_k": 5}, {"repetition_penalty": 1.3}]
    requests = lambda: [sampled(PROMPTS[0], key, seed=key, **own) for key, own in enumerate(settings)]  # noqa: E731
    expected = {key: outputs(None, [request])[key] for key, request in enumerate(requests())}
    for drafter in drafters().values():
        mixed = [*greedy_requests()[1:], *requests()]
        for number, request in enumerate(mixed[: len(LENGTHS) - 1]):
            request.key = 100 + number
        found = outputs(drafter, mixed, rows=4, drafting_backoff=False)
        assert {key: found[key] for key in expected} == expected
    assert outputs(None, [sampled(PROMPTS[0], 0, seed=77)])[0] != expected[0]


def test_seeds_that_are_drawn_are_reported_and_give_the_output_again():
    (first,) = generate_many(rig.target(), None, [GenerationRequest(PROMPTS[0], settings={"do_sample": True})])
    (again,) = generate_many(
        rig.target(), None, [GenerationRequest(PROMPTS[0], seed=first.seed, settings={"do_sample": True})]
    )
    assert again.token_ids == first.token_ids


# ---------------------------------------------------------------------- the distribution


def p_value(temperature):
    """Of the second token of many sampled requests, compared with the target's distribution at `temperature`."""
    target = rig.target()
    first = alone(PROMPTS[1], do_sample=False, max_new_tokens=1)
    forced = LogitsProcessorList([ForcedFirst(len(PROMPTS[1]), first[0])])
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    count = 600
    requests = (
        sampled(PROMPTS[1], key, seed=key, temperature=0.5, max_new_tokens=2, logits_processor=forced)
        for key in range(count)
    )
    found = outputs(drafter, requests, rows=16, drafting_backoff=False)
    tokens = torch.tensor([ids[1] for ids in found.values()])
    with torch.no_grad():
        logits = target(torch.tensor([PROMPTS[1] + first])).logits[0, -1].float()
    expected = (logits / temperature).softmax(-1) * count
    often = expected >= 5
    observed = torch.bincount(tokens, minlength=len(expected)).float()
    bins = [torch.cat([values[often], values[~often].sum()[None]]).tolist() for values in (observed, expected)]
    scaled = [value * sum(bins[0]) / sum(bins[1]) for value in bins[1]]
    return scipy.stats.chisquare(bins[0], scaled).pvalue


class ForcedFirst(LogitsProcessor):
    """Leaves one token at the first place."""

    def __init__(self, length, token):
        self.length, self.token = length, token

    def __call__(self, input_ids, scores):
        if input_ids.shape[1] == self.length:
            return torch.full_like(scores, float("-inf")).index_fill_(1, torch.tensor([self.token]), 0.0)
        return scores


@pytest.mark.statistical
def test_sampling_has_the_distribution_of_the_target():
    assert p_value(temperature=0.5) > 1e-3


@pytest.mark.statistical
def test_another_distribution_would_be_noticed():
    assert p_value(temperature=0.9) < 1e-3


# ---------------------------------------------------------------------- rows


def test_requests_are_read_as_rows_become_free_and_results_come_as_they_end():
    read = []

    def source():
        for request in greedy_requests():
            read.append(request.key)
            yield request

    ended = []
    for result in generate_many(rig.target(), None, source(), rows=2):
        ended.append(result.key)
        assert len(read) <= len(ended) + 2
    assert sorted(ended) == list(range(len(PROMPTS)))
    assert ended[:2] == [1, 2]  # Limits 16 | 5, then 9; the first row is still busy.


def test_nothing_is_waited_for_while_rows_are_running():
    asked = []

    def source():
        yield greedy_requests()[0]
        for _ in range(4):
            asked.append(1)
            yield None
        yield greedy_requests()[1]

    assert len(list(generate_many(rig.target(), None, source(), rows=2))) == 2
    assert len(asked) == 4


def test_two_hundred_requests_and_buffers_that_do_not_grow(monkeypatch):
    sizes, caches = [], []
    original = RaggedCache.plan

    def plan(self, counts):
        result = original(self, counts)
        caches.append(self)
        sizes.append(self.num_bytes)
        return result

    monkeypatch.setattr(RaggedCache, "plan", plan)
    requests = (GenerationRequest(PROMPTS[key % 8], key, settings=GREEDY) for key in range(200))
    results = list(generate_many(rig.target(), drafters()["patterned"], requests, rows=8))
    assert sorted(result.key for result in results) == list(range(200))
    expected = [alone(ids, **GREEDY) for ids in PROMPTS]
    assert all(result.token_ids == expected[result.key % 8] for result in results)
    # After the trials of the target, one cache is used throughout, and it has its final size after the first requests.
    of_run = [size for cache, size in zip(caches, sizes, strict=True) if cache is caches[-1]]
    assert max(of_run[20:]) == max(of_run[:20])


# ---------------------------------------------------------------------- failures, cancelling, ends


class Failing(BaseStreamer):
    def __init__(self, after):
        self.left = after

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise OSError("the client is gone")

    def end(self):
        pass


class Collecting(BaseStreamer):
    def __init__(self):
        self.got, self.has_ended = [], False

    def put(self, value):
        self.got += value.reshape(-1).tolist()

    def end(self):
        self.has_ended = True


class FailingCriterion(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        raise ZeroDivisionError


BAD = {
    "no tokens": (GenerationRequest([]), "at least one token id"),
    "unknown token": (GenerationRequest([5, 4000]), "Encode it"),
    "two rows": (GenerationRequest(torch.zeros(2, 3, dtype=torch.long)), "one row"),
    "bad temperature": (GenerationRequest([5], settings={"do_sample": True, "temperature": -1.0}), "temperature"),
    "unknown setting": (GenerationRequest([5], settings={"temprature": 1.0}), "temprature"),
    "beams": (GenerationRequest([5], settings={"num_beams": 4}), "num_beams"),
    "several outputs": (GenerationRequest([5], settings={"num_return_sequences": 2}), "num_return_sequences"),
    "stop strings": (GenerationRequest([5], settings={"stop_strings": ["x"]}), "tokenizer="),
    "no room": (GenerationRequest([5, 6, 7], settings={"max_new_tokens": None, "max_length": 3}), "3"),
    "streamer": (GenerationRequest([5, 6], streamer=Failing(3), settings=GREEDY), "client is gone"),
    "streamer at once": (GenerationRequest([5, 6], streamer=Failing(0), settings=GREEDY), "client is gone"),
    "criterion": (
        GenerationRequest([5], settings=GREEDY | {"stopping_criteria": StoppingCriteriaList([FailingCriterion()])}),
        "",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("rows", [1, 3])
def test_a_request_that_fails_fails_alone(name, rows):
    bad, words = BAD[name]
    if isinstance(bad.streamer, Failing):
        bad.streamer.left = 0 if name == "streamer at once" else 3
    good = greedy_requests()
    settings = {"rows": rows, "drafting_backoff": False}
    results = list(generate_many(rig.target(), drafters()["patterned"], [*good[:2], bad, *good[2:]], **settings))
    (failed,) = [result for result in results if result.request is bad]
    assert failed.finish_reason == "error" and words in str(failed.error)
    expected = {r.key: alone(list(r.input_ids), **r.settings) for r in good}
    assert {r.key: r.token_ids for r in results if r is not failed} == expected


def test_cancelled_requests_end_with_the_tokens_they_have():
    first, waiting, other = greedy_requests()[0], greedy_requests()[4], greedy_requests()[6]
    streamer = Collecting()
    first.streamer = streamer
    first.is_cancelled = lambda: len(streamer.got) >= len(PROMPTS[0]) + 3
    waiting.cancel()
    results = {r.key: r for r in generate_many(rig.target(), None, [first, other, waiting], rows=2)}
    expected = alone(PROMPTS[0], **first.settings)
    assert (results[0].finish_reason, results[0].token_ids) == ("cancelled", expected[:3])
    assert (results[4].finish_reason, results[4].token_ids) == ("cancelled", [])
    assert results[6].finish_reason == "length" and streamer.has_ended


def test_a_predicate_that_raises_fails_its_request():
    requests = greedy_requests()[:2]
    calls = iter([False, False])
    requests[0].is_cancelled = lambda: next(calls)
    results = {r.key: r for r in generate_many(rig.target(), None, requests, rows=2)}
    assert isinstance(results[0].error, StopIteration) and results[1].error is None


def test_streamers_get_the_prompt_and_every_token():
    requests = greedy_requests()
    for request in requests:
        request.streamer = Collecting()
    for result in generate_many(rig.target(), drafters()["patterned"], requests, rows=3, drafting_backoff=False):
        streamer = result.request.streamer
        assert streamer.has_ended and streamer.got == [*result.request.input_ids, *result.token_ids]


def test_end_tokens_and_criteria_are_those_of_each_request():
    expected = alone(PROMPTS[0], do_sample=False, max_new_tokens=16)
    at = next(i for i, token in enumerate(expected) if i >= 3 and token not in expected[:i])

    class AfterFive(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= len(PROMPTS[0]) + 5)

    base = {"do_sample": False, "max_new_tokens": 16}
    own = [
        {},
        {"eos_token_id": expected[at], "pad_token_id": 0},
        {"stopping_criteria": StoppingCriteriaList([AfterFive()])},
    ]
    requests = [GenerationRequest(PROMPTS[0], key, settings=base | more) for key, more in enumerate(own)]
    settings = {"rows": 3, "drafting_backoff": False}
    results = {r.key: r for r in generate_many(rig.target(), drafters()["accepting"], requests, **settings)}
    assert [results[key].finish_reason for key in range(3)] == ["length", "eos", "stop"]
    assert [results[key].token_ids for key in range(3)] == [expected, expected[: at + 1], expected[:5]]


def test_schedulers_see_the_rows_that_are_there():
    class Watching(FixedLength):
        seen: list[int] = []

        def _lengths(self, confidence, max_lengths, rows):
            self.seen.append(len(max_lengths))
            return super()._lengths(confidence, max_lengths, rows)

    settings = {"rows": 4, "verify_scheduler": Watching(), "drafting_backoff": False}
    assert len(list(generate_many(rig.target(), drafters()["patterned"], greedy_requests(), **settings))) == 8
    assert max(Watching.seen) == 4 and min(Watching.seen) < 4


def test_two_streams_of_results_may_be_read_in_turns():
    expected = {r.key: alone(list(r.input_ids), **r.settings) for r in greedy_requests()}
    runs = [generate_many(rig.target(), drafters()["patterned"], greedy_requests(), rows=2) for _ in range(2)]
    for pair in zip(*runs, strict=True):
        assert all(result.token_ids == expected[result.key] for result in pair)
        assert alone(PROMPTS[0], **GREEDY) == expected[0][:6]


def test_cancelling_from_another_thread():
    request = greedy_requests()[0]
    thread = threading.Thread(target=request.cancel)
    thread.start()
    thread.join()
    (result,) = generate_many(rig.target(), None, [request])
    assert result.finish_reason == "cancelled"


@pytest.mark.parametrize("family", tiny.HYBRID_TARGETS)
def test_targets_whose_rows_cannot_share_passes_are_refused_by_name(family):
    target = rig.target(family)
    with pytest.raises(ValueError, match=f"{type(target).__name__} cannot decode many requests"):
        generate_many(target, None, [])


@pytest.mark.parametrize(("drafter", "settings"), [(None, {"rows": 0}), (torch.nn.Linear(1, 1), {})])
def test_wrong_arguments_are_refused_before_anything_runs(drafter, settings):
    with pytest.raises(ValueError, match=r"rows=0|not a drafter"):
        generate_many(rig.target(), drafter, [], **settings)
