"""The seam to transformers: `assistant_model=` takes a drafter, every other call stays what it was, and it can be undone."""

import contextlib
import inspect
import threading

import pytest
import torch
from generation import rig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModel, GenerationMixin, PreTrainedTokenizerFast, pipeline

import dspark_hf
import tiny
from dspark_hf import DSparkDrafter, dspark_generate, record_speculation

GREEDY = {"do_sample": False, "max_new_tokens": 12}


@contextlib.contextmanager
def unregistered():
    dspark_hf.unregister()
    try:
        yield
    finally:
        dspark_hf.register()


# ---------------------------------------------------------------------- register and unregister


def test_registering_is_idempotent_and_reversible():
    registered = GenerationMixin.generate
    dspark_hf.register()
    assert GenerationMixin.generate is registered
    with unregistered():
        original = GenerationMixin.generate
        assert original is not registered
        dspark_hf.unregister()
        assert GenerationMixin.generate is original
        dspark_hf.register()
        dspark_hf.unregister()
        assert GenerationMixin.generate is original
    assert GenerationMixin.generate is not original


def test_generate_looks_as_it_did():
    with unregistered():
        original = GenerationMixin.generate
        signature = inspect.signature(original)
    assert inspect.signature(GenerationMixin.generate) == signature
    assert GenerationMixin.generate.__doc__ == original.__doc__
    assert GenerationMixin.generate.__name__ == "generate"


def test_without_registration_the_drafter_is_rejected():
    target = rig.target()
    with unregistered(), pytest.raises((TypeError, ValueError, AttributeError)):
        target.generate(**tiny.prompt(), **GREEDY, assistant_model=tiny.random_drafter(target))


def stock_assistant():
    return {"assistant_model": tiny.qwen3(seed=3, num_hidden_layers=1)}


def own_loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
    return input_ids + 1


CALLS = {
    "plain": dict,
    "sampled": lambda: {"do_sample": True},
    "beams": lambda: {"num_beams": 3},
    "several sequences": lambda: {"do_sample": True, "num_return_sequences": 2},
    "a stock assistant": stock_assistant,
    "prompt lookup": lambda: {"prompt_lookup_num_tokens": 3},
    "a loop of the user": lambda: {"custom_generate": own_loop},
    "no assistant": lambda: {"assistant_model": None},
}


@pytest.mark.parametrize("make", CALLS.values(), ids=CALLS.keys())
def test_every_other_call_is_unchanged(make):
    outputs = []
    for scope in (contextlib.nullcontext(), unregistered()):
        with scope:
            torch.manual_seed(0)
            outputs.append(tiny.qwen3(num_hidden_layers=2).generate(**tiny.prompt(), **(GREEDY | make())))
    assert torch.equal(*outputs)


def test_errors_of_other_calls_are_unchanged():
    for scope in (contextlib.nullcontext(), unregistered()):
        with scope, pytest.raises(ValueError, match="not_an_argument"):
            rig.target().generate(**tiny.prompt(), not_an_argument=1)


# ---------------------------------------------------------------------- spellings


def test_the_spelling_without_a_patch():
    target = rig.target()
    drafter = tiny.random_drafter(target)
    plain = target.generate(**tiny.prompt(), **GREEDY)
    for scope in (contextlib.nullcontext(), unregistered()):
        with scope, record_speculation() as stats:
            drafted = target.generate(
                **tiny.prompt(),
                **GREEDY,
                custom_generate=dspark_generate,
                drafter=drafter,
                num_assistant_tokens=2,
                drafting_backoff=False,
            )
        assert torch.equal(drafted, plain)
        assert {r.drafted for r in stats.rounds[:-2]} == {2}


def test_both_spellings_at_once():
    target = rig.target()
    drafted = target.generate(
        **tiny.prompt(), **GREEDY, custom_generate=dspark_generate, assistant_model=tiny.random_drafter(target)
    )
    assert torch.equal(drafted, target.generate(**tiny.prompt(), **GREEDY))


def test_another_loop_beside_a_drafter_is_refused():
    assert "custom_generate=" in rig.refusing(rig.target(), custom_generate=own_loop)


@pytest.mark.parametrize("drafter", [None, torch.nn.Linear(1, 1)], ids=["nothing", "another module"])
def test_the_loop_requires_a_drafter(drafter):
    with pytest.raises(ValueError, match="must be a drafter of dspark_hf"):
        rig.target().generate(**tiny.prompt(), **GREEDY, custom_generate=dspark_generate, drafter=drafter)


def test_a_second_tokenizer_is_not_needed():
    """One vocabulary serves both models; who passes tokenizers out of habit is not punished."""
    target = rig.target()
    drafted = target.generate(
        **tiny.prompt(),
        **GREEDY,
        assistant_model=tiny.random_drafter(target),
        tokenizer=word_tokenizer(),
        assistant_tokenizer=word_tokenizer(),
    )
    assert torch.equal(drafted, target.generate(**tiny.prompt(), **GREEDY))


def test_drafters_loaded_by_auto_model(tmp_path):
    target = rig.target()
    drafter = tiny.random_drafter(target)
    drafter.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert isinstance(loaded, DSparkDrafter)
    recorded = []
    for assistant in (drafter, loaded):
        with record_speculation() as stats:
            target.generate(**tiny.prompt(), **GREEDY, assistant_model=assistant)
        recorded.append(stats.rounds)
    for expected, found in zip(*recorded, strict=True):
        assert (found.verified, found.accepted) == (expected.verified, expected.accepted)
        assert found.confidence == pytest.approx(expected.confidence, abs=1e-5)
    assert loaded.generation_config.num_assistant_tokens == rig.BLOCK_SIZE


def word_tokenizer():
    model = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB_SIZE)}, unk_token="w0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="w0")


def test_a_text_generation_pipeline():
    target = rig.target()
    tokenizer = word_tokenizer()
    drafter = tiny.random_drafter(target)
    settings = {"do_sample": False, "max_new_tokens": 12}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    drafted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    text = "w5 w9 w77 w4"
    with record_speculation() as stats:
        assert drafted(text, **settings) == plain(text, **settings)
    assert stats.num_committed == 11  # The first token is the prompt's own.
    with record_speculation() as stats:
        drafted([text, "w1 w2"], **settings)
    assert stats.num_committed == 22


# ---------------------------------------------------------------------- threads


def test_two_threads_at_once():
    target = rig.target()
    drafters = [tiny.random_drafter(target, seed=seed) for seed in (0, 1)]
    prompts = [tiny.prompt(9, seed=seed) for seed in (0, 1)]
    expected = [target.generate(**p, do_sample=False, max_new_tokens=24) for p in prompts]
    results, stats = {}, {}

    def work(i):
        scope = record_speculation() if i == 0 else contextlib.nullcontext()
        with scope as stats[i]:
            for _ in range(3):
                results[i] = target.generate(
                    **prompts[i], do_sample=False, max_new_tokens=24, assistant_model=drafters[i]
                )

    with record_speculation() as outside:
        threads = [threading.Thread(target=work, args=(i,)) for i in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(results[i], expected[i]) for i in (0, 1))
    assert stats[0].num_committed == 3 * 23
    assert outside.rounds == []  # A thread records its own calls only.


def test_one_drafter_in_two_threads():
    target = rig.target()
    drafter = tiny.random_drafter(target)
    expected = target.generate(**tiny.prompt(), do_sample=False, max_new_tokens=24)
    results = []

    def work():
        results.append(target.generate(**tiny.prompt(), do_sample=False, max_new_tokens=24, assistant_model=drafter))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2 and all(torch.equal(r, expected) for r in results)
