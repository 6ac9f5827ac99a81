"""Responses by the target itself: the text a drafter learns from.

`Regenerator` answers prompts (JSON lines or a `datasets` data set) and appends one JSON line a response:

    id        index of the prompt in its source
    source    copied where the prompt names one
    prompt    or `messages`: what came before the response
    response  the target's text, special tokens left out
    finished  False where the limit cut the response, which then has no end-of-sequence token
    response_ids  the tokens as drawn, which the text may not give back; earlier turns' stand in their messages

A run that is stopped at any point goes on where it was: whole lines are synchronised to disk, a torn last line is dropped,
and prompts whose id is in the file are not answered again. `self_prompt` lets an instruct target write the prompts as
well.

The command line is `dspark-hf regenerate`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from filelock import FileLock, Timeout
from jinja2 import TemplateError
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .fast_decoding import Completion, Request, Sampling, SlotDecoder, length_limits, unsupported_reason

logger = logging.getLogger(__name__)

DEFAULT_MAX_NEW_TOKENS = 512
PROMPT_FIELDS = ("turns", "messages", "prompt")
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
        save_token_ids: write `response_ids`, the tokens as drawn (end-of-sequence token included), which are what
            training then uses. Tokenizing a response's text may give others, or lack special tokens inside it.
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    enable_thinking: bool | None = None
    seed: int = 0
    slots: int = 128
    save_token_ids: bool = True


# ------------------------------------------------------------------------------------------------------------ prompts


class Unanswerable(ValueError):
    """Why one prompt cannot be answered, though others may: it is left out with a warning."""


@dataclass
class Conversation:
    """One prompt on its way: `messages` grow by a response and the next of `turns` until none is left."""

    id: int
    row: dict[str, Any]
    messages: list[dict[str, Any]]
    turns: list[str] = field(default_factory=list)  # the user's turns still to come
    num_responses: int = 0
    finished: bool = True  # whether the last response ended by itself

    def add(self, response: str, finished: bool, response_ids: list[int] | None = None) -> None:
        ids = {} if response_ids is None else {"response_ids": response_ids}
        self.messages.append({"role": "assistant", "content": response, **ids})
        self.num_responses += 1
        self.finished = finished

    def next_turn(self) -> bool:
        """Ask the next of the user's turns; False where there is none, or it would follow a response that was cut."""
        if not self.turns or not self.finished:
            return False
        self.messages.append({"role": "user", "content": self.turns.pop(0)})
        return True

    def give_up(self, reason: object) -> None:
        """Say why the last of the user's turns gets no response, and drop it where there are responses before it."""
        if not self.num_responses:
            logger.warning("Prompt %d is left out: %s.", self.id, reason)
            return
        self.messages.pop()
        logger.warning("Prompt %d ends after %d of its turns: %s.", self.id, self.num_responses, reason)

    def output_row(self) -> dict[str, Any]:
        """The row to write, once the last response is there."""
        *before, response = self.messages
        row: dict[str, Any] = {"id": self.id}
        if "source" in self.row:
            row["source"] = self.row["source"]
        if len(before) == 1 and "prompt" in self.row:
            row["prompt"] = before[0]["content"]
        else:
            row["messages"] = before
        row |= {"response": response["content"], "finished": self.finished}
        if "response_ids" in response:
            row["response_ids"] = response["response_ids"]
        return row


def without_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as a chat template takes them."""
    return [{name: value for name, value in message.items() if name != "response_ids"} for message in messages]


def read_prompts(
    source: str | Path, split: str = "train", subset: str | None = None, column: str | None = None
) -> Iterator[dict[str, Any]]:
    """
    Rows of a local JSON-lines file, or of a data set of the `datasets` library.

    Args:
        source: The file, or what `datasets.load_dataset` takes first.
        split, subset: Of a data set; `subset` is what `datasets` calls its configuration or `name`.
        column: Where the prompt stands; by default `turns`, `messages` or `prompt`.

    Raises:
        ValueError: when a local file does not exist, or a row has no such column.
    """
    for index, row in enumerate(_read_rows(source, split, subset)):
        yield _from_column(index, row, column) if column else row


def _read_rows(source: str | Path, split: str, subset: str | None) -> Iterator[dict[str, Any]]:
    path = Path(source)
    if path.is_file() and path.suffix not in (".parquet", ".csv", ".arrow"):
        yield from _read_json(path)
        return
    if path.suffix in (".jsonl", ".json"):
        raise ValueError(f"There is no file '{source}'.")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"'{source}' is no JSON-lines file; reading it as a data set needs: pip install datasets"
        ) from error
    if path.is_file():
        builder = path.suffix[1:]
        yield from load_dataset(builder, data_files=str(path), split="train")
    else:
        yield from load_dataset(str(source), subset or None, split=split)


def _read_json(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file with one in each line, or with a list of them."""
    with path.open(encoding="utf-8") as file:
        is_list = file.read(1) == "["
        file.seek(0)
        lines = enumerate([file.read()] if is_list else file, start=1)
        for number, line in lines:
            if not line.strip():
                continue
            try:
                found = json.loads(line)
            except json.JSONDecodeError as error:
                line_number = number + error.lineno - 1
                raise ValueError(
                    f"'{path}', line {line_number}, is no JSON: {error.msg} (column {error.colno})."
                ) from error
            for row in found if is_list else [found]:
                if not isinstance(row, dict):
                    raise ValueError(
                        f"'{path}', line {number}, holds {row!r:.60}; give rows such as {{\"prompt\": ...}}."
                    )
                yield row


def _from_column(index: int, row: dict[str, Any], column: str) -> dict[str, Any]:
    """The row with the prompt under the name that fits what the column holds."""
    if column not in row:
        raise ValueError(
            f"Row {index} has no column {column!r}; its columns are {', '.join(sorted(row))}. Name one of them."
        )
    value = row[column]
    several = not isinstance(value, str) and bool(value)
    name = "prompt" if not several else "turns" if isinstance(value[0], str) else "messages"
    return {name: value} | ({"source": row["source"]} if "source" in row else {})


def as_conversation(index: int, row: dict[str, Any]) -> Conversation:
    """
    Read a row with `turns` (user turns), `messages` (a response at their end is dropped) or `prompt`.

    Raises:
        ValueError: when it has none of these fields.
        Unanswerable: when nothing is asked in it.
    """
    if row.get("turns"):
        return Conversation(index, row, [{"role": "user", "content": row["turns"][0]}], list(row["turns"][1:]))
    if row.get("messages"):
        messages = [as_message(message) for message in row["messages"]]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        if messages:
            return Conversation(index, row, messages)
    if row.get("prompt"):
        return Conversation(index, row, [{"role": "user", "content": row["prompt"]}])
    if set(PROMPT_FIELDS).isdisjoint(row):
        raise ValueError(
            f"Prompt {index} has the fields {sorted(row)}; give one of 'prompt' (text), 'messages' (role and content) or "
            "'turns' (texts of the user's turns)."
        )
    raise Unanswerable("nothing is asked in it")


def as_conversations(rows: dict[int, dict[str, Any]]) -> list[Conversation]:
    """All rows in which something is asked, by their index; a warning names each of the others."""
    conversations = []
    for index, row in rows.items():
        try:
            conversations.append(as_conversation(index, row))
        except Unanswerable as reason:
            logger.warning("Prompt %d is left out: %s.", index, reason)
    return conversations


def as_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message of a chat template, also from the `from` and `value` of ShareGPT's data sets."""
    if "role" in message:
        return message
    if "from" not in message or "value" not in message:
        raise Unanswerable(f"a message has the fields {sorted(message)}; give each message 'role' and 'content'")
    role = {"human": "user", "gpt": "assistant"}.get(message["from"], message["from"])
    return {"role": role, "content": message["value"]}


def request_seed(run_seed: int, id: int, turn: int) -> int:
    """A 63-bit seed for one response, the same on every machine and in every batch."""
    digest = hashlib.sha256(f"{run_seed}:{id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def by_length(requests: Iterable[Request], window: int) -> Iterator[Request]:
    """Sort by prompt length within windows, up and down in turn, so rows that share a pass are of like length."""
    source, descending = iter(requests), False
    while chunk := list(islice(source, window)):
        yield from sorted(chunk, key=lambda request: len(request.input_ids), reverse=descending)
        descending = not descending


# ------------------------------------------------------------------------------------------------------------- output


class ResumableLines:
    """An append-only JSON-lines file that survives a kill at any point, for one process at a time.

    A file with something in it is ours where a note of its origin is beside it, `<name>.origin.json`. Its torn last line
    (without a line end, or not JSON) is then dropped; `written` holds the rows that are there.

    Args:
        path: the file, created with its folder where missing.
        origin: what made the rows (target, settings).

    Raises:
        ValueError: the file is not one of ours, its rows have another origin, or another process writes it.
    """

    def __init__(self, path: str | Path, origin: dict[str, Any]) -> None:
        self.path = Path(path)
        self.note = self.path.with_name(self.path.name + ".origin.json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.check_ours()
        self.lock = FileLock(f"{self.path}.lock", timeout=0)
        try:
            self.lock.acquire()
        except Timeout:
            raise ValueError(
                f"Another process writes '{self.path}' now, and two would answer the same prompts. Wait for it, or write to "
                "another file (of other prompts: see 'start' and 'max_prompts')."
            ) from None
        self.file: IO[bytes] = self.path.open("a+b")
        try:
            self.written = self.recover()
            self.check_origin(origin)
        except ValueError:
            self.close()
            raise

    def check_ours(self) -> None:
        if self.path.exists() and self.path.stat().st_size and not self.note.exists():
            raise ValueError(
                f"'{self.path}' is not empty and has no '{self.note.name}' beside it, so it was not begun here and nothing "
                "is written to it. Give another output file, or bring the note along where the file was moved."
            )

    def check_origin(self, origin: dict[str, Any]) -> None:
        """Refuse to mix rows of two origins in one file; note the origin where there are no rows yet."""
        if not self.written:
            self.note.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
            return
        before = json.loads(self.note.read_text(encoding="utf-8"))
        changed = [
            f"{name} was {before.get(name)!r}, now {origin.get(name)!r}"
            for name in before | origin
            if before.get(name) != origin.get(name)
        ]
        if changed:
            raise ValueError(
                f"'{self.path}' holds rows made with other settings ({'; '.join(changed)}). "
                "Go on with the same settings, or write to another file."
            )

    def recover(self) -> list[dict[str, Any]]:
        self.file.seek(0)
        rows, good_bytes, torn = [], 0, None
        for number, line in enumerate(self.file, start=1):
            if torn is not None:
                raise ValueError(
                    f"Line {torn} of '{self.path}' is not JSON, so nothing can be appended safely. Mend or move the file."
                )
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("no line end")
                rows.append(json.loads(line))
                good_bytes += len(line)
            except ValueError:
                torn = number
        if not all(isinstance(row, dict) and "id" in row for row in rows):
            raise ValueError(
                f"'{self.path}' has rows without 'id', which were not written here. Give another output file."
            )
        self.file.truncate(good_bytes)
        self.file.seek(0, os.SEEK_END)
        return rows

    def append(self, row: dict[str, Any]) -> bool:
        """Write a row to the disk; False, with a warning, where its text is not Unicode (half a surrogate pair)."""
        try:
            line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        except UnicodeEncodeError as error:
            logger.warning("Prompt %d is left out: its text cannot be written (%s).", row["id"], error)
            return False
        self.file.write(line)
        self.file.flush()
        os.fsync(self.file.fileno())
        return True

    def close(self) -> None:
        self.file.close()
        self.lock.release()

    def __enter__(self) -> ResumableLines:
        return self

    def __exit__(self, *exception: object) -> None:
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

    def count(self, num_tokens: int, prompts: int) -> None:
        self.num_tokens += num_tokens
        self.bar.set_postfix_str(f"{self.tokens_per_second:.0f} tokens/s", refresh=False)
        self.bar.update(prompts)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
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
        law = asdict(self.sampling) if self.sampling.do_sample else {"do_sample": False}
        output = self.target.generate(
            input_ids=input_ids.to(self.target.device),
            attention_mask=mask.to(self.target.device),
            max_new_tokens=max(request.max_new_tokens for request in batch),
            eos_token_id=self.eos_token_ids or None,
            pad_token_id=pad_id,
            **law,
        )
        for request, tokens in zip(batch, output[:, length:].tolist()):
            tokens = tokens[: request.max_new_tokens]
            end = next((i for i, token in enumerate(tokens) if token in self.eos_token_ids), None)
            yield Completion(request.key, tokens[:end], None if end is None else tokens[end])


def first_set(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def resolve_sampling(settings: RegenerationSettings, generation_config: Any) -> Sampling:
    """The settings' own values, then the generation config's, then `generate`'s defaults."""
    implied = None if settings.temperature is None else settings.temperature > 0
    if not first_set(settings.do_sample, implied, generation_config.do_sample, False):
        return Sampling(do_sample=False)
    return Sampling(
        do_sample=True,
        temperature=first_set(settings.temperature, generation_config.temperature, 1.0),
        top_k=first_set(settings.top_k, generation_config.top_k, 50),
        top_p=first_set(settings.top_p, generation_config.top_p, 1.0),
    )


def other_processors(generation_config: Any) -> list[str]:
    """Names of what the generation config switches on and the fast path cannot do."""
    values = {name: getattr(generation_config, name, None) for name in OTHER_PROCESSORS}
    return [name for name, found in values.items() if found is not None and found != OTHER_PROCESSORS[name]]


def end_token_ids(target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    for found in (
        target.generation_config.eos_token_id,
        target.config.get_text_config().eos_token_id,
        tokenizer.eos_token_id,
    ):
        if found is not None:
            return list(found) if isinstance(found, (list, tuple)) else [found]
    return []


# ---------------------------------------------------------------------------------------------------------- the verbs


class ResponseWriter(ABC):
    """Answers prompts into a resumable file; what answers them is left to the subclasses."""

    def run(
        self,
        prompts: Iterable[dict[str, Any]],
        output: str | Path,
        start: int = 0,
        max_prompts: int | None = None,
        progress: bool = True,
    ) -> int:
        """Answer the prompts that `output` lacks, appending to it.

        Args:
            prompts: rows as `read_prompts` gives them; a row's index is its id.
            output: JSON-lines file, resumed where it exists.
            start: index of the first prompt to answer.
            max_prompts: at most this many from there.
            progress: show a progress bar.

        Returns:
            `int`: how many rows were added.

        Raises:
            ValueError: a prompt has none of the known fields; or `output` holds rows of other prompts or settings, is
                something else, or is being written by another process.
        """
        stop = None if max_prompts is None else start + max_prompts
        chosen = dict(islice(enumerate(prompts), start, stop))
        added = 0
        with ResumableLines(output, self.origin()) as lines:
            check_same_prompts(lines.written, chosen, output)
            done = {row["id"] for row in lines.written}
            todo = as_conversations({index: row for index, row in chosen.items() if index not in done})
            with Progress(len(chosen), len(chosen) - len(todo), progress) as bar:
                for row, num_tokens in self.answer(todo):
                    written = row is not None and lines.append(row)
                    added += written
                    bar.count(num_tokens, prompts=int(written))
        return added

    @abstractmethod
    def origin(self) -> dict[str, Any]:
        """What the rows depend on, for the note beside the output."""

    @abstractmethod
    def answer(self, conversations: list[Conversation]) -> Iterator[tuple[dict[str, Any] | None, int]]:
        """Run conversations to their end, in the order they finish.

        Yields:
            for every response the conversation's output row (None while turns are left) and the response's tokens.
        """


class Regenerator(ResponseWriter):
    """Answers prompts with the target's own responses.

    Args:
        target: the model, in the dtype and on the device it is to run in.
        tokenizer: its tokenizer. Without a chat template, prompts are continued as plain text.
        settings: how responses are made.

    Example:
        >>> target, tokenizer = load_target("path/to/target", dtype="bfloat16")
        >>> regenerator = Regenerator(target, tokenizer, RegenerationSettings(temperature=0.6, max_new_tokens=256))
        >>> regenerator.run(read_prompts("prompts.jsonl"), "responses.jsonl")
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
        generation_config = target.generation_config
        self.sampling = resolve_sampling(self.settings, generation_config)
        self.max_new_tokens = first_set(
            self.settings.max_new_tokens, generation_config.max_new_tokens, DEFAULT_MAX_NEW_TOKENS
        )
        self.max_length = getattr(target.config.get_text_config(), "max_position_embeddings", None)
        self.eos_token_ids = end_token_ids(target, tokenizer)
        self.told_fallback = False

    def origin(self) -> dict[str, Any]:
        return {
            "target": self.target.config._name_or_path,
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "max_new_tokens": self.max_new_tokens,
            "enable_thinking": self.settings.enable_thinking,
            "seed": self.settings.seed,
            **asdict(self.sampling),
        }

    def answer(self, conversations: list[Conversation]) -> Iterator[tuple[dict[str, Any] | None, int]]:
        open_conversations = {conversation.id: conversation for conversation in conversations}
        decoder = self.decoder(self.longest_row(conversations))
        requests = (request for request in map(self.request, conversations) if request is not None)
        for completion in decoder.run(by_length(requests, WINDOW_SLOTS * self.settings.slots)):
            conversation = open_conversations[completion.key]
            self.add(conversation, completion)
            request = self.request(conversation) if conversation.next_turn() else None
            if request is not None:
                decoder.submit(request)
                yield None, completion.num_tokens
            else:
                del open_conversations[conversation.id]
                yield conversation.output_row(), completion.num_tokens

    def add(self, conversation: Conversation, completion: Completion) -> None:
        end = [] if completion.end_id is None else [completion.end_id]
        conversation.add(
            self.tokenizer.decode(completion.token_ids, skip_special_tokens=True),
            completion.finished,
            completion.token_ids + end if self.settings.save_token_ids else None,
        )

    def request(self, conversation: Conversation) -> Request | None:
        """The next response's request; None, with a warning, where there can be none."""
        try:
            input_ids = self.encode(conversation.messages)
            room = self.room(len(input_ids))
        except Unanswerable as reason:
            conversation.give_up(reason)
            return None
        seed = request_seed(self.settings.seed, conversation.id, conversation.num_responses)
        return Request(conversation.id, input_ids, room, seed)

    def room(self, num_tokens: int) -> int:
        """Tokens that a response may have behind a prompt of `num_tokens`."""
        if self.max_length is None:
            return self.max_new_tokens
        if num_tokens >= self.max_length:
            raise Unanswerable(f"with {num_tokens} tokens it fills the target's context of {self.max_length}")
        return min(self.max_new_tokens, self.max_length - num_tokens)

    def encode(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a conversation, up to where the target's next response begins."""
        template = self.tokenizer.chat_template is not None
        if not template and len(messages) > 1:
            raise ValueError(
                f"The tokenizer of '{self.tokenizer.name_or_path}' has no chat template, so it cannot write a conversation "
                f"of {len(messages)} messages. Give rows with a single 'prompt', or set tokenizer.chat_template."
            )
        try:
            text = self.render(messages) if template else messages[0]["content"]
            text.encode()  # half a surrogate pair is told clearer than by the tokenizer
            return self.tokenizer(text, add_special_tokens=not template)["input_ids"]
        except (TemplateError, ValueError, TypeError) as error:
            raise Unanswerable(f"chat template or tokenizer refuse it ({error})") from error

    def render(self, messages: list[dict[str, Any]]) -> str:
        thinking = {} if self.settings.enable_thinking is None else {"enable_thinking": self.settings.enable_thinking}
        return self.tokenizer.apply_chat_template(
            without_ids(messages), tokenize=False, add_generation_prompt=True, **thinking
        )

    def decoder(self, max_length: int) -> SlotDecoder | PlainDecoder:
        """A decoder for rows of up to `max_length` tokens: the fast one or, where it cannot serve, the plain one."""
        reason = unsupported_reason(self.target, max_length)
        others = other_processors(self.target.generation_config)
        if reason is None and others:
            reason = f"its generation config sets {', '.join(others)}"
        if reason is None:
            return SlotDecoder(self.target, self.sampling, self.eos_token_ids, self.settings.slots)
        if not self.told_fallback:
            logger.warning(
                "%s runs with plain batched generate, which is slower, because %s.", type(self.target).__name__, reason
            )
            self.told_fallback = True
        return PlainDecoder(self.target, self.sampling, self.eos_token_ids, self.settings.slots)

    def longest_row(self, conversations: list[Conversation]) -> int:
        """Most tokens a row can come to. It is worked out only where it matters."""
        if not length_limits(self.target):
            return 0
        longest = max(map(self.longest, conversations), default=0)
        return longest if self.max_length is None else min(longest, self.max_length)

    def longest(self, conversation: Conversation) -> int:
        """Tokens of a whole conversation if every response runs to its limit; of the turns that can be asked."""
        messages, length = list(conversation.messages), 0
        try:
            for number, turn in enumerate([*conversation.turns, ""], start=1):
                length = len(self.encode(messages)) + number * self.max_new_tokens
                messages += [{"role": "assistant", "content": "."}, {"role": "user", "content": turn}]
        except Unanswerable:  # said when it is asked
            pass
        return length


def check_same_prompts(written: list[dict[str, Any]], prompts: dict[int, dict[str, Any]], output: str | Path) -> None:
    """Refuse to resume an output whose rows answer other prompts."""
    for row in written:
        if row["id"] in prompts and not answers(row, prompts[row["id"]]):
            raise ValueError(
                f"'{output}' answers another prompt under id {row['id']} than the one given now. "
                "Go on with the same prompts, or write to another file."
            )


def answers(row: dict[str, Any], prompt: dict[str, Any]) -> bool:
    """Whether an output row answers this prompt, or the first of its turns."""
    try:
        asked = as_conversation(row["id"], prompt)
    except Unanswerable:
        return False
    messages = row.get("messages") or [{"role": "user", "content": row.get("prompt")}]
    given, later = messages[: len(asked.messages)], messages[len(asked.messages) :]
    turns = [message["content"] for message in later if message["role"] == "user"]
    return without_ids(given) == without_ids(asked.messages) and turns == asked.turns[: len(turns)]


def self_prompt(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_prompts: int,
    output: str | Path,
    settings: RegenerationSettings | None = None,
    system_prompt: str | None = None,
    min_chars: int = 12,
    progress: bool = True,
) -> int:
    """Let an instruct target write prompts: it is given the template up to where the user speaks, and goes on.

    From "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing" (arXiv 2406.08464).
    Kept are texts that end by themselves, have `min_chars` characters and were not written before (case and spaces
    apart). Candidates are drawn in rounds of as many as are lacking and each round is run to its end, since stopping
    at the first ones to finish would favour short prompts. So a run that goes on passes through the same rounds again,
    and draws those candidates of them that are not in the file: the ones under way when it was stopped, and, by their
    seeds to the same end, those that were not kept.

    Args:
        num_prompts: rows that `output` shall have in the end; a stopped run goes on.
        output: JSON lines with `id` (the candidate's number, which also seeds it), `source` ("self") and `prompt`.
        settings: sampling; by default temperature 1.0, all tokens, at most 256 of them.
        system_prompt: steers what the user asks about; None leaves it to the template.

    Returns:
        `int`: how many rows were added, fewer than lacking only where candidates stop being of use (with a warning).

    Raises:
        ValueError: the tokenizer has no chat template, or it does not show where the user's turn stands.
    """
    settings = settings or RegenerationSettings(max_new_tokens=256, temperature=1.0, top_k=0, top_p=1.0)
    writer = Regenerator(target, tokenizer, settings)
    prefix_ids, end_id = user_turn(tokenizer, system_prompt)
    writer.eos_token_ids = sorted({*writer.eos_token_ids, end_id})
    decoder = writer.decoder(len(prefix_ids) + writer.max_new_tokens)
    origin = {**writer.origin(), "system_prompt": system_prompt}
    with ResumableLines(output, origin) as lines:
        seen = {normalised(row["prompt"]) for row in lines.written}
        kept_ids = {row["id"] for row in lines.written}
        before = len(kept_ids)
        next_id = useless_rounds = 0
        with Progress(num_prompts, before, progress) as bar:
            while len(kept_ids) < num_prompts and useless_rounds < 5:
                lacking = num_prompts - sum(id < next_id for id in kept_ids)
                ids = range(next_id, next_id := next_id + lacking)
                requests = [
                    Request(id, prefix_ids, writer.max_new_tokens, request_seed(settings.seed, id, 0))
                    for id in ids
                    if id not in kept_ids
                ]
                for completion in decoder.run(requests):
                    text = tokenizer.decode(completion.token_ids, skip_special_tokens=True).strip()
                    kept = completion.finished and len(text) >= min_chars and normalised(text) not in seen
                    if kept:
                        seen.add(normalised(text))
                        kept_ids.add(completion.key)
                        lines.append({"id": completion.key, "source": "self", "prompt": text})
                    bar.count(completion.num_tokens, prompts=int(kept))
                useless_rounds = 0 if kept_ids.intersection(ids) else useless_rounds + 1
    if len(kept_ids) < num_prompts:
        logger.warning(
            "Only %d of %d prompts: the last candidates were all cut, too short or known. "
            "Raise the temperature or max_new_tokens, or vary the system prompt.",
            len(kept_ids),
            num_prompts,
        )
    return len(kept_ids) - before


def user_turn(tokenizer: PreTrainedTokenizerBase, system_prompt: str | None) -> tuple[list[int], int]:
    """Token ids of the template up to the user's first word, and the token that ends the user's turn."""
    mark = "@@user@@"
    messages = [{"role": "user", "content": mark}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    if tokenizer.chat_template is None:
        raise ValueError(
            f"The tokenizer of '{tokenizer.name_or_path}' has no chat template; only an instruct target writes prompts."
        )
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    prefix, found, rest = text.partition(mark)
    end_ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    if not found or not prefix or not end_ids:
        raise ValueError(
            "The chat template does not put text before and after the user's turn, so it shows no place to write."
        )
    return tokenizer(prefix, add_special_tokens=False)["input_ids"], end_ids[0]


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())


def load_target(path: str, dtype: str = "auto", device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer. `dtype` "auto" keeps the checkpoint's; bfloat16 is several times faster where hardware has it."""
    target = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
    return target, AutoTokenizer.from_pretrained(path)
