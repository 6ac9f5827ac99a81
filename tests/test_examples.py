"""Every example runs, on tiny models, is short, and stands in the list of examples."""

import importlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import tiny_folders

EXAMPLES = Path(__file__).parents[1] / "examples"
# Programs of their own rather than examples of a few lines.
PROGRAMS = {"quickstart.py", "smollm2.py", "train_quickstart.py"}
SHORT = sorted(path.name for path in EXAMPLES.glob("*.py") if path.name not in PROGRAMS)

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs an example as `python examples/NAME.py ARGUMENTS` does, in an empty folder. Returns what it prints."""

    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(EXAMPLES))
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def pair(folders, drafter="perfect"):
    return "--target", folders.target, "--drafter", getattr(folders, drafter), "--max-new-tokens", 12


def test_generate(run, folders):
    assert re.search(
        r"\d\.\d\d tokens a target pass, 100% of drafts accepted", run("generate.py", "Hi", *pair(folders))
    )


def test_generate_sampling(run, folders):
    printed = run("generate.py", "Hi", *pair(folders, "random"), "--temperature", 0.8)
    assert "tokens a target pass" in printed


@pytest.mark.parametrize("threshold", [(), ("--threshold", "0.5")], ids=["whole blocks", "threshold"])
def test_batch(run, folders, threshold):
    printed = run("batch.py", "Hi", "A longer question", *pair(folders), *threshold)
    assert printed.count("rounds of") == 2


def test_stream_gives_what_plain_generate_gives(run, folders):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    printed = run("stream.py", "Hi", "And?", *pair(folders, "random"))
    tokenizer = AutoTokenizer.from_pretrained(folders.target)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    target = AutoModelForCausalLM.from_pretrained(folders.target)
    plain = target.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(plain[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert printed.startswith(f"> Hi\n{answer}\n> And?\n")


def test_train(run, folders, tmp_path):
    from dspark_hf import DSparkDrafter

    rows = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bcd" * 9}]}] * 4
    (tmp_path / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = ("--layers", 1, "--block-size", 3, "--rank", 8, "--mask-token", "~", "--max-steps", 2, "--batch-size", 2)
    run("train.py", "responses.jsonl", "--output", "out", "--target", folders.target, *sizes)
    assert DSparkDrafter.from_pretrained(tmp_path / "out").config.block_size == 3


def test_calibrate(run, folders, tmp_path):
    from dspark_hf import DSparkDrafter
    from dspark_hf.scheduling import ThroughputCurve

    printed = run("calibrate.py", "--output", "out", *pair(folders, "random"), "--max-prompts", 2)
    assert "With the scheduler" in printed
    drafter = DSparkDrafter.from_pretrained(tmp_path / "out" / "calibrated")
    assert len(drafter.config.confidence_temperatures) == drafter.config.num_draft_tokens
    assert ThroughputCurve.load(tmp_path / "out" / "curve.json").seconds(1) > 0


def test_convert(run, folders):
    formats = ("--format", "deepspec", "--format", "speculators")
    printed = run("convert.py", folders.random, "--target", str(folders.target), "--output", "out", *formats)
    assert printed.count("read back") == 2


def test_quickstart(run, folders, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(importlib.import_module("smollm2"), "ensure_target", lambda: folders.target)
    printed = run("quickstart.py", "Hi", "--drafter", folders.perfect, "--max-new-tokens", 12)
    assert "All 7 greedy answers are identical" in printed
    assert re.search(r"times the speed of plain generate \(95 % interval over these 7 prompts: \d", printed)


@pytest.mark.parametrize("name", SHORT)
def test_an_example_is_short_and_tested(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 80
    tests = Path(__file__).parent.rglob("test_*example*.py")
    assert any(f'"{name}"' in path.read_text() for path in tests)


def test_the_list_names_every_example():
    named = set(re.findall(r"^\| \[([\w.]+)\]\(\1\)", (EXAMPLES / "README.md").read_text(), re.MULTILINE))
    assert named == {path.name for pattern in ("*.py", "*.ipynb") for path in EXAMPLES.glob(pattern)}


@pytest.mark.parametrize("path", EXAMPLES.glob("*.ipynb"), ids=lambda path: path.name)
def test_a_notebook_was_run_and_is_small(path):
    """`make notebook` runs it."""
    text = path.read_text(encoding="utf-8")
    assert len(text) < 50_000
    assert str(Path.home()) not in text
    code = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "run it again from the top"
    for cell in code:
        compile("".join(cell["source"]), path.name, "exec")
        assert all(output["output_type"] in ("stream", "execute_result", "display_data") for output in cell["outputs"])
