"""Targets that keep more than keys and values decode with a drafter exactly as without one."""

import pytest
import torch
from generation import hybrids, rig
from generation import test_losslessness as lossless
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import StaticLayer

import tiny
from dspark_hf.generation import call, rollback, rollback_trial, shared_states
from dspark_hf.scheduling import RowsBackoff, ThroughputCurve, ThroughputScheduler
from dspark_hf.transformers_names import CACHE_KEY

pytestmark = pytest.mark.integration


# One of each kind of layer; the others are tried with these only in what is most likely to go wrong.
QUICK = ("qwen3_5", "falcon_h1", "deepseek_v4")


def families(names):
    """Parameters for the families that the installed transformers has."""
    marked = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return [param for name, param in zip(names, marked, strict=True) if hybrids.exists(name)]


FAMILIES = families(hybrids.FAMILIES)


# ---------------------------------------------------------------------- greedy output


@pytest.mark.parametrize("family", [name for name in hybrids.FAMILIES if hybrids.exists(name)])
def test_every_family(family):
    kinds = rig.KINDS if family in QUICK else ["patterned"]
    outcome = rig.compare(hybrids.target(family), max_new_tokens=40, kinds=kinds)
    assert len(set(rig.ids_of(outcome.plain))) > 20, "an output that never changes hides mistakes"
    assert len(outcome.stats["patterned"].rounds) == 12


@pytest.mark.parametrize("family", [name for name in hybrids.WRONG_FAMILIES if hybrids.exists(name)])
def test_targets_whose_passes_differ_from_single_steps_are_refused(family):
    message = rig.refusing(hybrids.target(family))
    reasons = ("on top of its recurrent state", "outside its cache", "cache is off", "makes no cache for")
    assert any(words in message for words in reasons)


# ---------------------------------------------------------------------- what a rollback is


def decoded(target, rollback_class=rollback.Rollback, num_tokens=10):
    """Logits `[num_tokens, V]` of tokens that are fed in rounds with two wrong drafts each, and of the same fed one by one."""
    prompt, ids = tiny.prompt(9)["input_ids"], tiny.prompt(num_tokens, seed=1)["input_ids"]
    single = rollback_trial.PromptedTarget(target, prompt)
    expected = torch.cat([single.feed(token) for token in ids.split(1, dim=1)], dim=1)[0]
    fed = rollback_trial.PromptedTarget(target, prompt)
    rolled = rollback_class(fed.cache)
    rolled.begin(fed.cache)
    num_done, num_owed, logits = 0, 0, []
    while num_done < num_tokens:
        block = torch.cat([ids[:, num_done - num_owed : num_done + 2], torch.tensor([[5, 6]])], dim=1)
        rolled.save()
        logits.append(fed.feed(block)[0, num_owed : num_owed + 2])
        num_owed = rolled.take_back(block.shape[1], 2)
        num_done += 2
        fed.length -= num_owed + 2
    return torch.cat(logits), expected


class Forgetful(rollback.Rollback):
    """A rollback that crops what can be cropped and leaves the rest as it is."""

    needs_copies = False


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_after_a_rollback_are_those_of_single_steps(family):
    actual, expected = decoded(hybrids.target(family))
    # Nemotron-H's norm divides very small numbers, which makes rounding large in a model this small.
    torch.testing.assert_close(actual, expected, atol=0.3 if family == "nemotron_h" else 5e-3, rtol=1e-3)


@pytest.mark.parametrize("family", families([name for name in hybrids.FAMILIES if name not in hybrids.CROPPED]))
def test_a_rollback_without_copies_is_wrong(family, monkeypatch):
    """The negative control of the test above."""
    monkeypatch.setattr(rollback.RecurrentLayer, "save", lambda self: None)
    actual, expected = decoded(hybrids.target(family), Forgetful)
    assert (actual - expected).abs().max() > 1


def test_the_trial_notices_a_rollback_that_forgets(monkeypatch):
    target = hybrids.build("qwen3_5")
    assert rollback_trial.is_exact(target)
    monkeypatch.setattr(rollback.RecurrentLayer, "save", lambda self: None)
    assert not rollback_trial.is_exact(target)


def test_each_target_is_tried_once(monkeypatch):
    target, tried = hybrids.build("qwen3_5"), []
    monkeypatch.setattr(rollback_trial, "is_exact", lambda model: not tried.append(model))
    for _ in range(2):
        rig.compare(target, kinds=["rejecting"], max_new_tokens=4)
    assert tried == [target]


# ---------------------------------------------------------------------- sampling

NUM_TOKENS = 4  # From the third on, tokens are accepted before them that were fed again.


def small_target():
    return hybrids.build(
        "qwen3_5",
        vocab_size=lossless.VOCAB_SIZE,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )


def sampled_p_value(target, num_samples):
    drafter = lossless.bent_drafter(target)
    cells = lossless.first_tokens(target, drafter, {"drafting_backoff": False}, num_samples, NUM_TOKENS)
    return lossless.p_value(cells, lossless.joint_distribution(target, {}, NUM_TOKENS))


@pytest.mark.statistical
def test_sampled_tokens_have_the_distribution_of_the_target():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert sampled_p_value(small_target(), 400) > lossless.PASS


@pytest.mark.statistical
def test_the_distribution_shows_a_rollback_that_forgets(monkeypatch):
    """The negative control of the test above."""
    target = small_target()
    lossless.first_tokens(target, lossless.bent_drafter(target), {}, 1)  # Passes the trial of a new target.
    monkeypatch.setattr(rollback.RecurrentLayer, "save", lambda self: None)
    monkeypatch.setattr(rollback.Rollback, "needs_copies", False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        assert sampled_p_value(target, 400) < lossless.FAIL


# ---------------------------------------------------------------------- what it costs


class Passes:
    """Counts the tokens of every pass of a target."""

    def __init__(self, target):
        self.fed = []
        self._hook = target.get_decoder().register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module, args, kwargs):
        ids = kwargs["input_ids"] if kwargs.get("input_ids") is not None else args[0]
        self.fed.append(ids.shape[1])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._hook.remove()


@pytest.mark.parametrize("family", ["qwen3_5", "bamba", "lfm2"])
def test_accepted_tokens_ride_in_the_next_pass(family):
    """There is one pass for each round, and a round feeds again only what a rejection took back."""
    target = hybrids.target(family)
    script = rig.ids_of(target.generate(**tiny.prompt(), max_new_tokens=40, do_sample=False))
    drafter = rig.drafter_of("patterned", target, script)
    settings = {"max_new_tokens": 40, "do_sample": False, "assistant_model": drafter, "drafting_backoff": False}
    target.generate(**tiny.prompt(), **settings)  # The trial of a new target has passes of its own.
    with Passes(target) as passes, rig.record_speculation() as stats:
        target.generate(**tiny.prompt(), **settings)
    owed, expected = 0, []
    for r in stats.rounds[:-1]:
        expected.append(owed + 1 + r.verified)
        rejected = r.accepted < r.verified and family not in hybrids.CROPPED
        owed = owed + r.committed if rejected else 0
    assert passes.fed[0] == 9
    assert passes.fed[1:-1] == expected
    assert passes.fed[1:] == [r.fed for r in stats.rounds]
    assert stats.num_fed == sum(passes.fed[1:])


def test_a_round_without_drafts_brings_a_cache_up_to_date():
    """Where every round rejects something, the tokens that are fed again stay few."""
    target = hybrids.target("qwen3_5")
    drafter = rig.drafter_of("rejecting", target, [])
    settings = {"max_new_tokens": 60, "do_sample": False, "assistant_model": drafter, "drafting_backoff": False}
    target.generate(**tiny.prompt(), **settings)
    with Passes(target) as passes:
        target.generate(**tiny.prompt(), **settings)
    longest = call.MOST_FED_AGAIN + 1 + rig.BLOCK_SIZE
    assert longest - rig.BLOCK_SIZE < max(passes.fed) <= longest


def test_copies_are_made_in_place_and_only_before_a_round_that_drafts(monkeypatch):
    target = hybrids.target("qwen3_5")
    script = rig.ids_of(target.generate(**tiny.prompt(), max_new_tokens=60, do_sample=False))
    drafter = rig.drafter_of("patterned", target, script)
    places, saves = {}, []
    save = rollback.RecurrentLayer.save

    def spy(self):
        save(self)
        saves.append(self)
        tensors = [copy for copies in self._copies for copy in copies.values()]
        places.setdefault(id(self), set()).add(tuple(copy.data_ptr() for copy in tensors))

    monkeypatch.setattr(rollback.RecurrentLayer, "save", spy)
    settings = {"max_new_tokens": 60, "do_sample": False, "assistant_model": drafter}
    target.generate(**tiny.prompt(), **settings)
    assert len(saves) > 6 and all(len(seen) == 1 for seen in places.values())
    saves.clear()
    target.generate(**tiny.prompt(), **settings, num_assistant_tokens=0)
    assert not saves


def test_schedulers_and_back_off_count_the_tokens_fed_again(monkeypatch):
    target, seen = hybrids.target("qwen3_5"), []
    curve = ThroughputCurve.assumed(0.1, is_accelerated=False)
    scheduler = ThroughputScheduler(curve)
    observe = RowsBackoff.observe

    def spy(self, rows, num_verified, num_accepted, num_fed_again, has_drafted):
        seen.append((sum(num_fed_again), scheduler.num_fed_again, has_drafted))
        observe(self, rows, num_verified, num_accepted, num_fed_again, has_drafted)

    monkeypatch.setattr(RowsBackoff, "observe", spy)
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    with rig.record_speculation() as stats:
        target.generate(
            **tiny.prompt(), max_new_tokens=30, do_sample=False, assistant_model=drafter, verify_scheduler=scheduler
        )
    fed_again = [r.fed - 1 - r.verified for r in stats.rounds]
    assert max(fed_again) > 0
    assert [again for again, *_ in seen] == [again for _, again, _ in seen] == fed_again[: len(seen)]


# ---------------------------------------------------------------------- caches that outlive the call


def held_by(cache):
    """All tensors that the layers of a cache hold, by layer and name."""
    found = {}
    for index, layer in enumerate(cache.layers):
        for name, value in vars(layer).items():
            parts = value if isinstance(value, dict) else {None: value}
            found |= {(index, name, key): part for key, part in parts.items() if isinstance(part, torch.Tensor)}
    return found


def assert_same_cache(actual, expected, atol=2e-3):
    actual, expected = held_by(actual), held_by(expected)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, atol=atol, rtol=1e-3, msg=str(name))


def drafters(target, plain, kinds=rig.KINDS):
    return [(kind, rig.drafter_of(kind, target, rig.ids_of(plain))) for kind in kinds]


CACHE_FAMILIES = families(["qwen3_5", "bamba", "falcon_h1", "zaya", "kimi_linear", "deepseek_v4", "lfm2", "inkling"])


@pytest.mark.parametrize("num_tokens", [2, 7, 20], ids=lambda n: f"{n} new tokens")
@pytest.mark.parametrize("family", CACHE_FAMILIES)
def test_the_cache_handed_out_is_that_of_plain_generate(family, num_tokens):
    target = hybrids.target(family)
    settings = {"max_new_tokens": num_tokens, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**tiny.prompt(), **settings)
    for _, drafter in drafters(target, plain):
        drafted = target.generate(**tiny.prompt(), **settings, assistant_model=drafter)
        assert_same_cache(drafted[CACHE_KEY], plain[CACHE_KEY])


@pytest.mark.parametrize("new_only", [False, True], ids=["all ids again", "new ids only"])
@pytest.mark.parametrize("family", CACHE_FAMILIES)
def test_a_second_turn(family, new_only):
    target, settings = hybrids.target(family), {"max_new_tokens": 15, "do_sample": False}
    first, new = tiny.prompt()["input_ids"], tiny.prompt(4, seed=5)["input_ids"]
    outputs: dict = {}
    for kind in (None, *rig.KINDS):
        cache, said = DynamicCache(config=target.config), first
        scripts = outputs.get(None, [[], []])
        for turn in (0, 1):
            drafter = None if kind is None else rig.drafter_of(kind, target, scripts[turn])
            ids = first if turn == 0 else torch.cat([said, new], dim=1)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            if turn and new_only:
                inputs["input_ids"] = ids[:, cache.get_seq_length() :]
            said = target.generate(**inputs, **settings, **{CACHE_KEY: cache}, assistant_model=drafter)
            if turn and new_only:
                said = torch.cat([ids[:, : -inputs["input_ids"].shape[1]], said], dim=1)
            outputs.setdefault(kind, []).append(said[0].tolist())
        assert cache.get_seq_length() == said.shape[1] - 1
    assert all(output == outputs[None] for output in outputs.values())


@pytest.mark.parametrize("family", CACHE_FAMILIES)
def test_a_prompt_in_chunks(family):
    settings = {"prefill_chunk_size": 3, "return_dict_in_generate": True, "max_new_tokens": 20}
    outcome = rig.compare(hybrids.target(family), **settings)
    for drafted in outcome.drafted.values():
        assert_same_cache(drafted[CACHE_KEY], outcome.plain[CACHE_KEY])


@pytest.mark.parametrize(
    "family", [f for f in ("qwen3_5", "falcon_h1", "lfm2", "bamba", "kimi_linear", "inkling") if hybrids.exists(f)]
)
def test_a_static_cache(family):
    """Convolutions do not record there: transformers would no longer mask what a static layer has not filled."""
    if not StaticLayer.is_croppable:
        pytest.skip("static caches cannot be cropped in this transformers")
    rig.compare(hybrids.target(family), cache_implementation="static", max_new_tokens=30)


@pytest.mark.parametrize("family", CACHE_FAMILIES)
def test_left_padding(family):
    padded = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    row = {name: value[1:] for name, value in padded.items()}
    if family == "deepseek_v4":
        assert "with left padding, DeepseekV4" in rig.refusing(hybrids.target(family), **row)
    else:
        rig.compare(hybrids.target(family), row, max_new_tokens=30)


class Interrupted(Exception):
    """Raised by the streamer below."""


class Interrupting:
    """A streamer that stops the call at some token."""

    def __init__(self, num_tokens):
        self.left = num_tokens + 1  # The prompt comes first.

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise Interrupted

    def end(self):
        pass


@pytest.mark.parametrize("num_tokens", range(1, 9))
@pytest.mark.parametrize("family", families(["qwen3_5", "deepseek_v4"]))
def test_an_interrupted_call_leaves_a_cache_to_continue_from(family, num_tokens):
    """The cache holds all tokens that were committed, but the last."""
    target, first = hybrids.target(family), tiny.prompt()
    settings = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**first, **settings)
    for _, drafter in drafters(target, plain):
        cache = DynamicCache(config=target.config)
        with pytest.raises(Interrupted):
            target.generate(
                **first, **settings, assistant_model=drafter, streamer=Interrupting(num_tokens), **{CACHE_KEY: cache}
            )
        ids = plain[:, : cache.get_seq_length() + 1]
        assert 9 + num_tokens <= ids.shape[1] <= 9 + num_tokens + 1 + rig.BLOCK_SIZE
        rest = {"max_new_tokens": plain.shape[1] - ids.shape[1], "do_sample": False}
        resumed = target.generate(ids, attention_mask=torch.ones_like(ids), **rest, **{CACHE_KEY: cache})
        assert torch.equal(resumed, plain)


def test_hidden_states_and_scores_of_tokens_that_follow_others_fed_again():
    target = hybrids.build(
        "qwen3_5"
    ).double()  # In float32, rounding differs from processor to processor by more than is allowed.
    wanted = {"output_scores": True, "output_logits": True, "output_hidden_states": True, "output_attentions": True}
    outcome = rig.compare(target, return_dict_in_generate=True, max_new_tokens=20, **wanted)
    for drafted in outcome.drafted.values():
        for name in ("scores", "logits", "hidden_states", "attentions"):
            for step, (ours, theirs) in enumerate(zip(drafted[name], outcome.plain[name], strict=True)):
                pairs = [(ours, theirs)] if isinstance(ours, torch.Tensor) else zip(ours, theirs, strict=True)
                for one, other in pairs:
                    torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3, msg=f"{name} of step {step}")


# ---------------------------------------------------------------------- several rows


def batch(family):
    """Three prompts: of different lengths, where the family can be fed padding."""
    lengths = (9, 9, 9) if family == "deepseek_v4" else (9, 4, 6)
    return tiny.left_padded(*(tiny.prompt(length, seed=seed) for seed, length in enumerate(lengths)))


# Families whose layers keep all keys and values, or states alone.
SHARING = (
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_next",
    "olmo_hybrid",
    "kimi_linear",
    "bailing_hybrid",
    "bamba",
    "granitemoehybrid",
    "nemotron_h",
)


def compare_rows(family, kinds=rig.KINDS, keeps_cache=True, **settings):
    """Greedy rows are those of plain `generate`, and so is the cache. Returns the rows, and statistics and passes by kind."""
    target, inputs = hybrids.target(family), batch(family)
    settings = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True} | settings
    plain = target.generate(**inputs, **settings)
    kept = torch.nn.functional.pad(inputs["attention_mask"], (0, plain.sequences.shape[1] - 9), value=1).bool()
    scripts = [row[keep].tolist() for row, keep in zip(plain.sequences, kept, strict=True)]
    counted = {}
    for kind, drafter in rig.drafters_of_rows(target, scripts).items():
        if kind not in kinds:
            continue
        with Passes(target) as passes, rig.record_speculation() as stats:
            settings = settings | {"return_dict_in_generate": keeps_cache, "drafting_backoff": False}
            drafted = target.generate(**inputs, **settings, assistant_model=drafter)
        counted[kind] = stats, passes.fed
        if keeps_cache:
            atol = 0.3 if family == "nemotron_h" else 2e-3
            assert_same_cache(drafted[CACHE_KEY], plain[CACHE_KEY], atol=atol)
            drafted = drafted.sequences
        assert torch.equal(drafted, plain.sequences), f"with a {kind} drafter"
    return plain.sequences, counted


@pytest.mark.parametrize("family", FAMILIES)
def test_several_rows(family):
    compare_rows(family)


@pytest.mark.parametrize("family", CACHE_FAMILIES)
def test_several_rows_that_end_at_different_times(family):
    """A row that has ended is fed padding, as by plain `generate`, if its cache is handed out."""
    sequences, _ = compare_rows(family, kinds=["rejecting"])
    ends = [int(sequences[row, 9 + new]) for row, new in enumerate((3, 7, 11))]
    compare_rows(family, eos_token_id=ends)
    compare_rows(family, eos_token_id=ends, keeps_cache=False)


@pytest.mark.parametrize("family", families(SHARING))
def test_rows_share_a_pass_where_the_cache_does_not_outlive_the_call(family):
    compare_rows(family, kinds=["accepting"], keeps_cache=False, max_new_tokens=2)  # The trials of a new target.
    _, counted = compare_rows(family, keeps_cache=False, max_new_tokens=30)
    for kind, (stats, fed) in counted.items():
        rounds = max(sum(r.row == row for r in stats.rounds) for row in range(3))
        more = len(fed) - 1 - rounds  # Without drafts, to bring rows up to date.
        assert 0 <= more <= rounds / 3 and max(fed) <= 9 + 1 + rig.BLOCK_SIZE, kind


def test_rows_that_do_not_draft_copy_nothing(monkeypatch):
    copied = []
    save = shared_states.SharedStates._save
    monkeypatch.setattr(shared_states.SharedStates, "_save", lambda self: copied.append(save(self)))
    compare_rows("qwen3_5", kinds=["rejecting"], keeps_cache=False)
    assert copied
    target, inputs = hybrids.target("qwen3_5"), batch("qwen3_5")
    copied.clear()
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    target.generate(**inputs, max_new_tokens=12, do_sample=False, assistant_model=drafter, num_assistant_tokens=0)
    assert not copied


def test_a_target_whose_rows_get_other_logits_together_is_fed_row_by_row(monkeypatch):
    target = hybrids.build("qwen3_5")
    assert shared_states._is_right(target)
    monkeypatch.setattr(shared_states.SharedStates, "_save", lambda self: None)
    assert not shared_states._is_right(target)
    monkeypatch.undo()
    monkeypatch.setattr(shared_states, "_is_right", lambda model: False)
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    inputs, settings = batch("qwen3_5"), {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    with Passes(target) as passes:
        drafted = target.generate(**inputs, **settings, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    assert len(passes.fed) > 3 * 7


@pytest.mark.parametrize("family", families(["qwen3_5", "bamba"]))
def test_a_criterion_that_ends_the_whole_batch(family):
    compare_rows(family, stopping_criteria=StoppingCriteriaList([EndsTheBatch(9 + 6)]))


class EndsTheBatch(StoppingCriteria):
    """Ends all rows once they have so many columns: rows that are ahead are cut."""

    def __init__(self, num_columns):
        self.num_columns = num_columns

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.num_columns)


@pytest.mark.parametrize("family", families(["qwen3_5", "bamba", "falcon_h1"]))
def test_a_second_turn_of_several_rows(family):
    target, settings = hybrids.target(family), {"max_new_tokens": 8, "do_sample": False}
    outputs = []
    for drafter in (None, tiny.random_drafter(target, num_hidden_layers=1)):
        cache = DynamicCache(config=target.config)
        first = batch(family)
        said = target.generate(**first, **settings, **{CACHE_KEY: cache}, assistant_model=drafter)
        ids = torch.cat([said, tiny.prompt(4, seed=5, num_rows=3)["input_ids"]], dim=1)
        mask = torch.nn.functional.pad(first["attention_mask"], (0, ids.shape[1] - 9), value=1)
        inputs = {"input_ids": ids, "attention_mask": mask, CACHE_KEY: cache}
        outputs.append(target.generate(**inputs, **settings, assistant_model=drafter))
    assert torch.equal(*outputs)
