"""Rules that hold for the whole package: what may import what, whose private names are used where, what an import costs."""

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from source_tree import SourceTree
from transformers import GenerationMixin, PreTrainedModel

import dspark_hf
import dspark_hf_cli

SRC = Path(dspark_hf.__file__).parents[1]
STRUCTURE = Path(__file__).parents[1] / "docs" / "structure.md"
COMMAND_LINE = dspark_hf_cli.__name__

# What is copied into repositories is imported by no file here.
SOURCE = SourceTree(SRC, leave_out=("templates",))
MODULES = sorted(SOURCE.files)


# ---------------------------------------------------------------------- what may import what


def arrows_of(page: str) -> dict[str, set[str]]:
    """What each part of the package may import of the others, from the table of a page: `| part | may import |`."""
    rows = re.findall(r"^\| `(\w+)` +\|([^|]*)\|$", page, re.MULTILINE)
    return {part: set(re.findall(r"`(\w+)`", imported)) for part, imported in rows}


ARROWS = arrows_of(STRUCTURE.read_text(encoding="utf-8"))


def part_of(module: str) -> str:
    """`"dspark_hf.generation.loop"` -> `"generation"`; whatever is no part of its own belongs to the models."""
    top, _, rest = module.partition(".")
    name = rest.partition(".")[0] or top
    if top == COMMAND_LINE:
        return top
    return name if name in ARROWS or name == top else "models"


def wrong_imports(source: SourceTree, module: str) -> list[str]:
    part = part_of(module)
    if part == "dspark_hf":  # The package itself gathers everything.
        return []
    return [
        f"{source.files[module]}:{line} imports {name}"
        for name, line in source.imports(module)
        if part_of(name) not in (part, *ARROWS[part])
    ]


def test_the_page_names_every_part():
    assert ARROWS
    assert set().union(*ARROWS.values()) <= {*ARROWS, "dspark_hf"}
    folders = {module.split(".")[1] for module in MODULES if module.startswith("dspark_hf.") and module.count(".") > 1}
    assert folders - {"checkpoints", "hub", "kinds"} <= set(ARROWS), "a new folder needs a row in docs/structure.md"


@pytest.mark.parametrize("module", MODULES)
def test_imports_follow_the_arrows(module: str):
    wrong = wrong_imports(SOURCE, module)
    part = part_of(module)
    assert not wrong, f"docs/structure.md lets {part} import {ARROWS[part] or 'nothing'}:\n" + "\n".join(wrong)


def test_no_circle_of_files():
    """Imports inside functions count."""
    circle = SOURCE.circle()
    assert circle is None, "these files import each other in a circle: " + " -> ".join(circle or [])


def planted(folder: Path, **files: str) -> SourceTree:
    """A tree with the given modules, `generation__loop="..."`; folders get an `__init__.py`."""
    for name, text in files.items():
        file = folder / "dspark_hf" / (name.replace("__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for parent in (folder / "dspark_hf", file.parent):
            (parent / "__init__.py").touch()
        file.write_text(text, encoding="utf-8")
    return SourceTree(folder)


@pytest.mark.parametrize(
    "text",
    [
        "from ..training import losses",
        "def f():\n    from ..training.losses import LossWeights",
        "import dspark_hf.training",
        "if TYPE_CHECKING:\n    from .. import training",
    ],
)
def test_a_planted_wrong_import_is_found(tmp_path: Path, text: str):
    source = planted(tmp_path, generation__loop=text, training__losses="")
    assert len(wrong_imports(source, "dspark_hf.generation.loop")) == 1
    assert wrong_imports(source, "dspark_hf.training.losses") == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("from . import second", "from .first import x"),
        ("from .second import x", "def f():\n    from .first import x"),
        ("import dspark_hf.generation.second", "from dspark_hf.generation import first"),
    ],
)
def test_a_planted_circle_is_found(tmp_path: Path, first: str, second: str):
    circle = planted(tmp_path, generation__first=first, generation__second=second).circle()
    assert circle is not None
    assert set(circle) == {"dspark_hf.generation.first", "dspark_hf.generation.second"}
    assert planted(tmp_path, generation__first="", generation__second=second).circle() is None


def test_a_planted_circle_through_a_package_is_found(tmp_path: Path):
    source = planted(tmp_path, drafter="from .hub.card import x", hub__card="", hub__pushing="from ..drafter import x")
    assert source.circle() is None
    (tmp_path / "dspark_hf" / "hub" / "__init__.py").write_text("from .pushing import push")
    assert set(SourceTree(tmp_path).circle()) == {"dspark_hf.drafter", "dspark_hf.hub", "dspark_hf.hub.pushing"}


# ---------------------------------------------------------------------- private names

# The rule: a private name of transformers is in `transformers_names` alone; a private name of ours is used only in the file
# that defines it (or, on `self`, in a subclass). Exceptions, by file and name, each with its reason:
ALLOWED_PRIVATE_NAMES = {
    ("dspark_hf.evaluation.operation_counts", "_python_dispatch"),  # torch's dispatch modes have no other name.
    ("dspark_hf.modeling_drafter", "_modules"),  # torch's: a shallow copy of a module needs a dictionary of its own.
}
# The attributes by which transformers asks a model to describe itself, and the method that a model defines for its weights.
ASKED_OF_MODELS = {
    "_init_weights",
    "_keep_in_fp32_modules_strict",
    "_keys_to_ignore_on_load_unexpected",
    "_no_split_modules",
    "_supports_attention_backend",
    "_supports_flash_attn",
    "_supports_flex_attn",
    "_supports_sdpa",
}
GROUND_FLOOR = "dspark_hf.transformers_names"


def foreign_private_names(source: SourceTree, module: str) -> list[str]:
    return [
        f"{source.files[module]}:{line}: {name}"
        for name, line in source.private_names_of_others(module)
        if (module, name) not in ALLOWED_PRIVATE_NAMES
    ]


@pytest.mark.parametrize("module", [module for module in MODULES if module != GROUND_FLOOR])
def test_private_names_stay_in_their_file(module: str):
    found = foreign_private_names(SOURCE, module)
    assert not found, f"put what needs these names into {GROUND_FLOOR}, or make them public:\n" + "\n".join(found)


def test_every_exception_is_needed():
    used = {(module, name) for module in MODULES for name, _ in SOURCE.private_names_of_others(module)}
    assert used >= ALLOWED_PRIVATE_NAMES


def overridden_private_names(kind: type) -> set[str]:
    """Private names of transformers' classes that a class derived from them defines again."""
    bases = [base for base in kind.__mro__ if base.__module__.split(".")[0] == "transformers"]
    return {name for name in vars(kind) if re.match(r"_(?!_|abc_)", name) and any(name in vars(base) for base in bases)}


DERIVED = [
    module
    for module in MODULES
    if module != GROUND_FLOOR and any(isinstance(n, ast.ClassDef) and n.bases for n in ast.walk(SOURCE.trees[module]))
]


@pytest.mark.parametrize("module", DERIVED)
def test_private_methods_of_transformers_are_not_overridden(module: str):
    values = vars(importlib.import_module(module)).values()
    for kind in (value for value in values if inspect.isclass(value) and value.__module__ == module):
        assert overridden_private_names(kind) <= ASKED_OF_MODELS, kind


def test_an_overridden_private_name_is_found():
    class Planted(PreTrainedModel, GenerationMixin):
        _supports_sdpa = True

        def _reorder(self):
            """Not a name of transformers."""

        def _update_model_kwargs_for_generation(self, *args, **kwargs):
            """The seam itself."""

    assert overridden_private_names(Planted) == {"_supports_sdpa", "_update_model_kwargs_for_generation"}


@pytest.mark.parametrize(
    "text",
    [
        "def f(config):\n    return config._attn_implementation",
        "def f(model):\n    return getattr(model, '_is_stateful', False)",
        "class T(Trainer):\n    def f(self):\n        self._prepare_inputs(1)",
        "class T(Trainer):\n    def f(self):\n        super()._load_best_model()",
        "from transformers.utils import _flags",
        "from transformers._private import flags",
        "import transformers._private",
    ],
)
def test_a_planted_private_name_is_found(tmp_path: Path, text: str):
    source = planted(tmp_path, loop=text)
    assert len(foreign_private_names(source, "dspark_hf.loop")) == 1


def test_private_names_of_our_own_stay_with_their_class(tmp_path: Path):
    source = planted(
        tmp_path,
        base="class A:\n    def __init__(self):\n        self._x = 1\n\n    def same(self, other):\n        return other._x == 1",
        derived="class B(A):\n    def f(self):\n        return self._x",
        stranger="def f(a):\n    return a._x",
    )
    found = {name: foreign_private_names(source, f"dspark_hf.{name}") for name in ("base", "derived", "stranger")}
    assert not found["base"]
    assert not found["derived"]
    assert len(found["stranger"]) == 1


# ---------------------------------------------------------------------- what an import costs

# Packages and parts of packages that take long to import, or that are optional.
HEAVY = {
    "accelerate", "datasets", "gguf", "jinja2", "matplotlib", "pandas", "peft", "rich", "scipy", "sklearn", "tensorboard",
    "tokenizers.tools", "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torchvision", "transformers.pipelines",
    "transformers.trainer", "typer", "yaml",
}  # fmt: skip


def test_the_package_imports_little_besides_transformers():
    # What the modules of transformers that every user of `generate` imports bring along is not ours to avoid.
    code = """if True:
        import json, sys
        from transformers import AutoModel, GenerationConfig, GenerationMixin, PreTrainedModel
        before = set(sys.modules)
        import dspark_hf
        print(json.dumps(sorted(set(sys.modules) - before)))
    """
    environment = os.environ | {"PYTHONPATH": str(SRC)}
    output = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    imported = set(json.loads(output.splitlines()[-1]))
    assert not imported & HEAVY
    foreign = {name for name in imported if name.split(".")[0] != "dspark_hf"}
    assert len(foreign) <= 20, f"importing dspark_hf imports {len(foreign)} modules of others: {sorted(foreign)}"
    assert not {name for name in imported if name.split(".")[1:2] in (["training"], ["evaluation"], ["responses"])}


# ---------------------------------------------------------------------- attributes by name


def test_attributes_are_seldom_looked_up_by_name():
    """An attribute that may be missing is asked for in one function, such as `optional_field`, and not at each use."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCE.files.values()}
    found = {path: len(re.findall(r"\b(?:hasattr|getattr)\(", text)) for path, text in texts.items()}
    assert 0 < sum(found.values()) <= 50, {str(path): number for path, number in found.items() if number}


# ---------------------------------------------------------------------- warnings


@pytest.mark.parametrize("category", [FutureWarning, DeprecationWarning], ids=lambda c: c.__name__)
@pytest.mark.parametrize("module", ["transformers.models.qwen3.modeling_qwen3", "dspark_hf.layers", __name__])
def test_deprecations_of_transformers_are_errors(module: str, category: type[Warning]):
    with pytest.raises(category):
        warnings.warn_explicit("this goes away", category, "some_file.py", 1, module=module)


def test_deprecations_elsewhere_are_not_errors():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit("not ours", DeprecationWarning, "some_file.py", 1, module="third_party.module")
    assert len(caught) == 1


# ---------------------------------------------------------------------- the map of the code


def files_of_the_map(page: str) -> list[str]:
    """The files that docs/structure.md has a sentence for, each under the heading of its folder."""
    sections = re.split(r"^### `([\w/]+)/`$", page, flags=re.MULTILINE)
    return [
        f"{folder}/{file}"
        for folder, section in zip(sections[1::2], sections[2::2], strict=True)
        for file in re.findall(r"^\| `([\w/]+\.py)` \| \S.*\.? \|$", section, re.MULTILINE)
    ]


def test_the_map_has_one_sentence_for_every_file():
    files = {str(path.relative_to(SRC)) for path in SRC.rglob("*.py") if path.name != "__init__.py"}
    listed = files_of_the_map(STRUCTURE.read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(set(listed)), "a file is listed twice"
    assert files - set(listed) == set(), "docs/structure.md has no sentence for these files"
    assert set(listed) - files == set(), "docs/structure.md lists files that do not exist"


def test_a_missing_file_is_noticed():
    page = "### `a/b/`\n\n| File | What it holds |\n| --- | --- |\n| `c.py` | A sentence. |\n| `d.py` |  |\n"
    assert files_of_the_map(page) == ["a/b/c.py"]


# ---------------------------------------------------------------------- the reading list

READING_LIST = Path(__file__).parents[1] / "docs" / "one_round.md"
MOST_LINES = 900


def files_to_read(page: str) -> list[str]:
    """The files of the reading list: `1. `generation/loop.py`: ...`."""
    return re.findall(r"^\d+\. `([\w/]+\.py)`:", page, re.MULTILINE)


def test_one_round_can_be_read():
    page = READING_LIST.read_text(encoding="utf-8")
    files = files_to_read(page)
    assert {"generation/loop.py", "sampling.py", "generation/token_choice.py", "generation/target_pass.py"} <= set(
        files
    )
    texts = [page, *((SRC / "dspark_hf" / file).read_text(encoding="utf-8") for file in files)]
    num_lines = sum(text.count("\n") for text in texts)
    assert num_lines <= MOST_LINES, f"the files that docs/one_round.md lists have grown to {num_lines} lines"
