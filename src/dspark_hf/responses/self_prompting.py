"""Lets the target write prompts, for training without a prompt data set."""

from __future__ import annotations

import logging
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..storage.json_lines import ResumableLines
from .progress import ResponseBar
from .regeneration import Regenerator
from .requests import Request
from .settings import RegenerationSettings, request_seed

logger = logging.getLogger(__name__)


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
    """Lets an instruct target write prompts: it continues the chat template from the start of a user turn.

    From "Magpie: Alignment Data Synthesis from Scratch by Prompting Aligned LLMs with Nothing" (arXiv 2406.08464).
    A text is kept if it ended with an end-of-turn token, has at least `min_chars` characters, and differs from all earlier
    ones by more than case and spaces. Each round draws as many candidates as are still missing and waits for all of them,
    because taking the first ones to finish would favour short prompts. A resumed run repeats the same rounds, but only draws
    candidates that are not in the file: those that were unfinished when it stopped, and rejected ones, which are the same
    again because their seeds are.

    Args:
        num_prompts: rows in `output` at the end; an interrupted run resumes.
        output: JSON lines with `id` (the candidate's number, which also seeds it), `source` ("self") and `prompt`.
        settings: sampling; by default temperature 1.0, all tokens, at most 256 of them.
        system_prompt: influences what the prompts are about; None leaves it to the template.

    Returns:
        `int`: how many rows were added. If no more usable candidates come, there are fewer than asked for, with a warning.

    Raises:
        ValueError: the tokenizer has no chat template, or it does not show where the user's turn begins.
    """
    settings = settings or prompt_settings()
    writer = Regenerator(target, tokenizer, settings)
    prefix_ids, end_id = user_turn(tokenizer, system_prompt)
    writer.eos_token_ids = sorted({*writer.eos_token_ids, end_id})
    with ResumableLines(output, writer.origin() | {"system_prompt": system_prompt}) as lines:
        seen = {normalised(row["prompt"]) for row in lines.written}
        kept_ids = {row["id"] for row in lines.written}
        before = len(kept_ids)
        next_id = useless_rounds = 0
        with ResponseBar(num_prompts, before, progress) as bar:
            decoder = writer.decoder(len(prefix_ids) + writer.max_new_tokens, bar.add_tokens)
            while len(kept_ids) < num_prompts and useless_rounds < 5:
                lacking = num_prompts - sum(id < next_id for id in kept_ids)
                ids = range(next_id, next_id := next_id + lacking)
                requests = [
                    Request(id, prefix_ids, writer.max_new_tokens, request_seed(settings.seed, id, 0))
                    for id in ids
                    if id not in kept_ids
                ]
                for completion in decoder.run(requests):
                    text = str(tokenizer.decode(completion.token_ids, skip_special_tokens=True)).strip()
                    kept = completion.finished and len(text) >= min_chars and normalised(text) not in seen
                    if kept:
                        seen.add(normalised(text))
                        kept_ids.add(completion.key)
                        lines.append({"id": completion.key, "source": "self", "prompt": text})
                        bar.add_prompt()
                useless_rounds = 0 if kept_ids.intersection(ids) else useless_rounds + 1
    if len(kept_ids) < num_prompts:
        logger.warning(
            "Only %d of %d prompts: the last candidates were all cut, too short or repeated. "
            "Raise the temperature or max_new_tokens, or vary the system prompt.",
            len(kept_ids),
            num_prompts,
        )
    return len(kept_ids) - before


def prompt_settings(seed: int = 0, slots: int = 128) -> RegenerationSettings:
    """The default settings for prompts: sampling from the full distribution, so that they differ."""
    return RegenerationSettings(max_new_tokens=256, temperature=1.0, top_k=0, top_p=1.0, seed=seed, slots=slots)


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
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    prefix, found, rest = text.partition(mark)
    end_ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    if not found or not prefix or not end_ids:
        raise ValueError(
            "The chat template does not put text before and after the user's turn, so the target cannot be led to write one."
        )
    return tokenizer(prefix, add_special_tokens=False)["input_ids"], end_ids[0]


def normalised(text: str) -> str:
    return " ".join(text.casefold().split())
