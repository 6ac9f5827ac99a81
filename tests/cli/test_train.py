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

from typer.testing import CliRunner

from dspark_hf import Drafter, DSparkDrafter
from dspark_hf.training.features import amount
from dspark_hf.training.options import parse_train_options, train_parser
from dspark_hf_cli.app import app

NEW = [
    "--num_hidden_layers",
    1,
    "--target_layer_ids",
    0,
    2,
    "--block_size",
    4,
    "--markov_rank",
    8,
    "--mask_token_id",
    127,
]
RUN = ["--use_cpu", "--report_to", "none", "--disable_tqdm", "true", "--num_anchors", 4, "--logging_steps", 1]
RUN += ["--per_device_train_batch_size", 2, "--held_out", 0.3]


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
    return invoke("train", "--target", folders.target, "--data", data, "--output_dir", output, *NEW, *RUN, *more)


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
    assert "12 rows" in result.output and "38 TB" in result.output and not (tmp_path / "c").exists()
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    result = invoke(*arguments)
    assert "12 rows" in result.output and "Train without a cache" in str(result.exception)


@pytest.mark.parametrize(("number", "text"), [(12, "12 bytes"), (1.5e6, "1.5 MB"), (3.8e13, "38 TB")])
def test_amounts(number, text):
    assert amount(number) == text


# ---------------------------------------------------------------------- train


def test_training_writes_all_files_and_resumes(folders, responses, tmp_path):
    output = tmp_path / "run"
    options = ("--max_steps", 4, "--save_steps", 2, "--draft_vocab_size", 60)
    result = train(folders, responses, output, *options)
    assert result.exit_code == 0, repr(result.exception)
    assert "tokens a target pass" in result.output
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

    result = train(folders, responses, output, "--max_steps", 6, "--save_steps", 2, "--draft_vocab_size", 60)
    assert result.exit_code == 0, repr(result.exception)
    assert (
        train(folders, responses, output, "--max_steps", 6, "--save_steps", 2, "--draft_vocab_size", 60).exit_code == 0
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
        result = train(folders, data, output, "--max_steps", 2, "--save_strategy", "no", "--held_out", 0)
        assert result.exit_code == 0, repr(result.exception)
        losses.append([float(row["loss"]) for row in log(output) if row["loss"]])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def further(folders, responses, output, *more):
    result = invoke(
        "train", "--target", folders.target, "--data", responses, "--output_dir", output, *RUN, "--max_steps", 1,
        "--save_strategy", "no", *more,
    )  # fmt: skip
    assert result.exit_code == 0, repr(result.exception)
    return DSparkDrafter.from_pretrained(output)


def test_a_drafter_is_trained_further_and_gets_heads(folders, responses, tmp_path):
    drafter = further(folders, responses, tmp_path / "run", "--drafter", folders.dflash, "--markov_rank", 8)
    assert drafter.config.markov_rank == 8 and drafter.config.num_hidden_layers == 2
    assert drafter.config.sample_from_anchor is False


def test_a_drafter_gets_a_smaller_vocabulary_of_the_most_frequent_tokens_and_keeps_it(folders, responses, tmp_path):
    smaller = further(folders, responses, tmp_path / "one", "--drafter", folders.random, "--draft_vocab_size", 24)
    chosen = smaller.draft_token_ids.tolist()
    assert len(chosen) == 24 and chosen != list(range(24))
    again = further(folders, responses, tmp_path / "two", "--drafter", tmp_path / "one", "--held_out", 0.6)
    assert again.draft_token_ids.tolist() == chosen


def test_repeating_a_finished_run_leaves_the_same_drafter(folders, responses, tmp_path):
    """Also where the run kept its last checkpoint, not its best."""
    output, found = tmp_path / "run", []
    for _ in range(2):
        result = train(
            folders, responses, output, "--max_steps", 4, "--save_steps", 1, "--eval_strategy", "steps", "--eval_steps", 1,
            "--greater_is_better", "false", "--learning_rate", 0.01, "--save_total_limit", 4,
        )  # fmt: skip
        assert result.exit_code == 0, repr(result.exception)
        found.append((output / "model.safetensors").read_bytes())
    state = json.loads((output / "trainer_state.json").read_text())
    assert not str(state["best_model_checkpoint"]).endswith("checkpoint-4")  # Or nothing could go wrong.
    assert found[0] == found[1]


def test_a_checkpoint_that_was_being_written_is_passed_over(folders, responses, tmp_path):
    output, options = tmp_path / "run", ("--save_steps", 1)
    assert train(folders, responses, output, *options, "--max_steps", 2).exit_code == 0
    torn = output / "checkpoint-3"
    torn.mkdir()
    (torn / "config.json").write_text("{")
    assert train(folders, responses, output, *options, "--max_steps", 4).exit_code == 0
    assert [row["step"] for row in log(output) if row["loss"]] == ["1", "2", "3", "4"]


def test_a_run_is_not_continued_with_another_drafter(folders, responses, tmp_path):
    options = ("--save_steps", 1, "--max_steps", 1)
    assert train(folders, responses, tmp_path / "run", *options).exit_code == 0
    result = train(folders, responses, tmp_path / "run", *options, "--markov_rank", 4)
    assert "of another drafter: markov_rank (8 there, 4 here)" in str(result.exception)
    assert train(folders, responses, tmp_path / "run", *options, "--markov_rank", 4, "--resume", "false").exit_code == 0


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
    result = train(folders, tmp_path / "cache", tmp_path / "run", "--max_steps", 1)
    assert "is damaged: shard-00000.safetensors" in str(result.exception)


def test_holding_nothing_out_is_reported(folders, responses, tmp_path, caplog):
    options = ("--max_steps", 1, "--held_out", 1e-9, "--save_strategy", "no")
    with caplog.at_level("WARNING", logger="dspark_hf"):
        assert train(folders, responses, tmp_path / "run", *options).exit_code == 0
    assert "None of 12 conversations is held out" in caplog.text


# peft asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora_leaves_an_adapter(folders, responses, tmp_path):
    pytest.importorskip("peft")
    result = invoke(
        "train", "--target", folders.target, "--data", responses, "--output_dir", tmp_path / "run", "--drafter", folders.random,
        "--max_steps", 2, "--save_steps", 1, "--lora_rank", 4, *RUN,
    )  # fmt: skip
    assert result.exit_code == 0, repr(result.exception)
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert "The adapter is in" in result.output
    card = (tmp_path / "run" / "README.md").read_text()
    assert f"A PEFT adapter for the drafter {folders.random}" in card and "lora_rank | 4" in card
    with pytest.raises(OSError, match=r"is an adapter of a drafter: .*PeftModel"):
        DSparkDrafter.from_pretrained(tmp_path / "run")


def test_tensorboard_gets_what_is_logged(folders, responses, tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(tmp_path / "board")
    try:
        more = ("--report_to", "tensorboard", "--max_steps", 2, "--save_strategy", "no", "--held_out", 0)
        assert train(folders, responses, tmp_path / "run", *more).exit_code == 0
    finally:
        del os.environ["TENSORBOARD_LOGGING_DIR"]
    found = events.EventAccumulator(str(next((tmp_path / "board").rglob("events*")).parent)).Reload()
    assert "train/acceptance_length" in found.Tags()["scalars"]
    assert [event.step for event in found.Scalars("train/loss")] == [1, 2]


# ---------------------------------------------------------------------- options


def test_help_names_every_option_with_a_text():
    text = " ".join(invoke("train", "--help").output.split())
    for action in train_parser()._actions:
        assert action.option_strings[0] in text
        assert action.help, action.dest
    for name in ("--markov_head_type", "--position_decay", "--lora_rank", "--lr_scheduler_type", "--target_layer_ids"):
        assert name in text


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
def test_a_file_sets_options_and_the_command_line_overrides_them(suffix, tmp_path):
    file = tmp_path / f"run{suffix}"
    values = {"target": "T", "data": ["a", "b"], "output_dir": str(tmp_path), "learning_rate": "2e-3", "markov_rank": 64,
              "use_cpu": True, "report_to": "none", "target_layer_ids": [1, 3], "qk_norm": False}  # fmt: skip
    file.write_text(
        json.dumps(values) if suffix == ".json" else "".join(f"{k}: {json.dumps(v)}\n" for k, v in values.items())
    )
    command = parse_train_options(["--config", str(file), "--markov-rank", "32"])
    assert command.options.target == "T" and command.options.data == ["a", "b"]
    assert command.arguments.learning_rate == 2e-3
    assert command.drafter == {"markov_rank": 32, "target_layer_ids": [1, 3], "qk_norm": False}


def test_values_of_a_file_are_checked_as_those_of_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    options = f"target: T\noutput_dir: {tmp_path}\nuse_cpu: true\n"
    file.write_text(f"{options}data: rows.jsonl\ntarget_layer_ids: [1, '3']\n")
    command = parse_train_options(["--config", str(file)])
    assert command.options.data == ["rows.jsonl"] and command.drafter == {"target_layer_ids": [1, 3]}
    file.write_text(f"{options}data: rows.jsonl\nkind: Eagle3\n")
    with pytest.raises(ValueError, match="sets kind to 'Eagle3', but it is one of dspark, dflash, eagle3"):
        parse_train_options(["--config", str(file)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "run.yaml' cannot be read"),
        ("- a", "holds a list"),
        ("max_steps: many", "sets max_steps to 'many'"),
        ("save_dtype: bogus", "save_dtype is 'bogus'"),
    ],
)
def test_files_that_are_not_option_files_are_refused(text, message, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    options = ["--target", "T", "--data", "a", "--output_dir", str(tmp_path), "--use_cpu"]
    with pytest.raises(ValueError, match=message):
        parse_train_options([*options, "--config", str(tmp_path / "run.yaml")])


def test_held_out_rows_are_looked_at_unless_told_otherwise(tmp_path):
    options = ["--target", "T", "--data", "a", "--output_dir", str(tmp_path), "--use_cpu", "--save_steps", "7"]
    arguments = parse_train_options(options).arguments
    assert (arguments.eval_strategy, arguments.eval_steps, arguments.load_best_model_at_end) == ("steps", 7, True)
    assert parse_train_options([*options, "--eval_strategy", "no"]).arguments.eval_strategy == "no"
    assert parse_train_options([*options, "--held_out", "0"]).arguments.eval_strategy == "no"


def test_options_of_another_kind_of_drafter_are_refused(folders, responses, tmp_path):
    result = train(folders, responses, tmp_path / "run", "--max_steps", 1, "--norm_before_residual", "true")
    assert "norm_before_residual: only drafters of --kind eagle3" in str(result.exception)
    options = (
        "--target",
        folders.target,
        "--data",
        responses,
        "--output_dir",
        tmp_path / "run",
        *RUN,
        "--max_steps",
        1,
    )
    result = invoke("train", *options, "--kind", "eagle3", "--norm_before_residual", "true", "--save_strategy", "no")
    assert result.exit_code == 0, repr(result.exception)
    assert Drafter.from_pretrained(tmp_path / "run").config.norm_before_residual


def test_a_file_with_an_unknown_option_is_refused(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("target: T\nlerning_rate: 1\n")
    with pytest.raises(ValueError, match="sets lerning_rate, which are no options"):
        parse_train_options(["--config", str(file)])


@pytest.mark.slow
def test_two_processes_train_as_one(folders, responses, tmp_path):
    found = []
    for processes, batch in ((1, 4), (2, 2)):
        output = tmp_path / f"run{processes}"
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        arguments = ["--target", folders.target, "--data", responses, "--output_dir", output, *NEW, *RUN, "--max_steps", 3,
                     "--per_device_train_batch_size", batch, "--save_strategy", "no", "--ddp_backend", "gloo"]  # fmt: skip
        command = [sys.executable, *launcher, "-m", "dspark_hf_cli", "train", *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        found.append([float(row["loss"]) for row in log(output) if row["loss"]])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
