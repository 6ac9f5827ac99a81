"""Runs methods side by side, paired prompt by prompt, and checks that greedy answers are those of plain `generate`.

The order of the methods rotates from prompt to prompt, so that a machine that slows down or warms up affects all alike.
Every measurement is written to the disk as soon as it is finished, and an interrupted run resumes from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..conversations.chat import Chat
from ..generation.telemetry import StageClock, record_speculation
from ..transformers_names import CACHE_KEY, GenerativeModel, compute_device
from .meter import measured
from .methods import PLAIN, Method
from .records import Difference, Record, RecordFile, Turn
from .tasks import Prompt, Task


@dataclass(frozen=True)
class BenchSettings:
    """
    Args:
        max_new_tokens: Most tokens of an answer.
        temperature: 0 decodes greedily.
        seed: Each prompt is answered with a random state derived from this and the prompt's number, the same for all methods.
        generate_kwargs: Further settings for `generate`.
    """

    max_new_tokens: int = 2048
    temperature: float = 1.0
    seed: int = 0
    generate_kwargs: dict[str, Any] | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    def arguments(self) -> dict[str, Any]:
        """Arguments for `generate`. Sampling uses the whole distribution: no top-k, no top-p."""
        sampling: dict[str, Any] = {"do_sample": False}
        if not self.is_greedy:
            sampling = {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}
        return {"max_new_tokens": self.max_new_tokens} | sampling | (self.generate_kwargs or {})


class Progress(NamedTuple):
    """
    Args:
        done, total: Measurements, those of an earlier run counted as done.
        left_s: Estimated seconds until the end; `None` before the first measurement.
        record: The newest measurement.
        difference: Where its answer differs from that of plain `generate`, if it was compared and differs.
    """

    done: int
    total: int
    left_s: float | None
    record: Record
    difference: Difference | None = None


def run_bench(
    target: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: list[Method],
    tasks: list[Task],
    settings: BenchSettings,
    file: RecordFile,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> None:
    """
    Makes the measurements that `file` does not contain yet.

    Args:
        target, tokenizer: The target.
        methods: Methods to compare; without plain `generate` among them there are no speedups and no comparison of answers.
        tasks: The prompts.
        settings: How answers are generated.
        file: Where the measurements are kept.
        on_progress: Called after each measurement.

    Raises:
        ValueError: when two methods have the same name.
    """
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(f"Methods must have different names, got {names}.")
    total = sum(len(task.prompts) for task in tasks) * len(methods)
    done = sum(
        (task.name, i, name) in file.records for task in tasks for i in range(len(task.prompts)) for name in names
    )
    num_new, started = 0, time.perf_counter()
    if done < total:
        warm_up(target, tokenizer, methods, tasks[0].prompts[0], settings)
        started = time.perf_counter()
    for task, index, prompt in prompts_of(tasks):
        for method in rotated(methods, index):
            if (task.name, index, method.name) in file.records:
                continue
            record = Record(task.name, index, method.name, answer(target, tokenizer, method, prompt, settings, index))
            file.add(record)
            done, num_new = done + 1, num_new + 1
            left_s = (time.perf_counter() - started) / num_new * (total - done)
            on_progress(Progress(done, total, left_s, record))
        if settings.is_greedy:
            for difference in check_prompt(target, tokenizer, methods, task.name, index, prompt, file):
                on_progress(Progress(done, total, None, file.records[task.name, index, difference.method], difference))


def prompts_of(tasks: list[Task]) -> Iterator[tuple[Task, int, Prompt]]:
    """Every prompt with its task and number. The tasks take turns, so that even an interrupted run has seen all of them."""
    for index in range(max((len(task.prompts) for task in tasks), default=0)):
        for task in tasks:
            if index < len(task.prompts):
                yield task, index, task.prompts[index]


def rotated(methods: list[Method], index: int) -> list[Method]:
    """The order of the methods for prompt `index`: over many prompts, each method is equally often at each place."""
    turn, start = divmod(index, len(methods))
    order = methods if turn % 2 == 0 else methods[::-1]
    return order[start:] + order[:start]


@torch.no_grad()
def answer(
    target: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    method: Method,
    prompt: Prompt,
    settings: BenchSettings,
    index: int = 0,
    clock: StageClock | None = None,
) -> list[Turn]:
    """
    The target's answers to one prompt by one method, turn by turn.

    Args:
        target, tokenizer: The target.
        method: The method that decodes.
        prompt: The prompt.
        settings: The settings of the run.
        index: The prompt's number, for the random state.
        clock: Also measures the stages of rounds.
    """
    torch.manual_seed(settings.seed * 1_000_003 + index)
    chat, cache, turns = Chat(tokenizer, prompt.system), None, []
    for text in prompt.turns:
        input_ids = chat.ask(text).to(compute_device(target))
        kwargs = settings.arguments() | method.arguments
        if cache is not None and method.keeps_cache:
            kwargs[CACHE_KEY] = cache
        if target.generation_config.pad_token_id is None:
            kwargs.setdefault("pad_token_id", tokenizer.pad_token_id or tokenizer.eos_token_id or 0)
        with record_speculation(clock) as stats, measured(target) as meter:
            output = target.generate(
                input_ids=input_ids,
                attention_mask=torch.ones_like(input_ids),
                return_dict_in_generate=True,
                **kwargs,
            )
        ids = output.sequences[0]
        turns.append(
            Turn(
                ids[input_ids.shape[1] :].tolist(),
                meter.seconds,
                stats.prefill_s or meter.prefill_s,
                meter.passes,
                meter.peak_bytes,
                stats.rounds,
            )
        )
        cache = output.get(CACHE_KEY)
        chat.add_answer(ids)
    return turns


def warm_up(
    target: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: list[Method],
    prompt: Prompt,
    settings: BenchSettings,
) -> None:
    """Runs each method once, unmeasured: kernels are chosen, buffers grow, compilation happens."""
    short = BenchSettings(
        min(settings.max_new_tokens, 16), settings.temperature, settings.seed, settings.generate_kwargs
    )
    for method in methods:
        answer(target, tokenizer, method, Prompt(prompt.turns[:1], prompt.system), short)


# ---------------------------------------------------------------------- identity of greedy answers

# Longest greedy answer of a run that measures sampling.
CHECK_TOKENS = 128


def check_greedily(
    target: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: list[Method],
    tasks: list[Task],
    settings: BenchSettings,
    file: RecordFile,
    num_prompts: int,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """
    For a run that measures sampling: answers some prompts greedily by every method, and compares the answers with those of
    plain `generate`. What was checked in an earlier run is not checked again.

    Args:
        target, tokenizer, methods, tasks, file: As in [`run_bench`].
        settings: Of the run; greedy answers have at most `CHECK_TOKENS` tokens.
        num_prompts: How many prompts; their first turns are asked.
        on_progress: Called with the number of prompts that are done and their total.
    """
    greedy = replace(settings, temperature=0.0, max_new_tokens=min(settings.max_new_tokens, CHECK_TOKENS))
    plain = next(method for method in methods if method.name == PLAIN)
    chosen = list(islice(prompts_of(tasks), num_prompts))
    for done, (task, index, prompt) in enumerate(chosen, start=1):
        question = Prompt(prompt.turns[:1], prompt.system)
        unchecked = [m for m in methods if m is not plain and (task.name, index, m.name) not in file.checked]
        answers = {
            method.name: Record(
                task.name, index, method.name, answer(target, tokenizer, method, question, greedy, index)
            )
            for method in ([plain, *unchecked] if unchecked else [])
        }
        for method in unchecked:
            got = answers[method.name]
            file.add_check(got.key, first_difference(target, tokenizer, question, answers[PLAIN], got))
        on_progress(done, len(chosen))


def check_prompt(
    target: GenerativeModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: list[Method],
    task: str,
    index: int,
    prompt: Prompt,
    file: RecordFile,
) -> list[Difference]:
    """Compares the answers to one prompt with that of plain `generate`, unless they were compared before."""
    plain = file.records.get((task, index, PLAIN))
    found: list[Difference] = []
    for method in methods:
        key = (task, index, method.name)
        if plain is None or method.name == PLAIN or key in file.checked or key not in file.records:
            continue
        difference = first_difference(target, tokenizer, prompt, plain, file.records[key])
        file.add_check(key, difference)
        found += [] if difference is None else [difference]
    return found


@torch.no_grad()
def first_difference(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: Prompt, plain: Record, other: Record
) -> Difference | None:
    """Where `other` first differs from `plain`. Later turns are not compared: they answer another conversation."""
    chat = Chat(tokenizer, prompt.system)
    for number, (text, expected, got) in enumerate(zip(prompt.turns, plain.turns, other.turns)):
        prompt_ids = chat.ask(text)[0]
        if expected.output_ids == got.output_ids:
            chat.add_answer(torch.cat([prompt_ids, torch.tensor(expected.output_ids, dtype=torch.long)]))
            continue
        position = common_length(expected.output_ids, got.output_ids)
        first, second = (
            ids[position] if position < len(ids) else None for ids in (expected.output_ids, got.output_ids)
        )
        gap = None
        if first is not None and second is not None:
            prefix = torch.cat([prompt_ids, torch.tensor(expected.output_ids[:position], dtype=torch.long)])
            logits = target(input_ids=prefix[None].to(compute_device(target))).logits[0, -1].float()
            gap = float(logits[first] - logits[second])
        return Difference(other.task, other.prompt, other.method, number, position, first, second, gap)
    return None


def common_length(first: list[int], second: list[int]) -> int:
    """The number of leading tokens that two answers share."""
    pairs = zip(first, second)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def run_settings(target_name: str, tasks: list[Task], settings: BenchSettings, **others: Any) -> dict[str, Any]:
    """What the measurements of a run depend on, for the note next to its file."""
    return {
        "target": target_name,
        "tasks": {task.name: len(task.prompts) for task in tasks},
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": settings.seed,
        "generate_kwargs": settings.generate_kwargs or {},
        **others,
    }


def default_file(folder: Path) -> Path:
    """The file of a run's measurements."""
    return folder / "records.jsonl"
