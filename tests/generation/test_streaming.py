"""Streamers get single tokens, in order, and one `end()`, whatever happens."""

import threading

import pytest
import torch
from generation import rig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import tiny
from dspark_hf import dspark_generate


class Recorder(BaseStreamer):
    def __init__(self, fail_at=None):
        self.puts, self.ends, self.fail_at = [], 0, fail_at

    def put(self, value):
        assert self.ends == 0 and value.device.type == "cpu"
        if len(self.puts) == self.fail_at:
            raise RuntimeError("the client is gone")
        self.puts.append(value.tolist())

    def end(self):
        self.ends += 1


@pytest.fixture(scope="module")
def tokenizer():
    model = Tokenizer(models.WordLevel({f"w{i}": i for i in range(tiny.VOCAB_SIZE)}, unk_token="w0"))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="w0")


SETTINGS = {
    "plain": {},
    "a processor of tokens": {"repetition_penalty": 1.2},
    "an end inside a block": {"eos_token_id": 0},  # Filled in by the test.
    "with all outputs": {"return_dict_in_generate": True, "output_scores": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_put_is_what_plain_generate_puts(name):
    settings = SETTINGS[name]
    if "eos_token_id" in settings:
        text = rig.ids_of(rig.target().generate(**tiny.prompt(), max_new_tokens=16, do_sample=False))
        settings = {"eos_token_id": text[9 + 7], "pad_token_id": 0}
    streamers = []

    def fresh():
        streamers.append(Recorder())
        return {"streamer": streamers[-1]}

    outcome = rig.compare(rig.target(), None, fresh, **settings)
    plain = streamers[0]
    ids = rig.ids_of(outcome.plain)
    assert plain.puts == [[ids[:9]], *([t] for t in ids[9:])]
    for ours in streamers[1:]:
        assert ours.puts == plain.puts
        assert ours.ends == 1


@pytest.mark.parametrize("fail_at", [1, 2, 4, 6], ids=lambda n: f"at put {n}")
@pytest.mark.parametrize("kind", rig.KINDS)
def test_a_streamer_that_fails_is_ended(kind, fail_at):
    target = rig.target()
    text = rig.ids_of(target.generate(**tiny.prompt(), max_new_tokens=16, do_sample=False))
    streamer = Recorder(fail_at)
    with pytest.raises(RuntimeError, match="the client is gone"):
        target.generate(
            **tiny.prompt(), max_new_tokens=16, assistant_model=rig.drafter_of(kind, target, text), streamer=streamer
        )
    assert streamer.ends == 1
    assert streamer.puts == [[text[:9]], *([t] for t in text[9 : 8 + fail_at])]


def test_a_criterion_that_fails_ends_the_stream():
    def fails(input_ids, scores, **kwargs):
        raise RuntimeError("no")

    streamer, target = Recorder(), rig.target()
    with pytest.raises(RuntimeError, match="no"):
        target.generate(
            **tiny.prompt(),
            stopping_criteria=[fails],
            assistant_model=tiny.random_drafter(target),
            streamer=streamer,
        )
    assert streamer.ends == 1


@pytest.mark.parametrize(
    "settings",
    [{"num_assistant_tokens": 99}, {"num_beams": 2}, {"use_cache": False}],
    ids=["too many drafts", "beams", "no cache"],
)
def test_a_refused_call_ends_the_stream(settings):
    streamer = Recorder()
    rig.refusing(rig.target(), streamer=streamer, **settings)
    assert len(streamer.puts) == 1 and streamer.ends == 1  # The prompt was put.


def test_text_streamer(tokenizer, capsys):
    rig.compare(rig.target(), None, lambda: {"streamer": TextStreamer(tokenizer)})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 1 + len(rig.KINDS)
    assert len(set(printed)) == 1 and len(printed[0].split()) == 9 + rig.NEW_TOKENS


def test_text_iterator_streamer_in_a_thread(tokenizer):
    target = rig.target()
    plain = target.generate(**tiny.prompt(), max_new_tokens=16, do_sample=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    call = tiny.prompt() | {"max_new_tokens": 16, "do_sample": False, "streamer": streamer}
    thread = threading.Thread(target=target.generate, kwargs=call | {"assistant_model": tiny.random_drafter(target)})
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text.split() == tokenizer.decode(plain[0, 9:]).split()


def test_the_spelling_without_assistant_model_streams_too():
    streamer, target = Recorder(), rig.target()
    output = target.generate(
        **tiny.prompt(),
        max_new_tokens=8,
        do_sample=False,
        custom_generate=dspark_generate,
        drafter=tiny.random_drafter(target),
        streamer=streamer,
    )
    assert [t for (t,) in streamer.puts[1:]] == rig.ids_of(output)[9:]
    assert streamer.ends == 1


def test_sampled_tokens_are_streamed_as_they_are():
    streamer, target = Recorder(), rig.target()
    drafter = tiny.random_drafter(target)
    output = target.generate(
        **tiny.prompt(), max_new_tokens=16, do_sample=True, assistant_model=drafter, streamer=streamer
    )
    assert torch.equal(torch.tensor([[*streamer.puts[0][0], *(t for (t,) in streamer.puts[1:])]]), output)
