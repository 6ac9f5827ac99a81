"""Every code block of README and docs works, as far as it can without the models it names."""

import importlib
import json
import re
from pathlib import Path

import pytest
import tiny_folders

import tiny

pytest.importorskip("typer")
pytest.importorskip("datasets")

import datasets
from documents import ROOT, blocks, documents, run_document
from transformers import AutoModelForCausalLM, AutoTokenizer

import dspark_hf
from dspark_hf import Drafter

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
        ("bash", "dspark-hf train --target t --data d --output_dir o --no_such_option 1", "wrong usage"),
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
