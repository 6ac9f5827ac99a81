"""Text comes out whole, in order, and each token in the colour of who made it."""

import io

import pytest
import torch

import tiny
from dspark_hf import record_speculation
from dspark_hf.generation.streamer import DRAFTED_STYLE, OWN_STYLE, RESET, DraftTintStreamer, wants_color


class Letters:
    """Decodes each id to one letter, and 200 + n to byte n of a UTF-8 character, as byte-level tokenizers do."""

    EURO = [200, 201, 202]

    def decode(self, ids, skip_special_tokens=False):
        raw = b"".join("€".encode()[i - 200 : i - 199] if i >= 200 else chr(0x100 + i).encode() for i in ids)
        return raw.decode(errors="replace")


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Recorded(DraftTintStreamer):
    def on_text(self, text, drafted):
        self.pieces = [*getattr(self, "pieces", []), (text, drafted)]


def streamed(streamer, *values):
    for value in values:
        streamer.put(torch.tensor(value))


def test_drafted_tokens_and_the_targets_tokens_have_different_colours():
    streamer = DraftTintStreamer(Letters(), skip_prompt=True, file=io.StringIO(), color=True)
    streamed(streamer, [[1, 2]])
    streamer.next_are_drafted(1)
    streamed(streamer, [3], [4])
    streamer.end()
    assert streamer.file.getvalue() == f"{DRAFTED_STYLE}\u0103{RESET}{OWN_STYLE}\u0104{RESET}\n"


def test_a_character_waits_for_its_last_token():
    streamer = Recorded(Letters(), skip_prompt=False, file=io.StringIO())
    streamed(streamer, [[1]])
    streamer.next_are_drafted(2)
    streamed(streamer, [200], [201], [202], [2])
    assert streamer.pieces == [("\u0101", False), ("€", False), ("\u0102", False)]


def test_an_incomplete_character_is_printed_at_the_end():
    streamer = Recorded(Letters(), file=io.StringIO())
    streamed(streamer, [[1]], [200])
    streamer.end()
    assert streamer.pieces == [("\u0101", False), ("\N{REPLACEMENT CHARACTER}", False)]


def test_several_rows_are_refused():
    with pytest.raises(ValueError, match="one row, got 2"):
        DraftTintStreamer(Letters()).put(torch.ones(2, 3, dtype=torch.long))


def test_colour_is_for_terminals_that_want_it(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert wants_color(Terminal()) and not wants_color(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not wants_color(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not wants_color(Terminal())


@pytest.mark.parametrize("processor", [{}, {"repetition_penalty": 1.1}], ids=["together", "one_by_one"])
@pytest.mark.parametrize("max_new_tokens", [11, 12, 13])
def test_the_loop_says_which_tokens_were_drafted(processor, max_new_tokens):
    target = tiny.bigram()
    drafter = tiny.perfect_drafter(target)
    streamer = Recorded(Letters(), skip_prompt=True, file=io.StringIO())
    arguments = tiny.prompt() | processor | {"do_sample": False, "max_new_tokens": max_new_tokens}
    with record_speculation() as stats:
        output = target.generate(**arguments, assistant_model=drafter, streamer=streamer)
    assert "".join(text for text, _ in streamer.pieces) == Letters().decode(output[0, 9:].tolist())
    expected = [False]
    for r in stats.rounds:
        expected += [True] * r.accepted + [False] * (r.committed - r.accepted)
    assert [drafted for _, drafted in streamer.pieces] == expected
    assert any(expected)


def test_plain_generate_streams_every_token_in_the_targets_colour():
    target, streamer = tiny.qwen3(), Recorded(Letters(), skip_prompt=True, file=io.StringIO())
    output = target.generate(**tiny.prompt(), do_sample=False, max_new_tokens=5, streamer=streamer)
    assert streamer.pieces == [(Letters().decode([i]), False) for i in output[0, 9:].tolist()]
