"""The direction of the imports between the parts of the package, and other rules that hold for the whole of it."""

import ast
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark_hf
import dspark_hf_cli

PACKAGE = Path(dspark_hf.__file__).parent
COMMAND_LINE = Path(dspark_hf_cli.__file__).parent

# What each part of the package may import of the others. Whatever is not named here makes up the drafter: the models.
# Every part may import the ground floor, where the private names of transformers are.
GROUND_FLOOR = "transformers_names"
ALLOWED = {
    GROUND_FLOOR: set(),
    "sampling": set(),
    "scheduling": {"storage"},
    "models": {"scheduling", "storage"},
    "generation": {"models", "sampling", "scheduling"},
    "storage": set(),
    "conversations": set(),
    "responses": {"models", "conversations", "storage"},
    "training": {"models", "sampling", "scheduling", "conversations", "storage"},
    "evaluation": {"models", "sampling", "scheduling", "generation", "training", "conversations", "storage"},
    "cli": {
        "models",
        "sampling",
        "scheduling",
        "generation",
        "training",
        "evaluation",
        "conversations",
        "responses",
        "storage",
        "",  # its version
    },
}


def part_of(module: str) -> str:
    """`"dspark_hf.generation.loop"` -> `"generation"`; `""` for the package itself; `"cli"` for the command line."""
    if module.split(".")[0] == COMMAND_LINE.name:
        return "cli"
    top = module.partition(".")[2].partition(".")[0]
    return top if top in ALLOWED or top == "" else "models"


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(file: Path) -> Iterator[tuple[str, int]]:
    """Every module of ours that a file imports, inside functions too, with the line."""
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join(base + (node.module.split(".") if node.module else []))
            # `from . import name`: the name itself is the module.
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "dspark_hf" else [base]
        else:
            continue
        ours = (PACKAGE.name, COMMAND_LINE.name)
        yield from ((name, node.lineno) for name in names if name.split(".")[0] in ours)


# What is copied into repositories is imported by nobody here.
FILES = sorted(
    file for folder in (PACKAGE, COMMAND_LINE) for file in folder.rglob("*.py") if file.parent.name != "templates"
)


@pytest.mark.parametrize("file", FILES, ids=module_name)
def test_imports_follow_the_arrows(file: Path):
    part = part_of(module_name(file))
    if part == "":
        pytest.skip("the package itself gathers everything")
    wrong = [
        f"{file.relative_to(PACKAGE.parent)}:{line} imports {name}"
        for name, line in imports_of(file)
        if (imported := part_of(name)) != part and imported not in ALLOWED[part] | {GROUND_FLOOR}
    ]
    assert not wrong, f"{part} may import of ours only {sorted(ALLOWED[part]) or 'nothing'}:\n" + "\n".join(wrong)


def test_the_check_sees_a_wrong_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path / "dspark_hf")
    file = tmp_path / "dspark_hf" / "generation" / "loop.py"
    file.parent.mkdir(parents=True)
    file.write_text(
        "def f():\n    from ..training import losses\n    import dspark_hf_cli.app\n    import dspark_hf.evaluation\n"
    )
    found = [part_of(name) for name, _ in imports_of(file)]
    assert found == ["training", "cli", "evaluation"]


def test_optional_packages_are_not_imported_with_the_package():
    # What transformers' own modules bring along is not ours to avoid.
    code = """if True:
        import sys
        from transformers import AutoModel, GenerationConfig, GenerationMixin, PreTrainedModel
        before = set(sys.modules)
        import dspark_hf
        optional = {"peft", "datasets", "typer", "rich", "matplotlib", "gguf", "scipy", "tensorboard"}
        print(sorted(optional & (set(sys.modules) - before)))
    """
    environment = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True).strip() == "[]"


@pytest.mark.parametrize("category", [FutureWarning, DeprecationWarning], ids=lambda c: c.__name__)
@pytest.mark.parametrize("module", ["transformers.models.qwen3.modeling_qwen3", "dspark_hf.layers", __name__])
def test_deprecations_of_transformers_are_errors(module: str, category: type[Warning]):
    with pytest.raises(category):
        warnings.warn_explicit("this goes away", category, "some_file.py", 1, module=module)


def test_deprecations_elsewhere_are_not_errors():
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn_explicit("not ours", DeprecationWarning, "some_file.py", 1, module="third_party.module")
    assert len(caught) == 1
