"""`dspark-hf regenerate`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .loading import say
from .options import ANSWERS, DATA, MACHINE, OUTPUT, Device, Dtype, Seed, Split, Target, Thinking, Threads

if TYPE_CHECKING:
    from dspark_hf.responses.settings import RegenerationSettings
    from dspark_hf.responses.writer import ResponseWriter


def regenerate(
    target: Target,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            rich_help_panel=OUTPUT,
            help="JSONL file for the responses. An interrupted run resumes from it.",
        ),
    ],
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            "-p",
            metavar="NAME",
            rich_help_panel=DATA,
            help="A JSONL file whose lines hold `prompt`, `messages` or `turns`, or a data set on the Hub.",
        ),
    ] = None,
    self_prompt: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=DATA,
            help="Instead of --prompts: let the target write N prompts, into a file next to --output whose name has `.prompts` "
            "before its suffix.",
        ),
    ] = None,
    split: Split = "train",
    subset: Annotated[
        str | None,
        typer.Option(metavar="NAME", rich_help_panel=DATA, help="Subset (configuration) of a data set on the Hub."),
    ] = None,
    column: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=DATA,
            help="Column with the prompt: a text, a list of messages or a list of user turns.",
        ),
    ] = None,
    start: Annotated[int, typer.Option(min=0, metavar="N", rich_help_panel=DATA, help="Skip the first N prompts.")] = 0,
    max_prompts: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=DATA, help="Answer at most N prompts.")
    ] = None,
    thinking: Thinking = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=ANSWERS,
            help="Longest response, in tokens. By default that of the target's generation config, or 512.",
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            metavar="T",
            rich_help_panel=ANSWERS,
            help="Sampling temperature; 0 decodes greedily. By default that of the target's generation config.",
        ),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=ANSWERS,
            help="Sample among the N likeliest tokens; 0 for all. By default that of the target's generation config.",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="P",
            rich_help_panel=ANSWERS,
            help="Sample among the likeliest tokens that together have the probability P. By default that of the target's "
            "generation config.",
        ),
    ] = None,
    seed: Seed = 0,
    save_token_ids: Annotated[
        bool,
        typer.Option(
            "--save-token-ids/--no-save-token-ids",
            rich_help_panel=OUTPUT,
            help="Write the generated token ids with the text; training then uses exactly these. Servers return text only.",
        ),
    ] = True,
    slots: Annotated[
        int,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=MACHINE,
            help="Responses that are decoded together, or requests that a server gets at once.",
        ),
    ] = 128,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            rich_help_panel=MACHINE,
            help="Let an OpenAI-compatible server that serves --target answer, such as http://localhost:8000, instead of "
            "loading the target here.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="OPENAI_API_KEY", metavar="KEY", rich_help_panel=MACHINE, help="Key for the server."),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = None,
    threads: Threads = None,
) -> None:
    """
    Let the target answer prompts, so that a drafter can learn from its responses.

    An interrupted run resumes with the same command: no response is lost, and none is written twice.
    """
    if (prompts is None) == (self_prompt is None):
        raise typer.BadParameter("Give either --prompts or --self-prompt.")
    if self_prompt is not None and server is not None:
        raise typer.BadParameter("--self-prompt does not work with --server: a server cannot continue a chat template.")
    say("Starting ...")
    from dspark_hf.conversations import read_prompts
    from dspark_hf.responses import RegenerationSettings

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
    Checks, before the target is loaded, for errors that would end the run later.

    Args:
        rows: The prompts; empty if the target writes them.
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
    """The object that answers prompts: with the target here, or with a server."""
    if server is not None:
        from dspark_hf.responses import ServerRegenerator

        return ServerRegenerator(server, target, settings, api_key)
    from dspark_hf.responses import Regenerator

    from .loading import target_from_options

    return Regenerator(*target_from_options(target, dtype, device, threads), settings)


def _self_prompts(writer: Any, number: int, output: Path, settings: RegenerationSettings) -> Path:
    """Lets the target write prompts, into a file next to the responses; returns its path."""
    from dspark_hf.responses.self_prompting import prompt_settings, self_prompt

    path = _prompts_beside(output)
    self_prompt(writer.target, writer.tokenizer, number, path, prompt_settings(settings.seed, settings.slots))
    return path


def _prompts_beside(output: Path) -> Path:
    return output.with_suffix(f".prompts{output.suffix}")
