"""`dspark-hf train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .loading import say
from .option_file import command_line, from_file, given_options, other_settings
from .options import (
    DATA,
    MACHINE,
    MODELS,
    OUTPUT,
    Data,
    MaxLength,
    NumAnchors,
    Split,
    Target,
    TargetLayerIds,
    Thinking,
    Threads,
    whole_numbers,
)

if TYPE_CHECKING:
    from dspark_hf.hub import TrainingSummary
    from dspark_hf.training.options import TrainCommand
    from dspark_hf.training.run import TrainingRun

DRAFTER, LOSS, OPTIMISER, CHECKPOINTS, LORA, MORE = (
    "Drafter",
    "Loss",
    "Optimiser",
    "Evaluation, checkpoints and logs",
    "LoRA",
    "More",
)

When = Literal["no", "steps", "epoch"]


def train(
    context: typer.Context,
    target: Target,
    data: Data,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FOLDER",
            rich_help_panel=OUTPUT,
            help="Folder for the drafter, its checkpoints and logs. An interrupted run resumes from it.",
        ),
    ],
    eval_data: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=DATA,
            help="Conversations for evaluation, given like --data. By default a part of --data is held out.",
        ),
    ] = None,
    held_out: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            metavar="SHARE",
            rich_help_panel=DATA,
            help="Share of the conversations in --data that is kept for evaluation and never trained on. It is chosen by "
            "the prompt, so every file and every run holds out the same conversations. 0 holds out none.",
        ),
    ] = 0.01,
    split: Split = "train",
    max_length: MaxLength = 4096,
    thinking: Thinking = None,
    # ------------------------------------------------------------------ the drafter
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            "-d",
            metavar="MODEL",
            rich_help_panel=MODELS,
            help="Start from this drafter instead of a new one. If options below differ from its configuration, weights "
            "of the same name and shape are kept and the others are new: a DFlash drafter gets heads that way.",
        ),
    ] = None,
    kind: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=DRAFTER,
            help="Kind of a new drafter: dspark, dflash (no heads), dflash2 (convolutions in the layers), eagle3 (drafts token "
            "by token) or deepseek-v4 (for targets of that family only).",
        ),
    ] = "dspark",
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=DRAFTER,
            help="Size of a block: the anchor token and N - 1 masked slots.",
        ),
    ] = None,
    num_hidden_layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", rich_help_panel=DRAFTER, help="Number of draft layers.")
    ] = None,
    target_layer_ids: TargetLayerIds = None,
    markov_rank: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", rich_help_panel=DRAFTER, help="Rank of the sequential head; 0 for none."),
    ] = None,
    markov_head_type: Annotated[
        Literal["vanilla", "gated", "rnn"] | None,
        typer.Option(rich_help_panel=DRAFTER, help="Kind of sequential head."),
    ] = None,
    enable_confidence_head: Annotated[
        bool | None,
        typer.Option(
            "--confidence-head/--no-confidence-head",
            rich_help_panel=DRAFTER,
            help="Predict for each draft how likely it is to be accepted.",
        ),
    ] = None,
    sample_from_anchor: Annotated[
        bool | None,
        typer.Option(
            "--sample-from-anchor/--no-sample-from-anchor",
            rich_help_panel=DRAFTER,
            help="Whether the anchor's slot predicts a token too (DeepSpec's layout) or not (z-lab's layout).",
        ),
    ] = None,
    draft_vocab_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=DRAFTER,
            help="Draft only the N tokens that the responses use most. By default all tokens.",
        ),
    ] = None,
    mask_token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN",
            rich_help_panel=DRAFTER,
            help="Token at masked slots, one that no text contains. By default an id that the tokenizer does not use.",
        ),
    ] = None,
    mask_token_id: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", rich_help_panel=DRAFTER, help="The same token by its id."),
    ] = None,
    attn_implementation: Annotated[
        Literal["flex_attention", "sdpa", "eager"] | None,
        typer.Option(
            rich_help_panel=DRAFTER,
            help="The drafter's attention. By default flex_attention on a GPU, sdpa on the CPU.",
        ),
    ] = None,
    # ------------------------------------------------------------------ the loss
    num_anchors: NumAnchors = 512,
    position_decay: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="X",
            rich_help_panel=LOSS,
            help="Draft j of a block, counted from 0, has the weight exp(-j / X); 0 gives all the same weight.",
        ),
    ] = 4.0,
    ce_weight: Annotated[
        float,
        typer.Option(min=0.0, metavar="X", rich_help_panel=LOSS, help="Weight of the cross-entropy with the response."),
    ] = 0.1,
    tv_weight: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="X",
            rich_help_panel=LOSS,
            help="Weight of the L1 distance to the target's distribution, which is twice the rejection probability.",
        ),
    ] = 0.9,
    confidence_weight: Annotated[
        float,
        typer.Option(
            min=0.0, metavar="X", rich_help_panel=LOSS, help="Weight of the confidence head's binary cross-entropy."
        ),
    ] = 1.0,
    logits_chunk_size: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="N",
            rich_help_panel=LOSS,
            help="Compute the logits of N drafts at once, which takes about N x vocabulary x 16 bytes. 0 computes all at "
            "once.",
        ),
    ] = 1024,
    # ------------------------------------------------------------------ the optimiser
    learning_rate: Annotated[
        float, typer.Option(min=0.0, metavar="X", rich_help_panel=OPTIMISER, help="Highest learning rate.")
    ] = 6e-4,
    lr_scheduler_type: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=OPTIMISER,
            help="Schedule of the learning rate: constant, constant_with_warmup, cosine, inverse_sqrt, linear or "
            "warmup_stable_decay.",
        ),
    ] = "linear",
    warmup_steps: Annotated[
        float,
        typer.Option(
            min=0.0,
            metavar="X",
            rich_help_panel=OPTIMISER,
            help="Steps in which the learning rate rises; below 1, a share of all steps.",
        ),
    ] = 0.04,
    weight_decay: Annotated[
        float, typer.Option(min=0.0, metavar="X", rich_help_panel=OPTIMISER, help="Weight decay of AdamW.")
    ] = 0.0,
    max_grad_norm: Annotated[
        float, typer.Option(min=0.0, metavar="X", rich_help_panel=OPTIMISER, help="Clip gradients to this norm.")
    ] = 1.0,
    matrix_optimizer: Annotated[
        Literal["adamw", "muon"],
        typer.Option(
            rich_help_panel=OPTIMISER,
            help="Optimiser of the weight matrices in the draft layers. Muon needs about half the steps, and cannot be used "
            "with FSDP or DeepSpeed.",
        ),
    ] = "adamw",
    num_train_epochs: Annotated[
        float,
        typer.Option(min=0.0, metavar="X", rich_help_panel=OPTIMISER, help="How often the data is gone through."),
    ] = 3.0,
    max_steps: Annotated[
        int,
        typer.Option(
            metavar="N", rich_help_panel=OPTIMISER, help="Stop after N steps, whatever --num-train-epochs says."
        ),
    ] = -1,
    per_device_train_batch_size: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=OPTIMISER, help="Conversations per pass and process.")
    ] = 8,
    gradient_accumulation_steps: Annotated[
        int, typer.Option(min=1, metavar="N", rich_help_panel=OPTIMISER, help="Passes per step.")
    ] = 1,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--gradient-checkpointing/--no-gradient-checkpointing",
            rich_help_panel=OPTIMISER,
            help="Save memory by computing activations twice.",
        ),
    ] = None,
    bf16: Annotated[
        bool, typer.Option("--bf16", rich_help_panel=OPTIMISER, help="Train in bfloat16 mixed precision.")
    ] = False,
    fp16: Annotated[
        bool, typer.Option("--fp16", rich_help_panel=OPTIMISER, help="Train in float16 mixed precision.")
    ] = False,
    seed: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=OPTIMISER, help="Seed of initial weights, order and anchors.")
    ] = 42,
    # ------------------------------------------------------------------ evaluation, checkpoints and logs
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--no-resume",
            rich_help_panel=CHECKPOINTS,
            help="Continue from the last checkpoint in --output, if there is one.",
        ),
    ] = True,
    save_strategy: Annotated[
        Literal["no", "steps", "epoch", "best"],
        typer.Option(rich_help_panel=CHECKPOINTS, help="When to write checkpoints."),
    ] = "steps",
    save_steps: Annotated[
        float, typer.Option(min=0.0, metavar="N", rich_help_panel=CHECKPOINTS, help="Write a checkpoint every N steps.")
    ] = 500,
    save_total_limit: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", rich_help_panel=CHECKPOINTS, help="Keep N checkpoints, the best among them."),
    ] = 2,
    save_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=CHECKPOINTS,
            help="Floating-point type of the finished drafter, such as bfloat16. By default that of training.",
        ),
    ] = None,
    eval_strategy: Annotated[
        When | None,
        typer.Option(
            rich_help_panel=CHECKPOINTS, help="When to evaluate. By default whenever a checkpoint is written."
        ),
    ] = None,
    eval_steps: Annotated[
        float | None, typer.Option(min=0.0, metavar="N", rich_help_panel=CHECKPOINTS, help="Evaluate every N steps.")
    ] = None,
    per_device_eval_batch_size: Annotated[
        int,
        typer.Option(min=1, metavar="N", rich_help_panel=CHECKPOINTS, help="Conversations per pass and process."),
    ] = 8,
    metric_for_best_model: Annotated[
        str,
        typer.Option(
            metavar="NAME", rich_help_panel=CHECKPOINTS, help="Figure by which the best checkpoint is chosen."
        ),
    ] = "eval_acceptance_length",
    greater_is_better: Annotated[
        bool,
        typer.Option(
            "--greater-is-better/--smaller-is-better",
            rich_help_panel=CHECKPOINTS,
            help="Which direction of that figure is better.",
        ),
    ] = True,
    logging_steps: Annotated[
        float,
        typer.Option(min=0.0, metavar="N", rich_help_panel=CHECKPOINTS, help="Print a line of figures every N steps."),
    ] = 20,
    report_to: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            rich_help_panel=CHECKPOINTS,
            help="Where else to log, comma-separated, such as tensorboard or wandb.",
        ),
    ] = "none",
    run_name: Annotated[
        str | None, typer.Option(metavar="NAME", rich_help_panel=CHECKPOINTS, help="Name of the run in such logs.")
    ] = None,
    disable_tqdm: Annotated[
        bool | None,
        typer.Option("--no-progress/--progress", rich_help_panel=CHECKPOINTS, help="Hide or show the progress bar."),
    ] = None,
    push_to_hub: Annotated[
        bool, typer.Option("--push-to-hub", rich_help_panel=CHECKPOINTS, help="Push the drafter to the Hub.")
    ] = False,
    hub_model_id: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", rich_help_panel=CHECKPOINTS, help="Its repository on the Hub."),
    ] = None,
    hub_private_repo: Annotated[
        bool | None,
        typer.Option(
            "--hub-private-repo/--hub-public-repo",
            rich_help_panel=CHECKPOINTS,
            help="Whether a new repository is private.",
        ),
    ] = None,
    # ------------------------------------------------------------------ LoRA
    lora_rank: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            rich_help_panel=LORA,
            help="Train LoRA adapters of this rank, and the heads, instead of all weights.",
        ),
    ] = None,
    lora_alpha: Annotated[
        float | None,
        typer.Option(metavar="X", rich_help_panel=LORA, help="LoRA's scale alpha. By default twice the rank."),
    ] = None,
    lora_dropout: Annotated[
        float,
        typer.Option(min=0.0, max=1.0, metavar="P", rich_help_panel=LORA, help="Dropout in front of the adapters."),
    ] = 0.0,
    lora_target_modules: Annotated[
        str,
        typer.Option(metavar="NAMES", rich_help_panel=LORA, help="Linear layers that get an adapter, comma-separated."),
    ] = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,fc",
    lora_heads: Annotated[
        bool,
        typer.Option(
            "--lora-heads/--no-lora-heads",
            rich_help_panel=LORA,
            help="Also train the sequential and the confidence head; the adapter then holds whole copies of them.",
        ),
    ] = True,
    # ------------------------------------------------------------------ the machine
    target_dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MACHINE,
            help="Floating-point type of the target, which is not trained; auto takes that of its files.",
        ),
    ] = "auto",
    target_device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=MACHINE,
            help="Device of the target, such as cuda:1, or auto to spread it. By default that of the drafter.",
        ),
    ] = None,
    use_cpu: Annotated[
        bool, typer.Option("--use-cpu", rich_help_panel=MACHINE, help="Train on the CPU even if there is a GPU.")
    ] = False,
    threads: Threads = None,
    dataloader_num_workers: Annotated[
        int, typer.Option(min=0, metavar="N", rich_help_panel=MACHINE, help="Processes that prepare batches.")
    ] = 0,
    fsdp: Annotated[bool, typer.Option("--fsdp", rich_help_panel=MACHINE, help="Shard the drafter with FSDP.")] = False,
    fsdp_config: Annotated[
        str | None, typer.Option(metavar="FILE", rich_help_panel=MACHINE, help="FSDP's settings, a JSON file.")
    ] = None,
    deepspeed: Annotated[
        str | None,
        typer.Option(metavar="FILE", rich_help_panel=MACHINE, help="Train with DeepSpeed; its settings, a JSON file."),
    ] = None,
    # ------------------------------------------------------------------ more
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            is_eager=True,
            callback=from_file,
            rich_help_panel=MORE,
            help="A YAML or JSON file with options by name, such as `learning_rate: 3e-4`. Options on the command line come "
            "before those in the file.",
        ),
    ] = None,
    set: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            rich_help_panel=MORE,
            help="Any other field of the drafter's configuration or of transformers' TrainingArguments, such as "
            "adam_beta2=0.98. May be given several times.",
        ),
    ] = None,
) -> None:
    """
    Train a drafter on the target's responses, or fine-tune one.

    If it is interrupted, the same command resumes from the last checkpoint. With several GPUs: `accelerate launch -m
    dspark_hf_cli train ...`, or `torchrun --nproc_per_node 2 -m dspark_hf_cli train ...`.
    """
    command = command_of(context)
    say(f"Loading the target {target} ...")

    from dspark_hf.hub import write_card
    from dspark_hf.training.run import train as run_training

    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    run = run_training(command)
    if not run.trainer.is_world_process_zero():
        return
    folder = command.arguments.folder
    typed = command_line(context, given_options(context), other_settings(context))
    summary_of(run, command, typed).save(folder)
    model, is_adapter = run.trainer.model, command.options.lora_rank is not None
    adapts = (command.options.drafter or "its drafter") if is_adapter else None
    write_card(model.get_base_model() if is_adapter else model, folder, adapts=adapts)
    typer.echo(closing_line(run, folder, "adapter" if is_adapter else "drafter"))


def command_of(context: typer.Context) -> TrainCommand:
    """
    The options by the names and types that the trainer knows.

    Raises:
        typer.BadParameter: for a value that cannot be used, or a name in a file or in --set that is not known.
    """
    others = other_settings(context)
    if "output_dir" in others:
        raise typer.BadParameter("The folder of the run is called output, not output_dir.")
    say("Starting ...")
    from dspark_hf.training.options import train_command

    not_settings = ("config", "set", "threads")
    settings = {name: value for name, value in given_options(context).items() if name not in not_settings}
    settings["output_dir"] = str(settings.pop("output"))
    if "target_layer_ids" in settings:
        settings["target_layer_ids"] = whole_numbers(settings["target_layer_ids"], "--target-layer-ids", smallest=-1)
    if not sys.stderr.isatty():
        settings.setdefault("disable_tqdm", True)  # A file gets the lines of figures alone.
    for name in ("lora_target_modules", "report_to"):
        if name in settings:
            settings[name] = [part.strip() for part in settings[name].split(",")]
    try:
        return train_command(settings | others)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


# Settings that are part of the command line or the description of the data.
_SAID_ELSEWHERE = ("target", "data", "eval_data", "output_dir", "drafter", "disable_tqdm")


def summary_of(run: TrainingRun, command: TrainCommand, typed: str) -> TrainingSummary:
    """The description of a run for the model card, without local paths."""
    from dspark_hf.evaluation.environment import environment
    from dspark_hf.hub import TrainingSummary
    from dspark_hf.hub.private import public_name
    from dspark_hf.training.history import hours_of
    from dspark_hf.training.run import FIGURE

    state, folder = run.trainer.state, Path(command.arguments.folder)
    found = environment()
    machine = {name: found[name] for name in ("platform", "cpu", "cpu_count", "memory_gib", "accelerators", "cuda")}
    results: dict[str, Any] = {name.removeprefix("eval_"): value for name, value in run.metrics.items()}
    results |= {"hours": hours_of(state.log_history), "steps": state.global_step}
    if state.best_model_checkpoint:
        results["best_checkpoint"] = Path(state.best_model_checkpoint).name
    settings = {
        name: ", ".join(map(public_name, value))
        if isinstance(value, list)
        else value
        if isinstance(value, bool)
        else public_name(value)
        for name, value in command.given.items()
        if name not in _SAID_ELSEWHERE
    }
    return TrainingSummary(
        command=typed,
        data=data_in_words(run),
        datasets=[source.name for source, _, _ in run.data if not Path(source.name).exists()],
        settings=settings | {"processes": command.arguments.world_size},
        results=results,
        environment=found["packages"] | {"python": found["python"]} | machine,
        figures=[FIGURE] if (folder / FIGURE).exists() else [],
    )


def data_in_words(run: TrainingRun) -> str:
    """Each source with its rows, tokens and checksum."""
    from dspark_hf.hub.private import public_name

    parts = []
    for source, trained, held_out in run.data:
        text = f"`{public_name(source.name)}`:"
        for verb, indices in (("trained on", trained), ("held out", held_out)):
            if indices:
                summary = source.summary(indices)
                text += f" {summary['rows']:,} conversations ({summary['response_tokens']:,} response tokens) {verb},"
        parts.append(text.rstrip(",") + (f" (SHA-256 {source.sha256})" if source.sha256 else ""))
    return "; ".join(parts)


def closing_line(run: TrainingRun, folder: Any, what: str) -> str:
    """Where the drafter or adapter is, and how good it is."""
    from dspark_hf.hub.words import gain_in_words

    line = f"The {what} is in {folder}."
    length = run.metrics.get("eval_acceptance_length")
    return line if length is None else f"{line} {gain_in_words(length)}"
