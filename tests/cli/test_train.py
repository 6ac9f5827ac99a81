"""The three commands from prompts to a drafter, on a tiny target."""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_folders

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from typer.testing import CliRunner

from dspark_hf import Drafter, DSparkDrafter
from dspark_hf.registry import presets
from dspark_hf.training.features import amount
from dspark_hf_cli.app import app
from dspark_hf_cli.train import command_of

NEW = [
    "--num-hidden-layers",
    1,
    "--target-layer-ids",
    "0,2",
    "--block-size",
    4,
    "--markov-rank",
    8,
    "--mask-token-id",
    127,
]
RUN = ["--use-cpu", "--no-progress", "--num-anchors", 4, "--logging-steps", 1]
RUN += ["--per-device-train-batch-size", 2, "--held-out", 0.3]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def responses(folders, tmp_path_factory):
    """A file made by `regenerate`."""
    folder = tmp_path_factory.mktemp("data")
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"{i} + {i}?"}) + "\n" for i in range(12)))
    result = invoke(
        "regenerate", "-t", folders.target, "-p", prompts, "-o", folder / "responses.jsonl", "--max-new-tokens", 16,
        "--temperature", 1, "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "12 responses added" in result.output
    return folder / "responses.jsonl"


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


def train(folders, data, output, *more):
    return invoke("train", "--target", folders.target, "--data", data, "--output", output, *NEW, *RUN, *more)


def log(folder: Path) -> list[dict]:
    return list(csv.DictReader((folder / "log.csv").open()))


# ---------------------------------------------------------------------- regenerate


def test_regenerate_resumes(folders, responses):
    before = responses.read_bytes()
    prompts = responses.with_name("prompts.jsonl")
    result = invoke(
        "regenerate", "-t", folders.target, "-p", prompts, "-o", responses, "--max-new-tokens", 16, "--temperature", 1,
        "--device", "cpu",
    )  # fmt: skip
    assert "0 responses added" in result.output and responses.read_bytes() == before


def test_regenerate_without_prompts_lets_the_target_write_them(folders, tmp_path):
    result = invoke(
        "regenerate", "-t", folders.target, "--self-prompt", 2, "-o", tmp_path / "r.jsonl", "--max-new-tokens", 8,
        "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "r.prompts.jsonl").read_text().splitlines()]
    answered = [json.loads(line)["prompt"] for line in (tmp_path / "r.jsonl").read_text().splitlines()]
    assert sorted(prompts) == sorted(answered)


def test_regenerate_needs_one_source_of_prompts(folders, tmp_path):
    assert invoke("regenerate", "-t", folders.target, "-o", tmp_path / "r.jsonl").exit_code == 2


# ---------------------------------------------------------------------- cache-features


def test_a_cache_says_its_size_first_and_refuses_a_full_disk(folders, responses, tmp_path, monkeypatch):
    arguments = ("cache-features", "-t", folders.target, "--data", responses, "-o", tmp_path / "c", "--device", "cpu")
    result = invoke(*arguments, "--dry-run")
    assert result.exit_code == 0, result.output
    assert "12 conversations" in result.output and "38 TB" in result.output and not (tmp_path / "c").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    result = invoke(*arguments)
    assert "12 conversations" in result.output and "Train without a cache" in str(result.exception)


def test_other_features_in_the_folder_are_found_before_the_target_is_loaded(folders, responses, tmp_path, monkeypatch):
    arguments = ("cache-features", "-t", folders.target, "--data", responses, "-o", tmp_path / "c", "--device", "cpu")
    assert invoke(*arguments, "--target-layer-ids", "0,2").exit_code == 0
    monkeypatch.setattr("dspark_hf_cli.loading.target_from_options", lambda *args: pytest.fail("the target was loaded"))
    result = invoke(*arguments, "--target-layer-ids", "0,1")
    assert "target_layer_ids was [0, 2], now [0, 1]" in str(result.exception)


@pytest.mark.parametrize(("number", "text"), [(12, "12 bytes"), (1.5e6, "1.5 MB"), (3.8e13, "38 TB")])
def test_amounts(number, text):
    assert amount(number) == text


# ---------------------------------------------------------------------- train


def test_training_writes_all_files_and_resumes(folders, responses, tmp_path):
    output = tmp_path / "run"
    options = ("--max-steps", 4, "--save-steps", 2, "--draft-vocab-size", 60)
    result = train(folders, responses, output, *options)
    assert result.exit_code == 0, repr(result.exception)
    assert "On the held-out conversations a target pass gives" in result.output
    assert {"log.csv", "training.json", "training_curve.png", "README.md", "model.safetensors"} <= set(
        os.listdir(output)
    )
    drafter = DSparkDrafter.from_pretrained(output)
    assert drafter.config.draft_vocab_size == 60 and drafter.config.block_size == 4
    summary = json.loads((output / "training.json").read_text())
    assert "responses.jsonl" in summary["data"] and "SHA-256" in summary["data"]
    assert summary["command"].startswith("dspark-hf train --target")
    assert {"acceptance_length", "acceptance_4", "confidence_error", "confidence_ece", "hours"} <= set(
        summary["results"]
    )
    rows = log(output)
    assert [row["step"] for row in rows if row["loss"]] == ["1", "2", "3", "4"]
    assert sum(bool(row["eval_acceptance_length"]) for row in rows) >= 2

    result = train(folders, responses, output, "--max-steps", 6, "--save-steps", 2, "--draft-vocab-size", 60)
    assert result.exit_code == 0, repr(result.exception)
    assert (
        train(folders, responses, output, "--max-steps", 6, "--save-steps", 2, "--draft-vocab-size", 60).exit_code == 0
    )
    rows = log(output)
    assert [row["step"] for row in rows if row["loss"]] == ["1", "2", "3", "4", "5", "6"]  # Finished stays finished.
    hours = [float(row["hours"]) for row in rows]
    assert hours == sorted(hours)


def test_cached_features_train_as_the_responses_do(folders, responses, tmp_path):
    cache = tmp_path / "cache"
    result = invoke(
        "cache-features", "-t", folders.target, "--data", responses, "-o", cache, "--target-layer-ids", "0,2",
        "--feature-dtype", "float32", "--positions", "response", "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    losses = []
    for data in (responses, cache):
        output = tmp_path / f"run-{data.name}"
        result = train(folders, data, output, "--max-steps", 2, "--save-strategy", "no", "--held-out", 0)
        assert result.exit_code == 0, repr(result.exception)
        losses.append([float(row["loss"]) for row in log(output) if row["loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def further(folders, responses, output, *more):
    result = invoke(
        "train", "--target", folders.target, "--data", responses, "--output", output, *RUN, "--max-steps", 1,
        "--save-strategy", "no", *more,
    )  # fmt: skip
    assert result.exit_code == 0, repr(result.exception)
    return DSparkDrafter.from_pretrained(output)


def test_a_drafter_is_trained_further_and_gets_heads(folders, responses, tmp_path):
    drafter = further(folders, responses, tmp_path / "run", "--drafter", folders.dflash, "--markov-rank", 8)
    assert drafter.config.markov_rank == 8 and drafter.config.num_hidden_layers == 2
    assert drafter.config.sample_from_anchor is False


def test_a_drafter_gets_a_smaller_vocabulary_of_the_most_frequent_tokens_and_keeps_it(folders, responses, tmp_path):
    smaller = further(folders, responses, tmp_path / "one", "--drafter", folders.random, "--draft-vocab-size", 24)
    chosen = smaller.draft_token_ids.tolist()
    assert len(chosen) == 24 and chosen != list(range(24))
    again = further(folders, responses, tmp_path / "two", "--drafter", tmp_path / "one", "--held-out", 0.6)
    assert again.draft_token_ids.tolist() == chosen


def test_repeating_a_finished_run_leaves_the_same_drafter(folders, responses, tmp_path):
    """Also where the run kept its last checkpoint, not its best."""
    output, found = tmp_path / "run", []
    for _ in range(2):
        result = train(
            folders, responses, output, "--max-steps", 4, "--save-steps", 1, "--eval-strategy", "steps", "--eval-steps", 1,
            "--smaller-is-better", "--learning-rate", 0.01, "--save-total-limit", 4,
        )  # fmt: skip
        assert result.exit_code == 0, repr(result.exception)
        found.append((output / "model.safetensors").read_bytes())
    state = json.loads((output / "trainer_state.json").read_text())
    assert not str(state["best_model_checkpoint"]).endswith("checkpoint-4")  # Or nothing could go wrong.
    assert found[0] == found[1]


def test_a_checkpoint_that_was_being_written_is_passed_over(folders, responses, tmp_path):
    output, options = tmp_path / "run", ("--save-steps", 1)
    assert train(folders, responses, output, *options, "--max-steps", 2).exit_code == 0
    torn = output / "checkpoint-3"
    torn.mkdir()
    (torn / "config.json").write_text("{")
    assert train(folders, responses, output, *options, "--max-steps", 4).exit_code == 0
    assert [row["step"] for row in log(output) if row["loss"]] == ["1", "2", "3", "4"]


def test_a_run_is_not_continued_with_another_drafter(folders, responses, tmp_path):
    options = ("--save-steps", 1, "--max-steps", 1)
    assert train(folders, responses, tmp_path / "run", *options).exit_code == 0
    result = train(folders, responses, tmp_path / "run", *options, "--markov-rank", 4)
    assert "holds another drafter: markov_rank (8 there, 4 here)" in str(result.exception)
    assert train(folders, responses, tmp_path / "run", *options, "--markov-rank", 4, "--no-resume").exit_code == 0


@pytest.mark.parametrize("harm", ["changed", "cut", "gone"])
def test_a_damaged_cache_is_not_trained_on(harm, folders, responses, tmp_path):
    cache = ("cache-features", "-t", folders.target, "--data", responses, "-o", tmp_path / "cache", "--device", "cpu")
    assert invoke(*cache, "--target-layer-ids", "0,2").exit_code == 0
    shard = next((tmp_path / "cache").glob("shard-*"))
    content = bytearray(shard.read_bytes())
    content[-100] ^= 255
    shard.unlink()
    if harm != "gone":
        shard.write_bytes(content if harm == "changed" else content[:200])
    result = train(folders, tmp_path / "cache", tmp_path / "run", "--max-steps", 1)
    assert "is damaged: shard-00000.safetensors" in str(result.exception)


def test_holding_nothing_out_is_reported(folders, responses, tmp_path, caplog):
    options = ("--max-steps", 1, "--held-out", 1e-9, "--save-strategy", "no")
    with caplog.at_level("WARNING", logger="dspark_hf"):
        assert train(folders, responses, tmp_path / "run", *options).exit_code == 0
    assert "None of 12 conversations is held out" in caplog.text


# peft asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_leaves_an_adapter(folders, responses, tmp_path):
    pytest.importorskip("peft")
    result = invoke(
        "train", "--target", folders.target, "--data", responses, "--output", tmp_path / "run", "--drafter", folders.random,
        "--max-steps", 2, "--save-steps", 1, "--lora-rank", 4, *RUN,
    )  # fmt: skip
    assert result.exit_code == 0, repr(result.exception)
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert "The adapter is in" in result.output
    card = (tmp_path / "run" / "README.md").read_text()
    assert "This PEFT adapter is for the drafter path/to/random" in card and "lora_rank | 4" in card
    with pytest.raises(OSError, match=r"is an adapter of a drafter: .*PeftModel"):
        DSparkDrafter.from_pretrained(tmp_path / "run")


def test_tensorboard_gets_what_is_logged(folders, responses, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "board")
    try:
        more = ("--report-to", "tensorboard", "--max-steps", 2, "--save-strategy", "no", "--held-out", 0)
        assert train(folders, responses, tmp_path / "run", *more).exit_code == 0
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    found = events.EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent)).Reload()
    assert "train/acceptance_length" in found.Tags()["scalars"]
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2]


# ---------------------------------------------------------------------- options


def parsed(*arguments):
    """What the options mean, without a run."""
    command = typer.main.get_command(app).commands["train"]
    with command.make_context("train", [str(argument) for argument in arguments]) as context:
        return command_of(context)


def needed(tmp_path):
    return ["--target", "T", "--data", "a", "--output", tmp_path, "--use-cpu"]


def test_defaults_are_those_of_the_trainer(tmp_path):
    """The help shows defaults; those that are used are the trainer's."""
    with_defaults = vars(parsed(*needed(tmp_path)).arguments) | vars(parsed(*needed(tmp_path)).options)
    with_defaults["lora_target_modules"] = ",".join(with_defaults["lora_target_modules"])
    shown = {option.name: option.default for option in typer.main.get_command(app).commands["train"].params}
    compared = {name for name, value in shown.items() if value is not None} & with_defaults.keys()
    assert len(compared) > 35
    different = {name: (shown[name], with_defaults[name]) for name in compared if shown[name] != with_defaults[name]}
    # The first was given above, the others mean the same.
    assert different == {"use_cpu": (False, True), "report_to": ("none", []), "fsdp": (False, None)}


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_sets_options_and_the_command_line_overrides_them(suffix, tmp_path):
    file = tmp_path / f"run{suffix}"
    values = {"target": "T", "data": ["a", "b"], "output": str(tmp_path), "learning_rate": "2e-3", "markov-rank": 64,
              "use_cpu": True, "target_layer_ids": [1, 3], "qk_norm": False, "adam_beta2": "9.8e-1"}  # fmt: skip
    file.write_text(
        json.dumps(values) if suffix == ".json" else "".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items())
    )
    command = parsed("--config", file, "--markov-rank", "32")
    assert command.options.target == "T" and command.options.data == ["a", "b"]
    assert command.arguments.learning_rate == 2e-3 and command.arguments.adam_beta2 == 0.98
    assert command.drafter == {"markov_rank": 32, "target_layer_ids": [1, 3], "qk_norm": False}


def test_the_help_names_every_kind_of_drafter(tmp_path):
    (kind,) = (option for option in typer.main.get_command(app).commands["train"].params if option.name == "kind")
    assert all(name in kind.help for name in presets())
    for name in presets():
        assert parsed(*needed(tmp_path), "--kind", name).options.kind == name
    with pytest.raises(typer.BadParameter, match="kind is 'eagle4', but it has to be one of dspark"):
        parsed(*needed(tmp_path), "--kind", "eagle4")


def test_further_settings_by_name(tmp_path):
    further = ("--set", "adam_beta2=0.5", "--set", "norm-before-residual=true", "--set", "head_dim=16")
    command = parsed(*needed(tmp_path), *further, "--set", "lr_scheduler_kwargs={num_cycles: 2}", "--set", "optim=sgd")
    assert command.arguments.adam_beta2 == 0.5 and command.arguments.lr_scheduler_kwargs == {"num_cycles": 2}
    assert command.drafter == {"norm_before_residual": True, "head_dim": 16}
    assert command.given["adam_beta2"] == 0.5 and "seed" not in command.given


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("adam_beta3=1", r"no setting adam_beta3 \(did you mean adam_beta"),
        ("adam_beta2=many", "adam_beta2 is 'many', but it has to be of type float"),
        ("head_dim=[1, 2]", "head_dim is .*, but it has to be of type int or none"),
        ("bf16=maybe", "bf16 is 'maybe', but it has to be of type bool"),
        ("adam_beta2", "write NAME=VALUE"),
        ("output_dir=x", "is called output"),
    ],
)
def test_further_settings_are_checked(setting, message, tmp_path):
    arguments = [part for part in needed(tmp_path) if part != "--bf16"]
    with pytest.raises(typer.BadParameter, match=message):
        parsed(*arguments, "--set", setting)


def test_values_of_a_file_are_checked_as_those_of_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    options = f"target: T\noutput: {tmp_path}\nuse_cpu: true\n"
    file.write_text(f"{options}data: rows.jsonl\ntarget_layer_ids: [1, '3']\n")
    command = parsed("--config", file)
    assert command.options.data == ["rows.jsonl"] and command.drafter == {"target_layer_ids": [1, 3]}
    file.write_text(f"{options}data: rows.jsonl\nmarkov_head_type: Gated\n")
    with pytest.raises(typer.BadParameter, match=r"sets markov_head_type to 'Gated'.*gated"):
        parsed("--config", file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", r"run.yaml' is not valid YAML"),
        ("- a", "holds a list"),
        ("max_steps: many", "sets max_steps to 'many'"),
        ("save_dtype: bogus", "save_dtype is 'bogus'"),
        ("lerning_rate: 1", r"no setting lerning_rate \(did you mean learning_rate\?\)"),
    ],
)
def test_files_that_are_not_option_files_are_refused(text, message, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(typer.BadParameter, match=message):
        parsed(*needed(tmp_path), "--config", tmp_path / "run.yaml")


def test_a_file_that_does_not_exist(tmp_path):
    with pytest.raises(typer.BadParameter, match=r"run.yaml' cannot be read: No such file"):
        parsed(*needed(tmp_path), "--config", tmp_path / "run.yaml")


def test_held_out_rows_are_evaluated_unless_told_otherwise(tmp_path):
    options = [*needed(tmp_path), "--save-steps", "7"]
    arguments = parsed(*options).arguments
    assert (arguments.eval_strategy, arguments.eval_steps, arguments.load_best_model_at_end) == ("steps", 7, True)
    assert parsed(*options, "--eval-strategy", "no").arguments.eval_strategy == "no"
    assert parsed(*options, "--held-out", "0").arguments.eval_strategy == "no"


def test_options_of_another_kind_of_drafter_are_refused(folders, responses, tmp_path):
    setting = ("--set", "norm_before_residual=true")
    result = train(folders, responses, tmp_path / "run", "--max-steps", 1, *setting)
    assert "norm_before_residual: only drafters of --kind eagle3" in str(result.exception)
    options = ("--target", folders.target, "--data", responses, "--output", tmp_path / "run", *RUN, "--max-steps", 1)
    result = invoke("train", *options, "--kind", "eagle3", *setting, "--save-strategy", "no")
    assert result.exit_code == 0, repr(result.exception)
    assert Drafter.from_pretrained(tmp_path / "run").config.norm_before_residual


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"--data": "nowhere.jsonl"}, r"no file 'nowhere.jsonl'"),
        ({"--target": "/nowhere/target"}, "no folder '/nowhere/target'"),
        ({"--drafter": "/nowhere/drafter"}, "no folder '/nowhere/drafter'"),
        ({"--target-device": "nonsense"}, "no device 'nonsense'"),
        ({"--target-dtype": "int8"}, "'int8', which is not a floating-point dtype"),
    ],
    ids=lambda wrong: next(iter(wrong)) if isinstance(wrong, dict) else "",
)
def test_what_is_wrong_is_said_before_weights_are_read(wrong, message, folders, responses, tmp_path, monkeypatch):
    from transformers import PreTrainedModel

    def must_not_load(*args, **kwargs):
        raise AssertionError("weights were read")

    monkeypatch.setattr(PreTrainedModel, "from_pretrained", must_not_load)
    options = {"--target": folders.target, "--data": responses, "--output": tmp_path / "run"} | wrong
    result = invoke("train", *(part for pair in options.items() for part in pair), *RUN)
    assert message in str(result.exception)


def test_another_drafter_than_the_run_before_is_refused_before_weights_are_read(
    folders, responses, tmp_path, monkeypatch
):
    options = ("--save-steps", 1, "--max-steps", 1)
    assert train(folders, responses, tmp_path / "run", *options).exit_code == 0
    monkeypatch.setattr("dspark_hf.training.run.load_frozen_target", lambda *args: pytest.fail("the target was loaded"))
    result = train(folders, responses, tmp_path / "run", *options, "--markov-rank", 4)
    assert "holds another drafter: markov_rank (8 there, 4 here)" in str(result.exception)


# ---------------------------------------------------------------------- lines and summary


def test_training_prints_a_line_of_figures_per_log(folders, responses, tmp_path):
    options = ("--max-steps", 2, "--save-strategy", "no", "--eval-strategy", "steps", "--eval-steps", 2)
    result = train(folders, responses, tmp_path / "run", *options)
    assert result.exit_code == 0, repr(result.exception)
    lines = [line for line in result.stderr.splitlines() if line.startswith(("training", "held out"))]
    assert [line.split()[:2] for line in lines[:2]] == [["training", "1"], ["training", "2"]]
    assert any(line.startswith("held out ") for line in lines)
    header = next(line for line in result.stderr.splitlines() if "tokens/pass" in line)
    assert all(len(line) <= 80 for line in [header, *lines])
    assert "{" not in result.stderr + result.stdout
    with_figures = log(tmp_path / "run")[0]
    assert f"{float(with_figures['acceptance_length']):.2f}" in lines[0]


def test_summary_and_card_hold_no_paths_of_this_machine(folders, responses, tmp_path):
    result = train(
        folders, responses, tmp_path / "run", "--max-steps", 1, "--save-strategy", "no", "--set", "adam_beta2=0.9"
    )
    assert result.exit_code == 0, repr(result.exception)
    for name in ("training.json", "README.md"):
        text = (tmp_path / "run" / name).read_text()
        assert str(tmp_path) not in text and str(folders.target) not in text and str(responses) not in text
    command = json.loads((tmp_path / "run" / "training.json").read_text())["command"]
    assert command.startswith("dspark-hf train --target target --data responses.jsonl --output run")
    assert command.endswith("--set adam_beta2=0.9")
    again = command.split()[2:]
    assert parsed(*again).arguments.adam_beta2 == 0.9


@pytest.mark.slow
def test_two_processes_train_as_one(folders, responses, tmp_path):
    found = []
    for processes, batch in ((1, 4), (2, 2)):
        output = tmp_path / f"run{processes}"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        arguments = ["--target", folders.target, "--data", responses, "--output", output, *NEW, *RUN, "--max-steps", 3,
                     "--per-device-train-batch-size", batch, "--save-strategy", "no", "--set", "ddp_backend=gloo"]  # fmt: skip
        command = [sys.executable, *launcher, "-m", "dspark_hf_cli", "train", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        found.append([float(row["loss"]) for row in log(output) if row["loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
