"""Responses by the target itself: the text a drafter learns from.

`Regenerator` answers prompts (JSON lines or a `datasets` data set) and appends one JSON line a response:

    id        index of the prompt in its source
    source    copied where the prompt names one
    prompt    or `messages`: what came before the response
    response  the target's text, special tokens left out
    finished  False where the limit cut the response, which then has no end-of-sequence token

A run that is stopped at any point goes on where it was: whole lines are synchronised to disk, a torn last line is dropped, and
prompts whose id is in the file are left out. `self_prompt` lets an instruct target write the prompts as well.

    python -m dspark_hf.training.regeneration prompts.jsonl responses.jsonl --target PATH --temperature 0.6
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .fast_decoding import Completion, Request, Sampling, SlotDecoder, unsupported_reason


logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 512
WINDOW_SLOTS = 8  # prompts are sorted by length within windows of this many times the slots
# What `generate` can do to the logits and the fast path does not; the value that switches each off.
OTHER_PROCESSORS = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_p": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "sequence_bias": None,
    "min_new_tokens": None,
    "min_length": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
}


@dataclass
class RegenerationSettings:
    """How responses are made. A sampling field left None takes the target's generation config, then `generate`'s default.

    Args:
        max_new_tokens: limit of a response; 512 where neither this nor the generation config says.
        do_sample: False for greedy. A given positive temperature implies True, a temperature of 0 implies False.
        temperature: divides the logits.
        top_k: keep this many tokens; 0 keeps all. `generate`'s own default is 50.
        top_p: keep the most likely tokens that together reach this probability; 1.0 keeps all.
        enable_thinking: the chat template's thinking switch; None leaves it to the template.
        seed: every prompt's random numbers follow from this and its id.
        slots: rows of a decoding pass.
        save_token_ids: also write `response_ids`, the tokens as drawn (end-of-sequence token included).
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    enable_thinking: bool | None = None
    seed: int = 0
    slots: int = 128
    save_token_ids: bool = False


# ------------------------------------------------------------------------------------------------------------ prompts


@dataclass
class Conversation:
    """One prompt on its way: `messages` grow by a response and the next of `turns` until none is left."""

    id: int
    row: dict[str, Any]
    messages: list[dict[str, str]]
    turns: list[str] = field(default_factory=list)  # user turns still to come
    finished: list[bool] = field(default_factory=list)  # one a response


def read_prompts(source: str | Path, split: str = "train") -> Iterator[dict[str, Any]]:
    """Rows of a local JSON-lines file, or of a data set of the `datasets` library."""
    path = Path(source)
    if path.is_file():
        with path.open(encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())
        return
    if path.suffix in (".jsonl", ".json"):
        raise ValueError(f"Prompt file '{source}' does not exist.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(f"'{source}' is no local file; reading it as a data set needs: pip install datasets") from error
    yield from load_dataset(str(source), split=split)


def as_conversation(index: int, row: dict[str, Any]) -> Conversation:
    """Read a row with `turns` (user turns), `messages` (a response at their end is dropped) or `prompt`."""
    if row.get("turns"):
        return Conversation(index, row, [{"role": "user", "content": row["turns"][0]}], list(row["turns"][1:]))
    if row.get("messages"):
        messages = list(row["messages"])
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            return Conversation(index, row, messages)
    if row.get("prompt"):
        return Conversation(index, row, [{"role": "user", "content": row["prompt"]}])
    raise ValueError(
        f"Prompt {index} has the fields {sorted(row)}; give one of 'prompt' (text), 'messages' (role and content) or "
        "'turns' (texts of the user's turns), not empty."
    )


def derived_seed(seed: int, *parts: Any) -> int:
    """A 63-bit seed from the run's seed and what names the request, the same on every machine."""
    digest = hashlib.sha256(":".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def by_length(requests: Iterable[Request], window: int) -> Iterator[Request]:
    """Sort by prompt length within windows, up and down in turn, so rows that share a pass are of like length."""
    source, descending = iter(requests), False
    while chunk := list(islice(source, window)):
        yield from sorted(chunk, key=lambda request: len(request.input_ids), reverse=descending)
        descending = not descending


# ------------------------------------------------------------------------------------------------------------- output


class ResumableLines:
    """An append-only JSON-lines file that survives a kill at any point.

    Opening drops a torn last line (without a line end, or not JSON); `written` then holds the rows that are there.

    Raises:
        ValueError: a line before the last is not JSON, so the file is not one of ours.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.file: IO[bytes] = self.path.open("a+b")
        self.written = self.recover()

    def recover(self) -> list[dict[str, Any]]:
        self.file.seek(0)
        rows, good_bytes, torn = [], 0, None
        for number, line in enumerate(self.file, start=1):
            if torn is not None:
                raise ValueError(f"Line {torn} of '{self.path}' is not JSON, so nothing can be appended safely. Mend or move the file.")
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no line end")
                rows.append(json.loads(line))
                good_bytes += len(line)
            except ValueError:
                torn = number
        self.file.truncate(good_bytes)
        self.file.seek(0, os.SEEK_END)
        return rows

    def append(self, row: dict[str, Any]) -> None:
        self.file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()

    def __enter__(self) -> ResumableLines:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()


class Progress:
    """A progress bar over prompts with tokens/s and time left."""

    def __init__(self, total: int | None, done: int, shown: bool = True) -> None:
        self.bar = tqdm(total=total, initial=done, unit="prompt", disable=not shown, mininterval=1.0, smoothing=0.05)
        if not self.bar.disable and not self.bar.fp.isatty():
            self.bar.mininterval = 20.0
        self.num_tokens = 0
        self.start_s = time.perf_counter()

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / max(time.perf_counter() - self.start_s, 1e-9)

    def count(self, tokens: int, prompts: int) -> None:
        self.num_tokens += tokens
        self.bar.set_postfix_str(f"{self.tokens_per_second:.0f} tokens/s", refresh=False)
        self.bar.update(prompts)

    def close(self) -> None:
        self.bar.close()


# ---------------------------------------------------------------------------------------------------------- decoding


class PlainDecoder:
    """Batched `generate`, for targets that `SlotDecoder` cannot serve. Same interface.

    A batch draws from torch's global generator, seeded with its first request's seed.
    """

    def __init__(self, target: PreTrainedModel, sampling: Sampling, eos_token_ids: list[int], slots: int) -> None:
        self.target = target
        self.sampling = sampling
        self.eos_token_ids = eos_token_ids
        self.slots = slots
        self.queue: list[Request] = []

    def submit(self, request: Request) -> None:
        self.queue.append(request)

    def run(self, requests: Iterable[Request]) -> Iterator[Completion]:
        source = iter(requests)
        while True:
            batch, self.queue = self.queue[: self.slots], self.queue[self.slots :]
            batch += islice(source, self.slots - len(batch))
            if not batch:
                return
            yield from self.complete(batch)

    @torch.inference_mode()
    def complete(self, batch: list[Request]) -> Iterator[Completion]:
        length = max(len(request.input_ids) for request in batch)
        pad_id = self.eos_token_ids[0] if self.eos_token_ids else 0
        padding = [length - len(request.input_ids) for request in batch]
        input_ids = torch.tensor([[pad_id] * pad + request.input_ids for pad, request in zip(padding, batch)])  # [B, T]
        mask = (torch.arange(length)[None] >= torch.tensor(padding)[:, None]).long()  # [B, T]
        torch.manual_seed(batch[0].seed)
        sampled = dict(temperature=self.sampling.temperature, top_k=self.sampling.top_k, top_p=self.sampling.top_p)
        output = self.target.generate(
            input_ids=input_ids.to(self.target.device),
            attention_mask=mask.to(self.target.device),
            max_new_tokens=max(request.max_new_tokens for request in batch),
            do_sample=self.sampling.do_sample,
            eos_token_id=self.eos_token_ids or None,
            pad_token_id=pad_id,
            **(sampled if self.sampling.do_sample else {}),
        )
        for request, tokens in zip(batch, output[:, length:].tolist()):
            tokens = tokens[: request.max_new_tokens]
            end = next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)
            yield Completion(request.key, tokens[:end], end is not None)


def resolve_sampling(settings: RegenerationSettings, generation_config: Any) -> Sampling:
    """The settings' own values, then the generation config's, then `generate`'s defaults."""

    def value(name: str, default: Any) -> Any:
        for holder in (settings, generation_config):
            found = getattr(holder, name, None)
            if found is not None:
                return found
        return default

    if settings.temperature == 0 or value("do_sample", settings.temperature is not None) is False and not settings.temperature:
        return Sampling(do_sample=False)
    if settings.do_sample is False:
        return Sampling(do_sample=False)
    return Sampling(True, value("temperature", 1.0), value("top_k", 50), value("top_p", 1.0))


def other_processors(generation_config: Any) -> list[str]:
    """Names of what the generation config switches on and the fast path cannot do."""
    values = {name: getattr(generation_config, name, None) for name in OTHER_PROCESSORS}
    return [name for name, found in values.items() if found is not None and found != OTHER_PROCESSORS[name]]


def end_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    for found in (target.generation_config.eos_token_id, target.config.get_text_config().eos_token_id, tokenizer.eos_token_id):
        if found is not None:
            return list(found) if isinstance(found, (list, tuple)) else [found]
    return []


# --------------------------------------------------------------------------------------------------------- the verbs


class Regenerator:
    """Answers prompts with the target's own responses.

    Args:
        target: the model, in the dtype and on the device it is to run in.
        tokenizer: its tokenizer. Without a chat template, prompts are continued as plain text.
        settings: how responses are made.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        settings: RegenerationSettings | None = None,
    ) -> None:
        self.target = target.eval()
        self.tokenizer = tokenizer
        self.settings = settings or RegenerationSettings()
        self.sampling = resolve_sampling(self.settings, target.generation_config)
        self.max_new_tokens = (
            self.settings.max_new_tokens or target.generation_config.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        )
        self.max_length = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self.eos_token_ids = end_token_ids(target, tokenizer)
        self.told_fallback = False

    def run(
        self,
        prompts: Iterable[dict[str, Any]],
        output: str | Path,
        start: int = 0,
        limit: int | None = None,
        progress: bool = True,
    ) -> int:
        """Answer the prompts that `output` lacks, appending to it.

        Args:
            prompts: rows as `read_prompts` gives them; a row's index is its id.
            output: JSON-lines file, resumed where it exists.
            start: index of the first prompt to answer.
            limit: at most this many prompts from there.
            progress: show a progress bar.

        Returns:
            `int`: how many rows were added.
        """
        stop = None if limit is None else start + limit
        chosen = list(islice(enumerate(prompts), start, stop))
        with ResumableLines(output) as lines:
            done = {row["id"] for row in lines.written}
            todo = [as_conversation(index, row) for index, row in chosen if index not in done]
            bar = Progress(len(chosen), len(chosen) - len(todo), progress)
            added = 0
            for row, num_tokens in self.answer(todo):
                if row is not None:
                    lines.append(row)
                    added += 1
                bar.count(num_tokens, row is not None)
            bar.close()
        return added

    def answer(self, conversations: list[Conversation]) -> Iterator[tuple[dict[str, Any] | None, int]]:
        """Run conversations to their end, in the order they finish.

        Yields:
            for every response the finished output row (None while turns are left) and its number of tokens.
        """
        open_conversations = {conversation.id: conversation for conversation in conversations}
        requests = (request for request in map(self.request, conversations) if request is not None)
        decoder = self.decoder()
        for completion in decoder.run(by_length(requests, WINDOW_SLOTS * self.settings.slots)):
            conversation = open_conversations[completion.key]
            response = self.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            num_tokens = len(completion.token_ids) + completion.finished
            conversation.finished.append(completion.finished)
            if conversation.turns:
                conversation.messages.append({"role": "assistant", "content": response})
                conversation.messages.append({"role": "user", "content": conversation.turns.pop(0)})
                request = self.request(conversation)
                if request is not None:
                    decoder.submit(request)
                yield None, num_tokens
            else:
                del open_conversations[completion.key]
                yield self.output_row(conversation, response, completion), num_tokens

    def output_row(self, conversation: Conversation, response: str, completion: Completion) -> dict[str, Any]:
        row: dict[str, Any] = {"id": conversation.id}
        if "source" in conversation.row:
            row["source"] = conversation.row["source"]
        if len(conversation.messages) == 1 and "prompt" in conversation.row:
            row["prompt"] = conversation.row["prompt"]
        else:
            row["messages"] = conversation.messages
        row["response"] = response
        row["finished"] = all(conversation.finished)
        if self.settings.save_token_ids:
            row["response_ids"] = completion.token_ids + self.eos_token_ids[:1] * completion.finished
        return row

    def request(self, conversation: Conversation) -> Request | None:
        """The next response's request; None, with a warning, where the context has no room for it."""
        input_ids = self.encode(conversation.messages)
        room = self.max_new_tokens if self.max_length is None else min(self.max_new_tokens, self.max_length - len(input_ids))
        if room < 1:
            logger.warning(
                "Prompt %d has %d tokens and the target's context only %s: left out.", conversation.id, len(input_ids), self.max_length
            )
            return None
        seed = derived_seed(self.settings.seed, conversation.id, len(conversation.finished))
        return Request(conversation.id, input_ids, room, seed)

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer.chat_template is None:
            if len(messages) > 1:
                raise ValueError("The tokenizer has no chat template, so only rows with a single 'prompt' can be continued.")
            return self.tokenizer(messages[0]["content"])["input_ids"]
        thinking = self.settings.enable_thinking
        text = self.tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            **({} if thinking is None else {"enable_thinking": thinking}),
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def decoder(self) -> SlotDecoder | PlainDecoder:
        """The fast decoder, or the plain one where it cannot serve (which is said once)."""
        reason = unsupported_reason(self.target, self.max_length or 0)
        others = other_processors(self.target.generation_config)
        if reason is None and others:
            reason = f"its generation config sets {', '.join(others)}"
        if reason is None:
            return SlotDecoder(self.target, self.sampling, self.eos_token_ids, self.settings.slots)
        if not self.told_fallback:
            logger.warning("%s runs with plain batched generate, which is slower: %s.", type(self.target).__name__, reason)
            self.told_fallback = True
        return PlainDecoder(self.target, self.sampling, self.eos_token_ids, self.settings.slots)


def load_target(path: str, dtype: str = "auto", device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer. `dtype` "auto" keeps the checkpoint's; bfloat16 is several times faster where hardware has it."""
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    return target, AutoTokenizer.from_pretrained(path)


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dspark_hf.training.regeneration", description=__doc__.splitlines()[0])
    parser.add_argument("prompts", help="JSON-lines file or name of a data set")
    parser.add_argument("output", help="JSON-lines file to append to")
    parser.add_argument("--target", required=True, help="model folder or name")
    parser.add_argument("--dtype", default="auto", help="dtype the target runs in; auto keeps the checkpoint's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--split", default="train", help="split of the data set")
    parser.add_argument("--start", type=int, default=0, help="index of the first prompt")
    parser.add_argument("--limit", type=int, help="at most this many prompts")
    parser.add_argument("--max-new-tokens", type=int)
    parser.add_argument("--greedy", dest="do_sample", action="store_const", const=False, help="most likely token")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-k", type=int, help="0 keeps all tokens")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--enable-thinking", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slots", type=int, default=128, help="rows of a decoding pass")
    parser.add_argument("--save-token-ids", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse_arguments(arguments)
    target, tokenizer = load_target(options.target, options.dtype, options.device)
    names = RegenerationSettings.__dataclass_fields__
    settings = RegenerationSettings(**{name: getattr(options, name) for name in names})
    rows = read_prompts(options.prompts, options.split)
    Regenerator(target, tokenizer, settings).run(rows, options.output, options.start, options.limit)


if __name__ == "__main__":
    main()
