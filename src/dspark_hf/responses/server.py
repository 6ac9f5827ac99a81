"""Responses from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) that runs the target, several requests at a time.

It uses urllib and not httpx, because huggingface-hub brings httpx only in version 1 (httpx2 in version 2), and a POST with a
timeout does not justify another dependency. `top_k` and the thinking switch have the names that vLLM and SGLang read. Other
servers may ignore or refuse these fields.

A request may fail in three ways. If the server refuses this prompt (for instance because it is too long), it is skipped. If the
server refuses every request (a wrong key, name or address), the run ends. If the server is away or busy, the request is sent
again after increasing waits, or after the time that the server asks for; a busy server is waited for longer than one that does
not answer.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from email.utils import mktime_tz, parsedate_tz
from http.client import HTTPException
from typing import Any, NoReturn

from ..conversations.prompts import Conversation, Unanswerable, without_ids
from ..conversations.templates import thinking_switch
from .settings import DEFAULT_MAX_NEW_TOKENS, RegenerationSettings, request_seed
from .writer import ResponseWriter

logger = logging.getLogger(__name__)

AWAY_WAITS_S = (1.0, 4.0, 16.0)
BUSY_WAITS_S = (1.0, 4.0, 16.0, *[60.0] * 9)
REFUSES_PROMPT = (400, 413, 422)
BUSY = (429, 503)


class Unavailable(ConnectionError):
    """The server is away or busy, so the same request may be answered later, not before `after_s` seconds."""

    def __init__(self, reason: object, busy: bool = False, after_s: float = 0.0) -> None:
        super().__init__(str(reason))
        self.busy = busy
        self.after_s = after_s


class ServerRegenerator(ResponseWriter):
    """Answers prompts through `POST /v1/chat/completions`.

    Args:
        url: the server's address, with or without `/v1`.
        model: the name the server knows the target by.
        settings: settings of generation. Sampling fields that are None are not sent, so the server's defaults apply;
            `slots` is the number of simultaneous requests. Servers return text, so there are no token ids.
        api_key: sent as a bearer token, if given.
        timeout_s: the longest time for one response.

    Raises:
        ValueError: the address does not start with http:// or https://.
    """

    def __init__(
        self,
        url: str,
        model: str,
        settings: RegenerationSettings | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"The server's address is '{url}'; give it with http:// or https:// in front.")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self.model = model
        self.settings = settings or RegenerationSettings()
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.timeout_s = timeout_s
        self.stopped = threading.Event()  # set when the run ends, so that waiting requests give up

    def origin(self) -> dict[str, Any]:
        return {"target": self.model, "seed": self.settings.seed, **self.fields()}

    def answer(
        self, conversations: list[Conversation], on_tokens: Callable[[int], None]
    ) -> Iterator[dict[str, Any] | None]:
        self.stopped.clear()
        pool = ThreadPoolExecutor(self.settings.slots)
        try:
            for future in as_completed([pool.submit(self.converse, each, on_tokens) for each in conversations]):
                yield future.result()
        finally:
            self.stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def converse(self, conversation: Conversation, on_tokens: Callable[[int], None]) -> dict[str, Any] | None:
        """Asks all turns of a conversation and returns its output row, or None if the server refused the first turn."""
        while True:
            try:
                response, finished, count = self.complete(conversation)
            except Unanswerable as reason:
                conversation.give_up(reason)
                break
            conversation.add(response, finished)
            on_tokens(count)
            if not conversation.next_turn():
                break
        return conversation.output_row() if conversation.num_responses else None

    def complete(self, conversation: Conversation) -> tuple[str, bool, int]:
        """One response: its text, whether it ended with an end-of-sequence token, and its number of tokens."""
        seed = request_seed(self.settings.seed, conversation.id, conversation.num_responses) % 2**31
        messages = without_ids(conversation.messages)
        reply = self.post(
            json.dumps({"model": self.model, "messages": messages, "seed": seed, **self.fields()}).encode()
        )
        choice = reply["choices"][0]
        message = choice["message"]
        if message.get("reasoning_content") or message.get("reasoning"):
            raise ValueError(
                f"{self.url} returns the target's thoughts separately from its answer, so what the target wrote is not known "
                "token by token. Start the server without a reasoning parser (llama.cpp: --reasoning-format none), so that "
                "the thoughts stay in the text, or turn thinking off (--no-thinking)."
            )
        count = (reply.get("usage") or {}).get("completion_tokens", 0)
        return message.get("content") or "", choice.get("finish_reason") == "stop", count

    def fields(self) -> dict[str, Any]:
        """The fields of a request that depend on the settings."""
        settings = self.settings
        fields: dict[str, Any] = {
            "max_tokens": settings.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            "temperature": 0.0 if settings.do_sample is False else settings.temperature,
            "top_p": settings.top_p,
            "top_k": -1 if settings.top_k == 0 else settings.top_k,
        }
        if thinking := thinking_switch(settings.enable_thinking):
            fields["chat_template_kwargs"] = thinking
        return {name: value for name, value in fields.items() if value is not None}

    def post(self, body: bytes) -> dict[str, Any]:
        """Sends a request, again if the server is busy or away.

        Raises:
            Unanswerable: the server refuses this request.
            ValueError: it would refuse every request.
            ConnectionError: it stays away or busy.
        """
        tries = 0
        while True:
            try:
                return self.send(body)
            except Unavailable as reason:
                waits_s = BUSY_WAITS_S if reason.busy else AWAY_WAITS_S
                tries += 1
                # `wait` returns True if the run has ended meanwhile.
                if tries > len(waits_s) or self.stopped.wait(max(waits_s[tries - 1], reason.after_s)):
                    raise ConnectionError(
                        f"No answer from {self.url} after {tries} tries ({reason}). Start the server, or check the "
                        "address; what is written so far is kept, and the same command resumes from there."
                    ) from reason

    def send(self, body: bytes) -> dict[str, Any]:
        """Sends a request once; errors as in `post`, and `Unavailable` if another try may help."""
        request = urllib.request.Request(self.url, body, self.headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            self.refuse(error)
        except (OSError, HTTPException) as error:  # refused, reset, timed out, no such host; broken off
            raise Unavailable(f"{type(error).__name__}: {error}") from error
        except ValueError as error:
            raise Unavailable(f"its reply is not valid JSON: {error}") from error
        choices = answer.get("choices") if isinstance(answer, dict) else None
        if not choices or "message" not in choices[0]:
            raise Unavailable(f"its reply has no message in 'choices': {json.dumps(answer)[:300]}")
        return answer

    def refuse(self, error: urllib.error.HTTPError) -> NoReturn:
        """Raises the exception for an HTTP error."""
        reason = explain(error)
        if error.code in REFUSES_PROMPT:
            raise Unanswerable(f"the server refused it ({reason})") from error
        if error.code in BUSY or error.code >= 500 or error.code == 408:
            raise Unavailable(reason, error.code in BUSY, retry_after_s(error.headers.get("Retry-After"))) from error
        raise ValueError(
            f"{self.url} refuses requests for '{self.model}' ({reason}). Check the address, the API key and the name that "
            "the server knows the target by; what is written so far is kept."
        ) from error


def explain(error: urllib.error.HTTPError) -> str:
    try:
        text = error.read(300).decode(errors="replace").strip()
    except (OSError, HTTPException):  # broken off
        text = ""
    return f"HTTP {error.code}: {text or error.reason}"


def retry_after_s(header: str | None) -> float:
    """Seconds to wait according to a `Retry-After` header with seconds or a date (RFC 9110, 10.2.3); 0 for anything else."""
    if header is None:
        return 0.0
    if header.strip().isdecimal():
        return float(header)
    date = parsedate_tz(header)
    return 0.0 if date is None else max(0.0, mktime_tz(date) - time.time())
