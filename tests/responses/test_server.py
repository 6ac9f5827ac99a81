"""A server answers in the place of the target, fails, refuses and is away."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any, ClassVar

import pytest
from responses.words import read_rows, rows_by_id

from dspark_hf.responses import server as regeneration_server
from dspark_hf.responses.server import ServerRegenerator
from dspark_hf.responses.settings import RegenerationSettings


class StubServer(http.server.BaseHTTPRequestHandler):
    """Answers with the words of the last message backwards, and otherwise to what `FAILURES` names; keeps what it got."""

    received: ClassVar[list[dict[str, Any]]] = []
    # What is answered to a message's first request (status, text), and whether to the later ones as well.
    FAILURES: ClassVar[dict[str, tuple[int, str, bool]]] = {
        "starting": (503, "", False),
        "waiting": (429, "", False),
        "page": (200, "<html>", False),
        "fault": (200, '{"error": "overloaded"}', False),
        "torn": (200, '{"choices": []}', False),
        "always": (200, "<html>", True),
        "no": (400, '{"error": "too long"}', True),
        "stranger": (401, '{"error": "who are you?"}', True),
    }

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append(body)
        text = body["messages"][-1]["content"]
        status, failure, again = self.FAILURES.get(text, (200, "", False))
        if text in self.FAILURES and (again or sum(b["messages"] == body["messages"] for b in self.received) == 1):
            return self.reply(status, failure, missing=100 if text == "torn" else 0)
        thoughts = {"reasoning_content": "hm"} if text == "think" else {}
        choice = {
            "message": {"content": " ".join(text.split()[::-1]), **thoughts},
            "finish_reason": "length" if text == "cut" else "stop",
        }
        return self.reply(200, json.dumps({"choices": [choice], "usage": {"completion_tokens": len(text.split())}}))

    def reply(self, status: int, text: str, missing: int = 0) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text) + missing))
        if status == 429:
            self.send_header("Retry-After", "7")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


class Impatient(threading.Event):
    """Notes what is waited for before a request is sent again, without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        return self.is_set()


def impatient(url: str) -> tuple[ServerRegenerator, list[float | None]]:
    """One request at a time, and what was waited for."""
    writer = ServerRegenerator(url, "x", RegenerationSettings(slots=1))
    writer.stopped = Impatient()
    return writer, writer.stopped.waits


@pytest.fixture
def server() -> Iterator[str]:
    StubServer.received.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), StubServer) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{stub.server_port}"
        stub.shutdown()


def test_a_server_answers_in_the_targets_place(server: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"prompt": "a b"},
        {"prompt": "no"},
        {"prompt": "cut"},
        {"turns": ["c d", "e f"]},
        {"turns": ["cut", "g h"]},
        {"turns": ["i j", "no"]},
    ]
    settings = RegenerationSettings(temperature=0.6, top_k=0, max_new_tokens=7, enable_thinking=False, slots=3)
    writer = ServerRegenerator(f"{server}/v1/", "some-target", settings)
    assert writer.run(rows, tmp_path / "out.jsonl", progress=False) == 5
    written = {row["id"]: row for row in read_rows(tmp_path / "out.jsonl")}
    assert {i: row["response"] for i, row in written.items()} == {0: "b a", 2: "cut", 3: "f e", 4: "cut", 5: "j i"}
    assert [i for i, row in sorted(written.items()) if not row["finished"]] == [2, 4]
    assert [message["content"] for message in written[3]["messages"]] == ["c d", "d c", "e f"]
    assert "Prompt 1 is skipped" in caplog.text
    assert "Prompt 5 ends after 1 of its turns" in caplog.text
    body = StubServer.received[0]
    assert (body["model"], body["max_tokens"], body["temperature"], body["top_k"]) == ("some-target", 7, 0.6, -1)
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert "top_p" not in body


def test_failed_requests_are_repeated(server: str, tmp_path: Path) -> None:
    words = ["starting", "page", "fault", "torn", "waiting"]
    writer, waits = impatient(server)
    assert writer.run([{"prompt": word} for word in words], tmp_path / "out.jsonl", progress=False) == 5
    assert [row["response"] for row in rows_by_id(tmp_path / "out.jsonl")] == words
    assert sorted(waits) == [1, 1, 1, 1, 7]  # the last as its Retry-After says


def test_a_busy_server_is_waited_for_in_minutes() -> None:
    assert sum(regeneration_server.BUSY_WAITS_S) > 300


def test_a_server_that_never_answers_ends_the_run_clearly(server: str, tmp_path: Path) -> None:
    writer, waits = impatient(server)
    with pytest.raises(ConnectionError, match=r"after 4 tries \(its reply is not valid JSON"):
        writer.run([{"prompt": "always"}], tmp_path / "out.jsonl", progress=False)
    assert waits == list(regeneration_server.AWAY_WAITS_S)


def test_a_server_that_refuses_everything_ends_the_run_at_once(server: str, tmp_path: Path) -> None:
    rows = [{"prompt": "stranger"}] * 40
    with pytest.raises(ValueError, match=r"HTTP 401: .*who are you.*Check the address, the API key"):
        ServerRegenerator(server, "x", RegenerationSettings(slots=2)).run(rows, tmp_path / "out.jsonl", progress=False)
    assert len(StubServer.received) < 40


def test_thoughts_that_a_server_splits_off_are_not_dropped_silently(server: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="without a reasoning parser"):
        ServerRegenerator(server, "x").run([{"prompt": "think"}], tmp_path / "out.jsonl", progress=False)


@pytest.mark.parametrize(("header", "seconds"), [(None, 0), ("120", 120), ("soon", 0)])
def test_retry_after_in_seconds(header: str | None, seconds: float) -> None:
    assert regeneration_server.retry_after_s(header) == seconds


@pytest.mark.parametrize(("ahead_s", "seconds"), [(900, 900), (-900, 0)])
def test_retry_after_as_a_date(ahead_s: float, seconds: float) -> None:
    date = formatdate(time.time() + ahead_s, usegmt=True)
    assert regeneration_server.retry_after_s(date) == pytest.approx(seconds, abs=60)


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match=r"No answer from http://127\.0\.0\.1:9/v1"):
        impatient("http://127.0.0.1:9")[0].run([{"prompt": "a"}], tmp_path / "out.jsonl", progress=False)
    with pytest.raises(ValueError, match="http:// or https:// in front"):
        ServerRegenerator("127.0.0.1:9", "x")
