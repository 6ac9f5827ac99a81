"""The commands do what their help says, tell programs apart from people, and end with the right code."""

import json

import pytest
import tiny_folders

pytest.importorskip("typer")
pytest.importorskip("rich")

from typer.testing import CliRunner

from dspark_hf.training.history import duration
from dspark_hf_cli import exit_codes
from dspark_hf_cli.app import app
from dspark_hf_cli.bench import wrong_answers
from dspark_hf_cli.loading import labels_of

WIDE = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    path.write_text("".join(json.dumps({"turns": [f"{i} + {i}?"]}) + "\n" for i in range(3)))
    return path


def invoke(*arguments, **kwargs):
    return CliRunner().invoke(app, [str(a) for a in arguments], env=WIDE, **kwargs)


def bench(folders, prompts, output, *more, drafters=("perfect",)):
    named = [part for name in drafters for part in ("--drafter", getattr(folders, name))]
    limits = ("--max-prompts", 2, "--max-new-tokens", 8, "--temperature", 0, "--device", "cpu")
    return invoke("bench", "--target", folders.target, *named, "--tasks", prompts, "--output", output, *limits, *more)


def chat(folders, lines):
    models = ("--target", folders.target, "--drafter", folders.perfect)
    return invoke("chat", *models, "--max-new-tokens", 12, "--device", "cpu", input=lines)


# ---------------------------------------------------------------------- bench and sweep


def test_bench_measures_and_reports(folders, prompts, tmp_path):
    output = tmp_path / "out"
    result = bench(folders, prompts, output, "--schedule", "fixed", "--schedule", "threshold:0.5", "--profile")
    assert result.exit_code == 0, result.output
    assert "dspark threshold:0.5" in result.stdout and "2 of 2 greedy answers" in result.stdout
    document = json.loads((output / "results.json").read_text())
    assert {r["method"] for r in document["results"]} == {
        "plain",
        "prompt-lookup",
        "dspark fixed",
        "dspark threshold:0.5",
    }
    assert document["settings"]["max_new_tokens"] == 8 and document["environment"]["packages"]["torch"]
    assert (output / "report.html").exists() and (output / "acceptance.png").exists()


def test_bench_continues_and_prints_json(folders, prompts, tmp_path):
    output = tmp_path / "out"
    bench(folders, prompts, output, "--no-prompt-lookup")
    records = output / "records.jsonl"
    lines = records.read_bytes().splitlines(keepends=True)
    records.write_bytes(b"".join(lines[:3]))
    result = bench(folders, prompts, output, "--no-prompt-lookup", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert [r["method"] for r in document["results"]] == ["plain", "dspark fixed"]
    assert len(records.read_bytes().splitlines()) == len(lines)
    assert records.read_bytes().startswith(b"".join(lines[:3]))


def test_bench_with_several_drafters_names_them(folders, prompts, tmp_path):
    result = bench(folders, prompts, tmp_path / "o", "--no-prompt-lookup", "--json", drafters=("random", "dflash"))
    assert result.exit_code == 0, result.output
    assert [r["method"] for r in json.loads(result.stdout)["results"]] == [
        "plain",
        "random fixed",
        "dflash dflash (transformers)",
        "dflash fixed",
    ]


def test_other_settings_are_an_error_that_names_them(folders, prompts, tmp_path):
    output = tmp_path / "out"
    bench(folders, prompts, output, "--no-prompt-lookup")
    result = bench(folders, prompts, output, "--no-prompt-lookup", "--seed", 1)
    assert isinstance(result.exception, ValueError) and "seed was 0, now 1" in str(result.exception)


def test_a_greedy_check_is_made_where_sampling_is_measured(folders, prompts, tmp_path):
    result = bench(folders, prompts, tmp_path / "out", "--no-prompt-lookup", "--temperature", 1, "--check", 1)
    assert result.exit_code == 0, result.output
    assert "1 prompts were also answered greedily" in result.stdout
    assert "dspark fixed: 1 of 1 greedy answers equal" in result.stdout
    identity = json.loads((tmp_path / "out" / "results.json").read_text())["identity"]
    assert identity["dspark fixed"] == {"checked": 1, "different": 0, "differences": []}


def test_without_a_check_the_report_says_so(folders, prompts, tmp_path):
    result = bench(folders, prompts, tmp_path / "out", "--no-prompt-lookup", "--temperature", 1, "--check", 0)
    assert result.exit_code == 0, result.output
    said = "Not checked: no greedy answers were compared with those of plain generate."
    assert said in result.stdout and said in (tmp_path / "out" / "report.html").read_text()
    assert json.loads((tmp_path / "out" / "results.json").read_text())["identity_note"] == said


@pytest.mark.parametrize(
    ("command", "changed"),
    [("bench", ("--seed", 1)), ("bench", ("--schedule", "threshold:0.5")), ("bench", ("--no-dflash",)),
     ("bench", ("--dtype", "bfloat16"))],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)  # fmt: skip
def test_other_settings_are_found_before_a_model_is_loaded(command, changed, folders, prompts, tmp_path, monkeypatch):
    bench(folders, prompts, tmp_path / "out", "--no-prompt-lookup")
    monkeypatch.setattr("dspark_hf_cli.loading.load_drafter", lambda name: pytest.fail("a model was loaded"))
    result = bench(folders, prompts, tmp_path / "out", "--no-prompt-lookup", *changed)
    assert isinstance(result.exception, ValueError) and "was written with other settings" in str(result.exception)


@pytest.mark.parametrize(
    ("gap", "wrong"), [(None, 1), (0.1, 1), (-0.1, 1), (1e-5, 0)], ids=["ends early", "large", "negative", "tie"]
)
def test_a_tie_is_not_a_wrong_answer(gap, wrong):
    assert wrong_answers({"dspark": {"differences": [{"gap": gap}]}}, 1e-3) == wrong


def test_a_wrong_greedy_answer_is_exit_code_3(folders, prompts, tmp_path, monkeypatch):
    import dspark_hf.evaluation.runner as runner

    genuine = runner.answer

    def sabotaged(target, tokenizer, method, *args):
        turns = genuine(target, tokenizer, method, *args)
        if method.name.startswith("dspark"):
            turns[0].output_ids[2] ^= 1
        return turns

    monkeypatch.setattr(runner, "answer", sabotaged)
    result = bench(folders, prompts, tmp_path / "out", "--no-prompt-lookup")
    assert result.exit_code == exit_codes.DIFFERENT_ANSWERS
    assert "0 of 2 greedy answers" in result.stdout and "logit gap" in result.stdout


@pytest.mark.parametrize(
    ("over", "values", "xs"),
    [("tokens", None, [1, 2, 3, 4]), ("threshold", "0,0.9", [0, 0.9]), ("rank", None, [32, 0])],
)
def test_sweep(folders, prompts, tmp_path, over, values, xs):
    drafters = ("perfect", "dflash") if over == "rank" else ("perfect",)
    arguments = [part for name in drafters for part in ("--drafter", getattr(folders, name))]
    if values:
        arguments += ["--values", values]
    limits = ("--max-prompts", 2, "--max-new-tokens", 6, "--temperature", 0, "--device", "cpu", "--json")
    output = tmp_path / "out"
    result = invoke(
        "sweep", "--target", folders.target, "--over", over, "--tasks", prompts, "--output", output, *arguments, *limits
    )
    assert result.exit_code == 0, result.output
    points = json.loads(result.stdout)["sweep"]["points"]
    assert [p["x"] for p in points] == xs
    assert (output / "sweep.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "often"], "fixed"),
        (["--tasks", "gsm9k"], "gsm9k"),
        (["--dtype", "int8"], "int8"),
        (["--max-prompts", "0"], "max-prompts"),
    ],
)
def test_wrong_usage_is_exit_code_2(folders, prompts, tmp_path, arguments, message):
    result = bench(folders, prompts, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.output


# ---------------------------------------------------------------------- chat


def test_chat_answers_turn_by_turn_in_plain_text(folders):
    lines = "Hi\nWhy?\n/plain\nMore\n/help\n/clear\nHi\n/quit\nnever read\n"
    result = chat(folders, lines)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert result.stderr.count("tokens/s") == 4
    assert result.stderr.count("% of drafts accepted") == 2  # The drafter stays off after /plain.
    assert "drafter off" in result.stderr and "/quit or Ctrl-D ends the program" in result.stderr
    # The same question after /clear: greedy, so the same answer.
    alone = chat(folders, "Hi\n").stdout
    assert alone and result.stdout.startswith(alone) and result.stdout.endswith(alone)


def test_an_unknown_command_of_the_chat_is_said(folders):
    result = chat(folders, "/plian\n/what is this\n")
    assert result.exit_code == 0, result.output
    assert "Unknown command /plian. Did you mean /plain?" in result.stderr
    assert "Unknown command /what. Commands are /plain, /clear, /help, /quit." in result.stderr
    assert "tokens/s" not in result.stderr  # Neither was a turn of the conversation.


def test_chat_ends_with_its_input(folders):
    result = chat(folders, "")
    assert result.exit_code == 0


# ---------------------------------------------------------------------- env, names, durations


def test_env_for_people_and_programs():
    assert "- torch: " in invoke("env").stdout
    found = json.loads(invoke("env", "--json").stdout)
    assert found["packages"]["transformers"] and found["python"]


def test_labels():
    assert labels_of(["a/b"]) == ["dspark"]
    assert labels_of(["a/b", "a/c"]) == ["b", "c"]
    assert labels_of(["a/b", "c/b"]) == ["a/b", "c/b"]


def test_durations():
    assert duration(61) == "0:01:01" and duration(3723) == "1:02:03"
