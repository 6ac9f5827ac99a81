"""`dspark-hf chat` in a real terminal: what a person sees there, and what their keys do."""

import io
import re
import signal
import threading

import pytest
import tiny_folders

pytest.importorskip("rich")
pytest.importorskip("pexpect")

import pyte
import torch
from rich.console import Console
from terminal import Terminal

from dspark_hf import SpeculationStats
from dspark_hf_cli.chat_session import LiveAnswer, interruptible

DRAFTED, OWN = "0087ff", "ff8700"
FIGURES = re.compile(r"^(\d+) tokens, [\d.]+ tokens/s")


def colours(row) -> set[str]:
    return {cell.fg for cell in row if cell.data.strip()}


def figures(lines: list[str]) -> list[int]:
    """Of each line with figures: its number of tokens."""
    return [int(found[1]) for line in lines if (found := FIGURES.match(line))]


@pytest.fixture(scope="module")
def chat(tmp_path_factory):
    """Two answers, one of them with the drafter off, and one that is interrupted."""
    folders = tiny_folders.save(tmp_path_factory.mktemp("models"))
    models = ["--target", str(folders.target), "--drafter", str(folders.random), "--device", "cpu"]
    terminal = Terminal(["chat", *models, "--max-new-tokens", "150", "--threads", "1"], columns=60, rows=12)
    growing = []

    def has_figures():
        growing.extend(figures(terminal.screen.display)[-1:])
        return terminal.is_at_prompt

    terminal.read_answer()
    terminal.say("Hello")
    terminal.read_until(has_figures)
    terminal.say("/plain")
    terminal.read_answer()
    terminal.say("And now?")
    terminal.read_answer()
    terminal.say("/plain")
    terminal.read_answer()
    before = len(figures(terminal.lines))
    terminal.say("Once more")
    terminal.read_until(lambda: len(figures(terminal.lines)) > before and figures(terminal.lines)[-1] > 1)
    terminal.process.sendintr()
    terminal.read_answer()
    terminal.rest()
    terminal.process.sendintr()
    terminal.rest()
    return terminal, growing, terminal.end()


def test_figures_change_while_the_answer_grows_and_stand_once_when_it_is_finished(chat):
    terminal, growing, _ = chat
    assert len(set(growing)) > 2
    assert figures(terminal.lines)[:2] == [150, 150]
    assert len(figures(terminal.lines)) == 3


def test_tokens_are_tinted_by_who_wrote_them(chat):
    terminal, _, _ = chat
    questions = [i for i, line in enumerate(terminal.lines) if line.startswith("> ") and line.strip() != ">"]
    drafted, plain = terminal.rows[questions[0] + 1], terminal.rows[questions[2] + 1]
    assert colours(drafted) <= {DRAFTED, OWN} and OWN in colours(drafted)
    assert colours(plain) == {OWN}
    legend = next(row for row, line in zip(terminal.rows, terminal.lines) if line.startswith("drafted tokens"))
    assert {DRAFTED, OWN} < colours(legend)


def test_plain_says_so_and_shows_no_drafts(chat):
    text = " ".join(" ".join(chat[0].lines).split())
    assert "drafter off" in text and "drafter on" in text
    assert text.count("of drafts accepted") == 2


def test_an_interrupt_ends_the_answer_and_ctrl_d_the_program(chat):
    terminal, _, exit_code = chat
    assert figures(terminal.lines)[2] < 150
    assert [line.strip() for line in terminal.lines if line.strip()][-3:] == ["(interrupted)", ">", ">"]
    assert exit_code == 0
    assert terminal.screen.cursor.x == 0


# ---------------------------------------------------------------------- the display alone


def shown(text: str, columns: int, rows: int) -> tuple[list[str], list[str]]:
    """What stands on a terminal of that size when `text` has been written, and after it is finished."""
    screen = pyte.HistoryScreen(columns, rows, history=1000)
    stream = pyte.Stream(screen)
    file = io.StringIO()
    console = Console(file=file, width=columns, height=rows, force_terminal=True, color_system="256")

    def lines() -> list[str]:
        stream.feed(file.getvalue().replace("\n", "\r\n"))
        file.seek(0)
        file.truncate()
        history = ["".join(row[x].data for x in range(columns)) for row in screen.history.top]
        return [line.rstrip() for line in [*history, *screen.display] if line.strip()]

    with LiveAnswer(tiny_folders.tokenizer(), SpeculationStats(), console) as answer:
        answer.num_tokens = 3
        for word in re.findall(r"\S+\s*", text):
            answer.on_text(word, drafted=True)
            answer._live.refresh()
        growing = lines()
    return growing, lines()


def test_a_long_answer_scrolls_and_stands_there_once():
    wanted = [f"line {i}" for i in range(40)]
    growing, finished = shown("\n".join(wanted), columns=40, rows=8)
    assert growing[-1].startswith("3 tokens") and growing[-2] == "line 39"
    assert finished[:-1] == wanted


def test_a_line_longer_than_the_screen_is_complete_at_the_end():
    text = " ".join(f"word{i}" for i in range(200))
    growing, finished = shown(text, columns=30, rows=6)
    assert "word199" in growing[-2]
    assert " ".join(finished[:-1]).split() == text.split()


def test_figures_that_wrap_keep_their_place():
    growing, finished = shown("a b c " * 20, columns=12, rows=6)
    assert re.search(r"c 3 tokens, [\d.]+ tokens/s$", " ".join(growing))
    assert (
        sum(re.search(r"(?<![\d.])3 tokens", line) is not None for line in finished) == 1
    )  # No rate such as 0.3 tokens/s.


def test_what_was_said_before_an_interrupt_stays_in_the_conversation(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from dspark_hf import DSparkDrafter
    from dspark_hf_cli.chat_session import ChatSession, PrintedAnswer

    folders = tiny_folders.save(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(folders.target)
    drafter = DSparkDrafter.from_pretrained(folders.random)
    tokenizer = AutoTokenizer.from_pretrained(folders.target)

    def session():
        return ChatSession(target, tokenizer, drafter, None, 20, 0.0, None, live=False)

    broken, stop = session(), threading.Event()
    genuine = PrintedAnswer.put

    def put(self, value: torch.Tensor) -> None:
        genuine(self, value)
        if self.num_tokens >= 9:
            stop.set()

    monkeypatch.setattr(PrintedAnswer, "put", put)
    said = broken.answer("Hello", stop)
    monkeypatch.undo()
    whole = session().answer("Hello", threading.Event())
    assert said and whole.startswith(said) and len(said) < len(whole)
    # What follows is what follows that conversation.
    following = broken.answer("Go on", threading.Event())
    prompt = torch.tensor([broken._chat.token_ids[:-20]])
    plain = target.generate(prompt, max_new_tokens=20, do_sample=False)
    assert tokenizer.decode(plain[0, -20:], skip_special_tokens=True) == following


def test_a_second_interrupt_raises():
    before = signal.getsignal(signal.SIGINT)
    with interruptible() as stop, pytest.raises(KeyboardInterrupt):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        assert stop.is_set()
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
