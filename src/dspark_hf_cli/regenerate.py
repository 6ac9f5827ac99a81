"""`dspark-hf regenerate`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .options import Device, Dtype, Seed, Target, Threads

if TYPE_CHECKING:
    from dspark_hf.responses.settings import RegenerationSettings
    from dspark_hf.responses.writer import ResponseWriter


def regenerate(
    target: Target,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSONL file of responses. A run that was stopped continues from it.")
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            "-p",
            help="A JSONL file with `prompt`, `messages` or `turns` in each line, or a name for `datasets`.",
        ),
    ] = None,
    self_prompt: Annotated[
        int | None,
        typer.Option(
            min=1, help="Let the target write so many prompts itself, into OUTPUT with `.prompts` before its suffix."
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a data set.")] = "train",
    subset: Annotated[str | None, typer.Option(help="Configuration of a data set, where it has several.")] = None,
    column: Annotated[
        str | None, typer.Option(help="Column with the prompt: a text, a list of messages or a list of user turns.")
    ] = None,
    start: Annotated[int, typer.Option(min=0, help="Index of the first prompt to answer.")] = 0,
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Answer at most so many prompts.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a response at most; the target's own limit or 512 by default.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 decodes greedily; the target's generation config by default.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="0 keeps all tokens; the target's generation config by default.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="The target's generation config by default.")
    ] = None,
    thinking: Annotated[
        bool | None,
        typer.Option("--thinking/--no-thinking", help="The chat template's thinking switch, where it has one."),
    ] = None,
    seed: Seed = 0,
    slots: Annotated[int, typer.Option(min=1, help="Rows of a decoding pass, or requests to a server at once.")] = 128,
    save_token_ids: Annotated[
        bool,
        typer.Option(
            "--save-token-ids/--no-save-token-ids",
            help="Write the tokens as they were drawn beside the text; training then uses them. Servers return no tokens.",
        ),
    ] = True,
    server: Annotated[
        str | None,
        typer.Option(
            help="Address of an OpenAI-compatible server that serves --target, such as http://localhost:8000."
        ),
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="For the server.")] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """
    Let the target answer prompts: the text a drafter learns from.

    Stopped at any point, the same command goes on; nothing is lost and nothing is there twice.
    """
    from dspark_hf.conversations import read_prompts
    from dspark_hf.responses import RegenerationSettings

    if (prompts is None) == (self_prompt is None):
        raise typer.BadParameter("Give either --prompts or --self-prompt.")
    if self_prompt is not None and server is not None:
        raise typer.BadParameter("--self-prompt needs the target here: a server does not continue half a template.")
    given: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "enable_thinking": thinking,
    }
    settings = RegenerationSettings(**given, seed=seed, slots=slots, save_token_ids=save_token_ids)
    rows: list[dict[str, Any]] = []
    if prompts is not None:
        stop = None if max_prompts is None else start + max_prompts
        rows = list(islice(read_prompts(prompts, split, subset, column), stop))
    if server is None:
        _check_before_loading(target, dtype, settings, output, rows, start)
    writer = _writer(target, settings, server, api_key, dtype, device, threads)
    if self_prompt is not None:
        rows = list(read_prompts(_self_prompts(writer, self_prompt, output, settings)))
    added = writer.run(rows, output, start, max_prompts)
    typer.echo(f"{added} responses added to {output}.")


def _check_before_loading(
    target: str, dtype: str, settings: RegenerationSettings, output: Path, rows: list[dict[str, Any]], start: int
) -> None:
    """
    Finds what would end the run after the target was loaded.

    Args:
        rows: The prompts; empty where the target is to write them.
    """
    from dspark_hf.responses.self_prompting import prompt_settings
    from dspark_hf.responses.settings import origin_before_loading
    from dspark_hf.responses.writer import check_output, chosen_prompts

    prompts = chosen_prompts(rows, start) if rows else {}
    check_output(output, prompts, origin_before_loading(settings, target, dtype))
    if not rows:
        settings = prompt_settings(settings.seed, settings.slots)
        check_output(_prompts_beside(output), {}, origin_before_loading(settings, target, dtype))


def _writer(
    target: str,
    settings: RegenerationSettings,
    server: str | None,
    api_key: str | None,
    dtype: str,
    device: str | None,
    threads: int | None,
) -> ResponseWriter:
    """What answers: the target here, or a server."""
    if server is not None:
        from dspark_hf.responses import ServerRegenerator

        return ServerRegenerator(server, target, settings, api_key)
    from dspark_hf.responses import Regenerator

    from .loading import load_target

    return Regenerator(*load_target(target, dtype, device, threads), settings)


def _self_prompts(writer: Any, number: int, output: Path, settings: RegenerationSettings) -> Path:
    """A file of prompts by the target, beside the responses."""
    from dspark_hf.responses.self_prompting import prompt_settings, self_prompt

    path = _prompts_beside(output)
    self_prompt(writer.target, writer.tokenizer, number, path, prompt_settings(settings.seed, settings.slots))
    return path


def _prompts_beside(output: Path) -> Path:
    return output.with_suffix(f".prompts{output.suffix}")
