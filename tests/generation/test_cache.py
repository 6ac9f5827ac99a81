"""Caches: going on with one, and the kinds other than the usual. Outputs are those of a call without a cache."""

import copy

import pytest
import torch
from generation import rig
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, QuantizedLayer, StaticLayer

import tiny
from dspark_hf import record_speculation
from dspark_hf.generation import candidate_generator, context_memory
from dspark_hf.transformers_names import CACHE_KEY

GREEDY = {"do_sample": False}
NEXT_TURN = tiny.prompt(4, seed=5)["input_ids"]


def ones(input_ids):
    return torch.ones_like(input_ids)


class Conversation:
    """A cache after a first turn of ten tokens, and the ids of a second turn's prompt."""

    def __init__(self, target, drafter=None, prompt=9, **kwargs):
        self.cache = DynamicCache(config=target.config)
        settings = {"max_new_tokens": 10, "assistant_model": drafter} | GREEDY | kwargs
        said = target.generate(**tiny.prompt(prompt), **{CACHE_KEY: self.cache}, **settings)
        self.said = said.sequences if not isinstance(said, torch.Tensor) else said
        self.ids = torch.cat([self.said, NEXT_TURN], dim=1)

    def inputs(self, new_only=False):
        start = int(self.cache.get_seq_length()) if new_only else 0
        return {"input_ids": self.ids[:, start:], "attention_mask": ones(self.ids), CACHE_KEY: self.cache}


def uncached(target, ids, new_tokens=rig.NEW_TOKENS):
    return rig.ids_of(target.generate(input_ids=ids, attention_mask=ones(ids), max_new_tokens=new_tokens, **GREEDY))


@pytest.fixture
def drafts(monkeypatch):
    """The tokens of every draft made."""
    made, draft = [], candidate_generator.DrafterCandidateGenerator.draft

    def spy(self, input_ids, max_drafts):
        result = draft(self, input_ids, max_drafts)
        made.append(result.ids.tolist())
        return result

    monkeypatch.setattr(candidate_generator.DrafterCandidateGenerator, "draft", spy)
    return made


@pytest.fixture
def recomputed(monkeypatch):
    """The lengths of all prefixes whose features were recomputed."""
    lengths, recompute = [], context_memory.recompute_features

    def spy(target, input_ids):
        lengths.append(input_ids.shape[1])
        return recompute(target, input_ids)

    monkeypatch.setattr(context_memory, "recompute_features", spy)
    return lengths


# ---------------------------------------------------------------------- a second turn


@pytest.mark.parametrize("new_only", [False, True], ids=["all ids again", "new ids only"])
@pytest.mark.parametrize("first_drafted", [False, True], ids=["plain first turn", "drafted first turn"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_second_turn(family, first_drafted, new_only):
    target = rig.target(family)
    first = tiny.random_drafter(target, num_hidden_layers=1) if first_drafted else None
    known = Conversation(target).ids
    hidden = known.shape[1] - NEXT_TURN.shape[1] - 1 if new_only else 0
    outcome = rig.compare(target, {}, lambda: Conversation(target, first).inputs(new_only), num_hidden=hidden)
    assert rig.ids_of(outcome.plain) == uncached(target, known)[hidden:]


@pytest.mark.parametrize("how", ["plain", "drafted", "drafted by another", "rolled back", "copied"])
def test_the_drafter_knows_what_is_in_the_cache(how, drafts, recomputed):
    """A second turn drafts the very tokens that a call without a cache drafts."""
    target = rig.target()
    drafter, other = (tiny.random_drafter(target, seed=seed) for seed in (0, 1))
    first = {"plain": None, "drafted by another": other}.get(how, drafter)
    talk = Conversation(target, first)
    if how == "rolled back":
        talk.cache.crop(-6)
        talk.ids = torch.cat([talk.ids[:, :13], NEXT_TURN], dim=1)
    if how == "copied":
        talk.cache = copy.deepcopy(talk.cache)
    length = talk.cache.get_seq_length()
    assert length == (12 if how == "rolled back" else 18)
    drafts.clear()
    settings = {"max_new_tokens": rig.NEW_TOKENS, "assistant_model": drafter} | GREEDY
    output = target.generate(**talk.inputs(), **settings)
    in_second_turn = drafts.copy()
    drafts.clear()
    fresh = target.generate(input_ids=talk.ids, attention_mask=ones(talk.ids), **settings)
    assert torch.equal(output, fresh)
    assert in_second_turn == drafts
    # What an earlier call with this very cache has projected is not computed again.
    assert recomputed == ([] if how in ("drafted", "rolled back") else [length])


def test_a_cache_that_was_rolled_back_and_filled_with_other_text(drafts):
    target = rig.target()
    drafter = tiny.random_drafter(target)
    talk = Conversation(target, drafter)
    talk.cache.crop(-6)
    other = torch.cat([talk.ids[:, :12], (talk.ids[:, 12:19] + 1) % 100], dim=1)
    target(input_ids=other[:, 12:18], **{CACHE_KEY: talk.cache})
    talk.ids = torch.cat([other, NEXT_TURN], dim=1)
    drafts.clear()
    settings = {"max_new_tokens": rig.NEW_TOKENS, "assistant_model": drafter} | GREEDY
    output = target.generate(**talk.inputs(), **settings)
    in_second_turn = drafts.copy()
    drafts.clear()
    assert torch.equal(output, target.generate(input_ids=talk.ids, attention_mask=ones(talk.ids), **settings))
    assert in_second_turn == drafts


def test_three_turns():
    target = rig.target()
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    talk = Conversation(target, drafter)
    for _ in range(2):
        expected = uncached(target, talk.ids)
        said = target.generate(**talk.inputs(), max_new_tokens=rig.NEW_TOKENS, assistant_model=drafter, **GREEDY)
        assert rig.ids_of(said) == expected
        talk.ids = torch.cat([said, NEXT_TURN], dim=1)
    assert talk.cache.get_seq_length() == said.shape[1] - 1


@pytest.mark.parametrize("new_only", [False, True], ids=["all ids again", "new ids only"])
@pytest.mark.parametrize("first_drafted", [False, True], ids=["plain first turn", "drafted first turn"])
def test_second_turn_after_a_padded_prompt(first_drafted, new_only, drafts):
    target = rig.target()
    drafter = tiny.random_drafter(target)
    padded = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    first = {name: value[1:] for name, value in padded.items()}
    settings = {"max_new_tokens": 10} | GREEDY
    cache = DynamicCache(config=target.config)
    first_drafter = drafter if first_drafted else None
    said = target.generate(**first, **settings, **{CACHE_KEY: cache}, assistant_model=first_drafter)
    ids = torch.cat([said, NEXT_TURN], dim=1)
    mask = torch.cat([first["attention_mask"], ones(ids[:, 9:])], dim=1)
    drafts.clear()
    fresh = target.generate(input_ids=ids, attention_mask=mask, **settings, assistant_model=drafter)
    drafted_fresh = drafts.copy()
    drafts.clear()
    start = cache.get_seq_length() if new_only else 0
    inputs = {"input_ids": ids[:, start:], "attention_mask": mask, CACHE_KEY: cache}
    output = target.generate(**inputs, **settings, assistant_model=drafter)
    assert torch.equal(output, fresh[:, start:])
    assert torch.equal(fresh, target.generate(input_ids=ids, attention_mask=mask, **settings))
    assert new_only or drafts == drafted_fresh


def test_second_turn_as_embeddings():
    target = rig.target()
    known = Conversation(target).ids
    embeds = target.get_input_embeddings()(known)

    def fresh():
        return {"inputs_embeds": embeds, CACHE_KEY: Conversation(target).cache}

    outcome = rig.compare(target, {}, fresh, num_hidden=known.shape[1])
    assert rig.ids_of(outcome.plain) == uncached(target, known)[known.shape[1] :]


def test_new_ids_only_need_no_context(recomputed):
    """The drafter starts without the old tokens, at the right positions, and all stays exact."""
    target, seen = rig.target(), []
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    forward = drafter.forward
    drafter.forward = lambda ids, positions, **kwargs: (
        seen.append(positions[0, 0].item()),
        forward(ids, positions, **kwargs),
    )[1]
    talk = Conversation(target)
    target.generate(**talk.inputs(new_only=True), max_new_tokens=2 + rig.BLOCK_SIZE, assistant_model=drafter, **GREEDY)
    assert seen[0] == talk.ids.shape[1] and seen == sorted(seen)
    assert recomputed == []


@pytest.mark.parametrize("slot", range(rig.BLOCK_SIZE + 2), ids=lambda n: f"after {n} tokens")
def test_an_end_of_sequence_token_leaves_the_cache_that_plain_generate_leaves(slot):
    target = rig.target()
    text = Conversation(target).said
    ending = {"eos_token_id": text[0, 9 + slot].item(), "pad_token_id": 0}
    plain = Conversation(target, **ending)
    expected = uncached(target, plain.ids, 6)
    for kind in rig.KINDS:
        drafter = rig.drafter_of(kind, target, rig.ids_of(text))
        talk = Conversation(target, drafter, **ending)
        assert torch.equal(talk.said, plain.said)
        assert talk.cache.get_seq_length() == plain.cache.get_seq_length()
        said = target.generate(**talk.inputs(), max_new_tokens=6, assistant_model=drafter, **GREEDY)
        assert rig.ids_of(said) == expected


class Interrupt(Exception):
    pass


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("length", [10, 12, 13], ids=lambda n: f"at {n} tokens")
def test_an_exception_leaves_no_rejected_draft_in_the_cache(length, family):
    """Raising in a criterion or streamer is how servers end a call: what was said so far must stay a good prefix."""
    target = rig.target(family)
    text = uncached(target, tiny.prompt()["input_ids"])

    def interrupt(input_ids, scores, **kwargs):
        if input_ids.shape[1] == length:
            raise Interrupt
        return torch.zeros(1, dtype=torch.bool)

    ids = torch.cat([torch.tensor([text[:length]]), NEXT_TURN], dim=1)
    expected = uncached(target, ids, 6)
    for kind in rig.KINDS:
        cache = DynamicCache(config=target.config)
        drafter = rig.drafter_of(kind, target, text)
        call = tiny.prompt() | GREEDY | {"max_new_tokens": 10, "assistant_model": drafter, CACHE_KEY: cache}
        with pytest.raises(Interrupt):
            target.generate(**call, stopping_criteria=[interrupt])
        assert cache.get_seq_length() in (length - 1, length)
        said = target.generate(
            input_ids=ids, attention_mask=ones(ids), max_new_tokens=6, **{CACHE_KEY: cache}, **GREEDY
        )
        assert rig.ids_of(said) == expected


def test_only_the_tokens_of_a_round_are_recorded():
    """To take drafts back, windows record what they would forget; recording a whole prompt would hold far more."""
    target, held = rig.target("mistral"), []
    rig.compare(target)  # What is tried once for each target is not meant.
    cache = DynamicCache(config=target.config)
    hook = target.register_forward_hook(lambda *args: held.append(cache.layers[0].keys.shape[2]))
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    target.generate(**tiny.prompt(100), max_new_tokens=12, assistant_model=drafter, **{CACHE_KEY: cache}, **GREEDY)
    hook.remove()
    window = tiny.SLIDING_WINDOW - 1
    assert held[0] == window
    assert max(held[1:]) == window + 1 + rig.BLOCK_SIZE
    assert cache.layers[0].keys.shape[2] == window


def test_a_prompt_that_the_cache_already_holds_is_refused():
    target = rig.target()
    talk = Conversation(target)
    for length in (18, 10):
        ids = talk.said[:, :length]
        assert "already holds all" in rig.refusing(
            target, input_ids=ids, attention_mask=ones(ids), **{CACHE_KEY: talk.cache}
        )


def test_a_cache_that_knows_no_layer_types():
    target = rig.target("gemma3")
    rig.compare(target, None, lambda: {CACHE_KEY: DynamicCache()})


def test_a_turn_in_inference_mode_and_one_outside():
    target = rig.target()
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    with torch.inference_mode():
        talk = Conversation(target, drafter)
    talk.ids = talk.ids.clone()
    said = target.generate(**talk.inputs(), max_new_tokens=rig.NEW_TOKENS, assistant_model=drafter, **GREEDY)
    assert rig.ids_of(said) == uncached(target, talk.ids)
    with torch.inference_mode():
        ids = torch.cat([said, NEXT_TURN], dim=1)
        said = target.generate(
            input_ids=ids,
            attention_mask=ones(ids),
            **{CACHE_KEY: talk.cache},
            max_new_tokens=8,
            assistant_model=drafter,
        )
    assert rig.ids_of(said) == uncached(target, ids)[: said.shape[1]]


def test_what_is_remembered_goes_with_the_cache():
    target = rig.target()
    before = len(context_memory._memories)
    talk = Conversation(target, tiny.random_drafter(target, num_hidden_layers=1))
    assert len(context_memory._memories) == before + 1
    del talk
    assert len(context_memory._memories) == before


# ---------------------------------------------------------------------- other kinds of cache

has_static_crop = hasattr(StaticLayer, "crop")


@pytest.mark.skipif(not has_static_crop, reason="static caches of this transformers cannot be rolled back")
@pytest.mark.parametrize(
    ("family", "fields"),
    [("qwen3", {}), ("gpt_oss", {"sliding_window": 64}), ("gemma3", {}), ("mistral", {})],
    ids=["full attention", "windows longer than the text", "windows that the text outgrows", "nothing but windows"],
)
def test_static_cache(family, fields):
    settings = {"cache_implementation": "static", "return_dict_in_generate": True, "max_new_tokens": 30}
    outcome = rig.compare(rig.target(family, **fields), **settings)
    for ours in outcome.drafted.values():
        assert int(ours[CACHE_KEY].get_seq_length()) == int(outcome.plain[CACHE_KEY].get_seq_length())


@pytest.mark.skipif(not has_static_crop, reason="static caches of this transformers cannot be rolled back")
def test_attentions_over_a_static_cache():
    target = rig.target(attn_implementation="eager")
    outcome = rig.compare(target, cache_implementation="static", return_dict_in_generate=True, output_attentions=True)
    for ours in outcome.drafted.values():
        for mine, theirs in zip(ours.attentions, outcome.plain.attentions, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


@pytest.mark.skipif(not has_static_crop, reason="static caches of this transformers cannot be rolled back")
def test_a_static_cache_of_the_user():
    target = rig.target()
    rig.compare(target, None, lambda: {CACHE_KEY: StaticCache(config=target.config, max_cache_len=40)})


@pytest.mark.skipif(has_static_crop, reason="static caches of this transformers can be rolled back")
def test_a_static_cache_that_cannot_be_rolled_back_is_refused():
    message = rig.refusing(rig.target(), cache_implementation="static", max_new_tokens=30)
    assert "StaticCache cannot be rolled back" in message


def test_a_cache_that_holds_more_than_its_layers_is_refused():
    """Models of older versions keep the positions of all tokens there."""
    target = rig.target()
    cache = DynamicCache(config=target.config)
    cache.position_ids = torch.arange(9)
    assert "it keeps more than its layers" in rig.refusing(target, **{CACHE_KEY: cache})


class ToyQuantizedLayer(QuantizedLayer):
    """Quantizes nothing."""

    def __init__(self):
        super().__init__(axis_key=0, axis_value=0, residual_length=4)

    def _quantize(self, tensor, axis):
        return tensor

    def _dequantize(self, tensor):
        return tensor


def test_a_quantized_cache_is_refused_before_the_prompt_is_fed():
    target = rig.target()
    cache = Cache(layers=[ToyQuantizedLayer() for _ in range(2)])
    assert "cannot be rolled back" in rig.refusing(target, **{CACHE_KEY: cache})
    assert cache.get_seq_length() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_an_offloaded_cache(family):
    target = tiny.TARGETS[family]().to("cuda")
    inputs = {name: value.to("cuda") for name, value in tiny.prompt().items()}
    settings = inputs | GREEDY | {"max_new_tokens": 24, "cache_implementation": "offloaded"}
    plain = target.generate(**settings)
    for seed in range(2):
        drafter = tiny.random_drafter(target, seed=seed).to("cuda")
        assert torch.equal(target.generate(**settings, assistant_model=drafter), plain)


# ---------------------------------------------------------------------- the prompt in chunks


@pytest.mark.parametrize("chunk_size", [1, 4, 9, 100], ids=lambda n: f"chunks of {n}")
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_prefill_in_chunks(family, chunk_size):
    rig.compare(rig.target(family), tiny.prompt(10), prefill_chunk_size=chunk_size)


def test_chunks_give_the_same_drafts(drafts):
    target = rig.target()
    settings = tiny.prompt(10) | GREEDY | {"max_new_tokens": 8, "assistant_model": tiny.random_drafter(target)}
    target.generate(**settings)
    whole = drafts.copy()
    drafts.clear()
    target.generate(**settings, prefill_chunk_size=3)
    assert drafts == whole


def test_chunks_of_a_second_turn():
    target = rig.target()
    expected = uncached(target, Conversation(target).ids)  # Older versions feed the first turn again, on top of itself.
    for kind in rig.KINDS:
        settings = {"max_new_tokens": rig.NEW_TOKENS, "prefill_chunk_size": 2} | GREEDY
        drafter = rig.drafter_of(kind, target, expected)
        said = target.generate(**Conversation(target).inputs(), **settings, assistant_model=drafter)
        assert rig.ids_of(said) == expected


def test_acceptance_does_not_fall_in_a_second_turn():
    target = tiny.bigram(num_hidden_layers=2)
    drafter = tiny.perfect_drafter(target)
    for new_only in (False, True):
        talk = Conversation(target)
        with record_speculation() as stats:
            target.generate(**talk.inputs(new_only), max_new_tokens=16, assistant_model=drafter, **GREEDY)
        assert stats.acceptance_rate == 1.0
