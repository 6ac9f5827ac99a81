"""`attach`: every `generate` of a target drafts, and nothing that works without it stops working."""

import copy
import io
import pickle
import threading

import pytest
import tiny_folders
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TextIteratorStreamer,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

import dspark_hf
import tiny
from dspark_hf.generation.attached import attachment_of
from dspark_hf.scheduling import FixedLength
from dspark_hf.transformers_names import CACHE_KEY

pytestmark = pytest.mark.integration
NEW = 24


@pytest.fixture
def target():
    return tiny.qwen3().eval()


@pytest.fixture
def drafter(target):
    return tiny.random_drafter(target)


@pytest.fixture
def prompt():
    return torch.tensor([[5, 17, 80, 33, 61, 2, 9]])


def generate(target, prompt, **kwargs):
    return target.generate(prompt, **{"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None} | kwargs)


def rounds_of(target, prompt, **kwargs):
    with dspark_hf.record_speculation() as stats:
        out = generate(target, prompt, **kwargs)
    return out, stats.rounds


class Warnings(list):
    def __call__(self, message, *args, **kwargs):
        self.append(message)


@pytest.fixture
def warned(monkeypatch):
    found = Warnings()
    monkeypatch.setattr("dspark_hf.generation.attached.logger.warning", found)
    return found


# ---------------------------------------------------------------------- drafting


def test_generate_drafts_until_detached(target, drafter, prompt):
    plain = generate(target, prompt)
    dspark_hf.attach(target, drafter, drafting_backoff=False)
    out, rounds = rounds_of(target, prompt)
    assert rounds and out.equal(plain) and rounds[0].verified == drafter.config.num_draft_tokens
    dspark_hf.detach(target)
    out, rounds = rounds_of(target, prompt)
    assert not rounds and out.equal(plain)
    dspark_hf.detach(target)  # Harmless.


def test_settings_are_given_once_and_a_call_may_change_them(target, drafter, prompt):
    with dspark_hf.attach(target, drafter, num_assistant_tokens=2, drafting_backoff=False):
        assert {r.drafted for r in rounds_of(target, prompt)[1][:-2]} == {2}
        assert {r.drafted for r in rounds_of(target, prompt, num_assistant_tokens=1)[1][:-2]} == {1}
        assert {r.drafted for r in rounds_of(target, prompt, drafting_backoff=False)[1][:-2]} == {2}


def test_a_setting_of_a_call_replaces_the_attached_one(target, prompt):
    drafter = tiny.random_drafter(target, enable_confidence_head=True)
    seen = []

    class Scheduler(FixedLength):
        def start(self):
            seen.append(self)

    scheduler = Scheduler()
    with dspark_hf.attach(target, drafter, verify_scheduler=scheduler, drafting_backoff=False):
        generate(target, prompt)
        assert seen == [scheduler]
        generate(target, prompt, assistant_confidence_threshold=0.5)
        generate(target, prompt, verify_scheduler="threshold")
        assert seen == [scheduler]
    with dspark_hf.attach(target, drafter, assistant_confidence_threshold=0.5, drafting_backoff=False):
        generate(target, prompt, verify_scheduler=scheduler)
        assert seen == [scheduler] * 2


def test_a_call_within_a_call_gets_a_scheduler_of_its_own(target, drafter, prompt):
    seen = []

    class Scheduler(FixedLength):
        def start(self):
            seen.append(self)

    class Asks(LogitsProcessor):  # Generates with the same model while it is generating, in another thread.
        def __call__(self, input_ids, scores):
            if len(seen) < 2:
                thread = threading.Thread(target=generate, args=(target, prompt))
                thread.start()
                thread.join(timeout=60)
                assert not thread.is_alive()
            return scores

    plain = generate(target, prompt)
    with dspark_hf.attach(target, drafter, verify_scheduler=Scheduler(), drafting_backoff=False):
        assert generate(target, prompt, logits_processor=LogitsProcessorList([Asks()])).equal(plain)
    assert len({id(scheduler) for scheduler in seen}) == 2


def test_context_managers_nest(target, prompt):
    first, second = tiny.random_drafter(target), tiny.random_drafter(target)
    with dspark_hf.attach(target, first):
        with dspark_hf.attach(target, second):
            assert attachment_of(target).drafter is second
        assert attachment_of(target).drafter is first
    assert attachment_of(target) is None


def test_an_attachment_can_end_before_those_made_later(target, drafter):
    first, second = dspark_hf.attach(target, drafter), dspark_hf.attach(target, tiny.random_drafter(target))
    first.detach()
    assert attachment_of(target) is second
    second.detach()
    assert attachment_of(target) is None
    with first:  # Attaches again.
        assert attachment_of(target) is first
    assert attachment_of(target) is None
    dspark_hf.attach(target, drafter), dspark_hf.attach(target, drafter)
    dspark_hf.detach(target)
    assert attachment_of(target) is None


def test_two_models(target, drafter, prompt):
    other = tiny.qwen3().eval()
    with dspark_hf.attach(target, drafter):
        assert not rounds_of(other, prompt)[1]
        with dspark_hf.attach(other, tiny.random_drafter(other)):
            assert rounds_of(other, prompt)[1] and rounds_of(target, prompt)[1]


@pytest.mark.parametrize("num_rows", [1, 3])
def test_sampling_draws_the_same_tokens_as_an_assistant(target, drafter, prompt, num_rows):
    prompts = (prompt.expand(num_rows, -1) + torch.arange(num_rows)[:, None]) % tiny.VOCAB_SIZE
    torch.manual_seed(0)
    expected = generate(target, prompts, do_sample=True, assistant_model=drafter)
    with dspark_hf.attach(target, drafter):
        torch.manual_seed(0)
        assert generate(target, prompts, do_sample=True).equal(expected)


# ---------------------------------------------------------------------- calls that run plainly


class Tokens(BaseStreamer):
    def __init__(self):
        self.seen, self.ended = [], 0

    def put(self, value):
        self.seen += value.flatten().tolist()

    def end(self):
        self.ended += 1


PLAIN = {
    "beams": {"num_beams": 2},
    "beams in a configuration": {"generation_config": GenerationConfig(num_beams=2, max_new_tokens=NEW)},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
    "attention weights": {"output_attentions": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("case", PLAIN)
def test_what_is_refused_elsewhere_runs_plainly_with_one_warning(target, drafter, prompt, warned, case):
    target.set_attn_implementation("eager")
    prompts = prompt.repeat(2, 1) if case == "attention weights" else prompt
    options = PLAIN[case]
    plain = generate(target, prompts, **options)
    with dspark_hf.attach(target, drafter):
        for length in (0, 1):  # The second reason has another length in it at most.
            out, rounds = rounds_of(target, prompts[:, length:], **options)
            assert not rounds
            if not length:
                sequences = [x if isinstance(x, torch.Tensor) else x.sequences for x in (plain, out)]
                assert sequences[0].equal(sequences[1])
    assert len(warned) == 1 and "without the attached drafter" in warned[0]


# Settings that other assistants take, and that ours does not.
FOREIGN = {
    "more drafts than a block has": {"num_assistant_tokens": 50},
    "a threshold above 1": {"assistant_confidence_threshold": 2.0},
    "a threshold and a scheduler": {"assistant_confidence_threshold": 0.3, "verify_scheduler": "fixed"},
    "an unknown scheduler": {"verify_scheduler": "none such"},
    "a setting of another type": {"num_assistant_tokens": "many"},
}


@pytest.mark.parametrize("where", ["call", "configuration", "model"])
@pytest.mark.parametrize("case", FOREIGN)
def test_settings_for_other_assistants_break_nothing(target, drafter, prompt, warned, case, where):
    plain = generate(target, prompt)
    if where == "call":
        options = FOREIGN[case]
    elif where == "configuration":
        options = {"generation_config": GenerationConfig(**FOREIGN[case])}
    else:
        options = {}
        for name, value in FOREIGN[case].items():
            setattr(target.generation_config, name, value)
    with dspark_hf.attach(target, drafter):
        assert generate(target, prompt, **options).equal(plain)
    assert len(warned) == (where != "model")
    assert not any("assistant_model=" in message for message in warned)


def test_changes_after_attaching_break_nothing(prompt, warned):
    target = tiny.qwen3().eval()
    drafter = tiny.random_drafter(target)
    with dspark_hf.attach(target, drafter):
        drafter.generation_config.num_assistant_tokens = 50
        assert generate(target, prompt).equal(generate(copy.deepcopy(target), prompt))
        drafter.generation_config.num_assistant_tokens = None
        target.resize_token_embeddings(tiny.VOCAB_SIZE + 3)
        assert generate(target, prompt).equal(generate(copy.deepcopy(target), prompt))
        drafter.to("meta")
        assert generate(target, prompt).equal(generate(copy.deepcopy(target), prompt))
    assert len(warned) == 3


def test_another_assistant_runs(target, drafter, prompt, warned):
    plain = generate(target, prompt)
    with dspark_hf.attach(target, drafter):
        out, rounds = rounds_of(target, prompt, assistant_model=tiny.qwen3().eval())
        assert out.equal(plain) and not rounds and "assistant_model" in warned[0]
        out, rounds = rounds_of(target, prompt, assistant_model=drafter)
        assert out.equal(plain) and rounds and len(warned) == 1


def test_settings_of_drafting_do_not_reach_plain_generate(target, drafter, prompt):
    with dspark_hf.attach(target, drafter):
        generate(target, prompt, num_beams=2, verify_scheduler="threshold", drafting_backoff=False)


@pytest.mark.parametrize("options", [{}, {"use_cache": False}], ids=["drafting", "plain"])
def test_a_streamer_sees_each_token_once(target, drafter, prompt, warned, options):
    streamer = Tokens()
    with dspark_hf.attach(target, drafter):
        out = generate(target, prompt, streamer=streamer, **options)
    assert streamer.seen == out[0].tolist() and streamer.ended == 1 and bool(warned) == bool(options)


def test_errors_of_plain_generate_stay(target, drafter, prompt):
    with dspark_hf.attach(target, drafter):
        with pytest.raises(ValueError, match="no_such_argument"):
            generate(target, prompt, no_such_argument=1)
        with pytest.raises(ValueError, match="tokenizer"):
            generate(target, prompt, stop_strings=["x"])


def test_a_callers_cache_is_as_after_plain_generate(target, drafter, prompt, warned):
    caches = [DynamicCache(config=target.config) for _ in range(2)]
    plain = generate(target, prompt, **{CACHE_KEY: caches[0]})
    with dspark_hf.attach(target, drafter):
        out = generate(target, prompt, **{CACHE_KEY: caches[1]})
        assert out.equal(plain) and caches[0].get_seq_length() == caches[1].get_seq_length()
        longer = torch.cat([out, prompt], dim=1)
        again = generate(target, longer, **{CACHE_KEY: caches[1]})
    assert again.equal(generate(target, longer, **{CACHE_KEY: caches[0]})) and not warned


# ---------------------------------------------------------------------- the drafter is no part of the target


def test_the_target_is_the_same_with_and_without(target, drafter, tmp_path):
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    config = copy.deepcopy(target.generation_config.to_dict())
    hooks = sum(len(module._forward_hooks) for module in target.modules())
    with dspark_hf.attach(target, drafter):
        generate(target, torch.tensor([[1, 2, 3]]))
        assert sum(len(module._forward_hooks) for module in target.modules()) == hooks == 0
        assert target.state_dict().keys() == before.keys()
        assert not {id(p) for p in drafter.parameters()} & {id(p) for p in target.parameters()}
        assert target.generation_config.to_dict() == config
        for copied in (copy.deepcopy(target), pickle.loads(pickle.dumps(target))):
            assert attachment_of(copied) is None
            assert not rounds_of(copied, torch.tensor([[1, 2, 3]]))[1]
        target.save_pretrained(tmp_path)
        assert not any("draft" in file.name for file in tmp_path.iterdir())


def test_a_deleted_target_is_not_kept(prompt):
    import gc
    import weakref

    target = tiny.qwen3().eval()
    dspark_hf.attach(target, tiny.random_drafter(target)).detach()
    dspark_hf.attach(target, tiny.random_drafter(target))
    generate(target, prompt)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None


def test_threads(target, drafter, prompt):
    plain = [generate(target, (prompt + i) % tiny.VOCAB_SIZE) for i in range(4)]
    found = [None] * 4

    def work(i):
        found[i] = generate(target, (prompt + i) % tiny.VOCAB_SIZE)

    with dspark_hf.attach(target, drafter):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert all(out.equal(expected) for out, expected in zip(found, plain, strict=True))


def test_a_stream_from_another_thread_ends(target, drafter, prompt):
    streamer = TextIteratorStreamer(tiny_folders.tokenizer(), skip_prompt=True, timeout=60)
    with dspark_hf.attach(target, drafter):
        thread = threading.Thread(target=generate, args=(target, prompt), kwargs={"streamer": streamer})
        thread.start()
        text = "".join(streamer)
        thread.join()
    assert len(text) > 0


# ---------------------------------------------------------------------- wrapped targets


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's call, not ours.
def test_a_target_wrapped_by_peft(target, prompt):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        target, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    ).eval()
    plain = generate(wrapped, prompt)
    with dspark_hf.attach(wrapped, tiny.random_drafter(target)):
        out, rounds = rounds_of(wrapped, prompt)
    assert rounds and out.equal(plain)


def test_a_pipeline_drafts(tmp_path):
    folders = tiny_folders.save(tmp_path)
    pipe = pipeline("text-generation", model=str(folders.target), device="cpu")
    options = {"max_new_tokens": NEW, "do_sample": False, "return_full_text": False}
    plain = pipe("what?", **options)
    drafter = dspark_hf.Drafter.from_pretrained(folders.perfect)
    with dspark_hf.attach(pipe.model, drafter), dspark_hf.record_speculation() as stats:
        assert pipe("what?", **options) == plain
    assert stats.acceptance_length > 2


# ---------------------------------------------------------------------- mistakes


WRONG_SETTINGS = [
    ("num_assistant_tokens", "a"),
    ("num_assistant_tokens", 2.5),
    ("num_assistant_tokens", True),
    ("assistant_confidence_threshold", "a"),
    ("assistant_confidence_threshold", 1.5),
    ("verify_scheduler", 3),
    ("drafting_backoff", "no"),
]


def test_mistakes_are_found_when_attaching(target, drafter):
    with pytest.raises(TypeError, match="num_drafts"):
        dspark_hf.attach(target, drafter, num_drafts=3)
    with pytest.raises(ValueError, match="num_assistant_tokens=99"):
        dspark_hf.attach(target, drafter, num_assistant_tokens=99)
    for wrong, given in ((target, "Qwen3ForCausalLM"), ("a/path", "str"), (dspark_hf.Drafter, "the class Drafter")):
        with pytest.raises(ValueError, match=f"takes a loaded drafter of dspark_hf, got {given}"):
            dspark_hf.attach(target, wrong)
    with pytest.raises(ValueError, match="must be a model of transformers, not BytesIO"):
        dspark_hf.attach(io.BytesIO(), drafter)
    for name, value in WRONG_SETTINGS:
        with pytest.raises(ValueError, match=f"{name}="):
            dspark_hf.attach(target, drafter, **{name: value})
        with pytest.raises(ValueError, match=f"{name}="):
            generate(target, torch.tensor([[1, 2]]), assistant_model=drafter, **{name: value})
    other = tiny.qwen3(hidden_size=64)
    with pytest.raises(ValueError, match="hidden states of width"):
        dspark_hf.attach(other, drafter)
    assert attachment_of(target) is None
