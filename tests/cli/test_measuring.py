"""`profile` measures what passes cost, `calibrate` fits temperatures; both write what `from_pretrained` reads."""

import json
import shutil

import pytest
import tiny_folders

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.evaluation.records import unpack_rounds
from dspark_hf.scheduling import ThroughputCurve
from dspark_hf_cli.app import app

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


@pytest.fixture
def drafter(folders, tmp_path):
    """A copy of the random drafter, to be written to."""
    return shutil.copytree(folders.random, tmp_path / "drafter")


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"{i} + {i}?"]}) + "\n" for i in range(3)))
    return path


def invoke(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], env=WIDE)


def profile(folders, output, *more):
    quick = ("--tokens", "1,2,8", "--rows", "1,2", "--repeats", 2, "--context-length", 8, "--device", "cpu")
    return invoke("profile", "--target", folders.target, "--output", output, *quick, *more)


def calibrate(folders, drafter, prompts, output, *more):
    models = ("--target", folders.target, "--drafter", drafter, "--tasks", prompts, "--output", output)
    return invoke("calibrate", *models, "--max-new-tokens", 24, "--min-rounds", 10, "--device", "cpu", *more)


# ---------------------------------------------------------------------- profile


def test_profile_measures_the_target_and_shows_it(folders, tmp_path):
    result = profile(folders, tmp_path / "out")
    assert result.exit_code == 0, result.output
    curve = ThroughputCurve.load(tmp_path / "out" / "throughput_curve.json")
    assert curve.token_counts.tolist() == [1, 2, 8] and curve.drafting == {} and set(curve.rows) == {1, 2}
    assert curve.measured_on["context_length"] == 8
    assert (tmp_path / "out" / "throughput_curve.png").read_bytes().startswith(b"\x89PNG")
    assert "passes/s" in result.stdout and "ms drafting" in result.stdout


def test_profile_saves_the_curve_with_the_drafter(folders, drafter, tmp_path):
    result = profile(folders, tmp_path / "out", "--drafter", drafter, "--save", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert list(printed["drafting"]) == ["1", "2"] and all(s > 0 for s in printed["drafting"].values())
    assert DSparkDrafter.from_pretrained(drafter).throughput_curve.to_dict() == printed


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--save",), "writes into the folder of a drafter"),
        (("--tokens", "1,x"), "--tokens must be whole numbers"),
        (("--rows", "0"), "must be 1 or more"),
    ],
    ids=["save without a drafter", "tokens that are no numbers", "no rows"],
)
def test_profile_refuses(folders, tmp_path, more, message):
    result = profile(folders, tmp_path / "out", *more)
    assert result.exit_code == 2 and message in " ".join(result.output.split())


# ---------------------------------------------------------------------- calibrate


@pytest.fixture(scope="module")
def calibrated(folders, tmp_path_factory):
    """What one run printed, and its folder."""
    folder = tmp_path_factory.mktemp("calibrated")
    (folder / "questions.jsonl").write_text("".join(json.dumps({"turns": [f"{i} + {i}?"]}) + "\n" for i in range(3)))
    result = calibrate(folders, folders.random, folder / "questions.jsonl", folder / "out")
    assert result.exit_code == 0, result.output
    return result.stdout, folder / "out"


def test_calibrate_writes_a_drafter_with_temperatures(folders, calibrated):
    printed, output = calibrated
    document = json.loads((output / "calibration.json").read_text())
    written = DSparkDrafter.from_pretrained(output / "drafter")
    assert written.config.confidence_temperatures == document["temperatures"]
    assert DSparkConfig.from_pretrained(folders.random).confidence_temperatures is None
    first, then = document["before"][0], document["after"][0]
    assert 10 < first["weight"] <= document["num_rounds"] and then["ece"] <= first["ece"]
    assert (output / "reliability.png").read_bytes().startswith(b"\x89PNG")
    assert "observed" in printed


def test_every_draft_is_verified_while_collecting(folders, calibrated):
    lines = [json.loads(line) for line in (calibrated[1] / "records.jsonl").read_text().splitlines()]
    rounds = [unpack_rounds(turn["rounds"]) for line in lines for turn in line["record"]["turns"]]
    num_drafts = DSparkConfig.from_pretrained(folders.random).num_draft_tokens
    assert len(rounds) == 3 and not any(r.skipped for own in rounds for r in own)
    for own in rounds:  # The last ones of an answer have no room for a whole block.
        assert len(own) > 4 and all(r.verified == num_drafts for r in own[:-4])


def test_slots_seen_too_rarely_keep_their_temperature_and_say_so(folders, drafter, prompts, tmp_path):
    result = calibrate(folders, drafter, prompts, tmp_path / "out", "--min-rounds", 100_000)
    document = json.loads((tmp_path / "out" / "calibration.json").read_text())
    assert set(document["temperatures"]) == {1.0}
    assert "slot 1: T = 1: seen in" in result.stdout


def test_in_place_changes_the_configuration_alone(folders, drafter, prompts, tmp_path):
    weights = (drafter / "model.safetensors").read_bytes()
    before = json.loads((drafter / "config.json").read_text())
    result = calibrate(folders, drafter, prompts, tmp_path / "out", "--in-place", "--json")
    assert result.exit_code == 0, result.output
    after = json.loads((drafter / "config.json").read_text())
    assert after.pop("confidence_temperatures") == json.loads(result.stdout)["temperatures"]
    before.pop("confidence_temperatures", None)
    assert after == before and (drafter / "model.safetensors").read_bytes() == weights
    assert not (tmp_path / "out" / "drafter").exists()


def test_a_stopped_run_continues(folders, calibrated, tmp_path):
    output = shutil.copytree(calibrated[1], tmp_path / "out")
    lines = (output / "records.jsonl").read_text().splitlines(keepends=True)
    (output / "records.jsonl").write_text(lines[0])
    questions = calibrated[1].parent / "questions.jsonl"
    result = calibrate(folders, folders.random, questions, output, "--json")
    assert result.exit_code == 0, result.output
    assert "3/3" in result.stderr and "1/3" not in result.stderr
    expected = json.loads((calibrated[1] / "calibration.json").read_text())
    assert json.loads(result.stdout)["temperatures"] == pytest.approx(expected["temperatures"], rel=1e-4)


def test_calibrate_refuses_a_drafter_without_a_confidence_head(folders, prompts, tmp_path):
    folder = tmp_path / "headless"
    drafter = DSparkDrafter.from_pretrained(folders.random)
    config = drafter.config.to_dict() | {"enable_confidence_head": False, "confidence_head_with_markov": False}
    DSparkDrafter(DSparkConfig.from_dict(config)).save_pretrained(folder)
    result = calibrate(folders, folder, prompts, tmp_path / "out")
    assert result.exit_code == 2 and "nothing to calibrate" in " ".join(result.output.split())


def test_in_place_needs_a_folder_of_ours(folders, prompts, tmp_path):
    result = calibrate(folders, "someone/drafter", prompts, tmp_path / "out", "--in-place")
    assert result.exit_code == 2 and "Leave it out" in " ".join(result.output.split())


# ---------------------------------------------------------------------- bench, by cost


def test_bench_measures_a_curve_where_the_drafter_brings_none(folders, prompts, tmp_path):
    models = (
        "--target",
        folders.target,
        "--drafter",
        folders.perfect,
        "--tasks",
        prompts,
        "--output",
        tmp_path / "out",
    )
    limits = ("--max-prompts", 1, "--max-new-tokens", 6, "--temperature", 0, "--device", "cpu", "--no-prompt-lookup")
    result = invoke("bench", *models, *limits, "--schedule", "throughput", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["identity"]["dspark throughput"] | {"differences": []} == {
        "checked": 1,
        "different": 0,
        "differences": [],
    }
