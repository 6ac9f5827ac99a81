"""Responses from an OpenAI-compatible server (vLLM, SGLang, llama.cpp, ...) that runs the target: many at once, over HTTP.

Only the standard library is used. What a server does with a field it does not know is its own affair; `top_k` and the
thinking switch go by the names that vLLM and SGLang read.
"""

from __future__ import annotations

import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from .regeneration import DEFAULT_MAX_NEW_TOKENS, Conversation, RegenerationSettings, ResponseWriter, request_seed

logger = logging.getLogger(__name__)

RETRY_AFTER_S = (1.0, 4.0, 16.0)


class ServerRegenerator(ResponseWriter):
    """Answers prompts through `POST /v1/chat/completions`.

    Args:
        url: the server's address, with or without `/v1`.
        model: the name the server knows the target by.
        settings: how responses are made. Sampling fields left None are not sent, so the server's own defaults hold;
            `slots` is the number of requests under way at once. `save_token_ids` is not possible here.
        api_key: sent as a bearer token where given.
        timeout_s: how long one response may take.

    Raises:
        ValueError: the settings ask for token ids, which such servers do not return.
    """

    def __init__(
        self,
        url: str,
        model: str,
        settings: RegenerationSettings | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self.model = model
        self.settings = settings or RegenerationSettings()
        if self.settings.save_token_ids:
            raise ValueError("A server returns text, not token ids: leave save_token_ids off, or run the target here.")
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"
        self.timeout_s = timeout_s

    def origin(self) -> dict[str, Any]:
        return {"target": self.model, "seed": self.settings.seed, **self.fields()}

    def answer(self, conversations: list[Conversation]) -> Iterator[tuple[dict[str, Any] | None, int]]:
        pool = ThreadPoolExecutor(self.settings.slots)
        try:
            for future in as_completed([pool.submit(self.converse, conversation) for conversation in conversations]):
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def converse(self, conversation: Conversation) -> tuple[dict[str, Any] | None, int]:
        """All turns of one conversation: its output row (None where the server refused it) and its tokens."""
        num_tokens = 0
        while True:
            try:
                response, finished, count = self.complete(conversation)
            except urllib.error.HTTPError as error:
                logger.warning("Prompt %d is left out: the server refused it (%s).", conversation.id, explain(error))
                return None, num_tokens
            conversation.add(response, finished)
            num_tokens += count
            if not conversation.turns:
                return conversation.output_row(), num_tokens
            conversation.messages.append({"role": "user", "content": conversation.turns.pop(0)})

    def complete(self, conversation: Conversation) -> tuple[str, bool, int]:
        """One response: text, whether it ended by itself, number of tokens."""
        seed = request_seed(self.settings.seed, conversation.id, len(conversation.finished)) % 2**31
        body = {"model": self.model, "messages": conversation.messages, "seed": seed, **self.fields()}
        reply = self.post(json.dumps(body).encode())
        choice = reply["choices"][0]
        count = (reply.get("usage") or {}).get("completion_tokens", 0)
        return choice["message"]["content"] or "", choice["finish_reason"] == "stop", count

    def fields(self) -> dict[str, Any]:
        """The request's fields that follow from the settings."""
        settings = self.settings
        fields: dict[str, Any] = {
            "max_tokens": settings.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
            "temperature": 0.0 if settings.do_sample is False else settings.temperature,
            "top_p": settings.top_p,
            "top_k": -1 if settings.top_k == 0 else settings.top_k,
        }
        if settings.enable_thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": settings.enable_thinking}
        return {name: value for name, value in fields.items() if value is not None}

    def post(self, body: bytes) -> dict[str, Any]:
        """Send, and send again while the server is busy or away.

        Raises:
            urllib.error.HTTPError: the server refuses this request.
            ConnectionError: the server stays away or busy.
        """
        for wait_s in (*RETRY_AFTER_S, None):
            try:
                request = urllib.request.Request(self.url, body, self.headers)
                with urllib.request.urlopen(request, timeout=self.timeout_s) as reply:
                    return json.load(reply)  # type: ignore[no-any-return]
            except urllib.error.HTTPError as error:
                if error.code != 429 and error.code < 500:
                    raise
                reason = explain(error)
            except OSError as error:  # refused, reset, timed out, no such host
                reason = str(error)
            if wait_s is not None:
                time.sleep(wait_s)
        raise ConnectionError(
            f"No answer from {self.url} after {len(RETRY_AFTER_S) + 1} tries ({reason}). Start the server, or check the "
            "address; what is written so far is kept, and the same command goes on from there."
        )


def explain(error: urllib.error.HTTPError) -> str:
    return f"HTTP {error.code}: {error.read(300).decode(errors='replace').strip()}"
