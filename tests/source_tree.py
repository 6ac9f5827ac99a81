"""What the files of a folder of Python source import of each other, and which private names they use."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

# Methods that Python itself documents under a private name: those of named tuples.
PUBLIC_IN_SPITE_OF_THEIR_NAME = {"_asdict", "_fields", "_make", "_replace"}


class Import(NamedTuple):
    """One import statement: the module that it runs and the line it is on."""

    module: str
    line: int


class SourceTree:
    """
    The modules below a folder, by name: `"dspark_hf.generation.loop"` for `<folder>/dspark_hf/generation/loop.py`.

    Args:
        folder: Where packages are, such as `src`.
        leave_out: Names of folders whose files are not part of the packages.
    """

    def __init__(self, folder: Path, leave_out: tuple[str, ...] = ()):
        files = [file for file in sorted(folder.rglob("*.py")) if file.parent.name not in leave_out]
        self.files = {_module_name(file.relative_to(folder)): file for file in files}
        self.trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in self.files.items()}

    # ------------------------------------------------------------------ imports

    def imports(self, module: str) -> Iterator[Import]:
        """What a module imports of the tree, inside functions and for types too."""
        package = module if self.files[module].name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(self.trees[module]):
            for name in self._imported_by(node, package):
                yield Import(name, node.lineno)

    def _imported_by(self, node: ast.AST, package: str) -> Iterator[str]:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            inside = [f"{base}.{alias.name}" for alias in node.names]  # `from . import name`: the name may be a module.
            names = [name if name in self.files else base for name in inside]
        else:
            return
        yield from (name for name in dict.fromkeys(names) if name in self.files)

    def circle(self) -> list[str] | None:
        """
        Modules of which each imports the next and the last is the first again; `None` when there are none.

        An import of `a.b.c` first runs `a/b/__init__.py`, so it counts as an import of `a.b` too, unless it is in `a.b`
        itself. The outermost package is left out: it is always there before its modules.
        """
        arrows = {module: set(self._arrows(module)) for module in self.files}
        try:
            TopologicalSorter(arrows).prepare()
        except CycleError as error:
            return list(reversed(error.args[1]))
        return None

    def _arrows(self, module: str) -> Iterator[str]:
        for imported in self.imports(module):
            parts = imported.module.split(".")
            packages = [".".join(parts[:length]) for length in range(2, len(parts))]
            outside = [package for package in packages if not f"{module}.".startswith(f"{package}.")]
            yield from (name for name in (imported.module, *outside) if name != module)

    # ------------------------------------------------------------------ private names

    @cached_property
    def _defined_anywhere(self) -> set[str]:
        return set().union(*map(_defined, self.trees.values()))

    def private_names_of_others(self, module: str) -> Iterator[tuple[str, int]]:
        """
        Private names (`_name`) that a module takes from elsewhere, with the line.

        Its own are those that it defines. On `self` and `cls` they are those that any module of the tree defines, because
        classes share them with their subclasses.
        """
        tree = self.trees[module]
        own = _defined(tree)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                shared = _is_self(node.value) or _is_super(node.value)
                if node.attr not in (self._defined_anywhere if shared else own):
                    yield node.attr, node.lineno
            elif isinstance(node, ast.ImportFrom):
                parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
                yield from ((part, node.lineno) for part in parts if _is_private(part))
            elif isinstance(node, ast.Import):
                parts = [part for alias in node.names for part in alias.name.split(".")]
                yield from ((part, node.lineno) for part in parts if _is_private(part))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in (
                "getattr",
                "hasattr",
                "setattr",
                "delattr",
            ):
                name = node.args[1]
                if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in own:
                    yield name.value, node.lineno


def _module_name(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in PUBLIC_IN_SPITE_OF_THEIR_NAME


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "id", None) == "super"


def _defined(tree: ast.AST) -> set[str]:
    """The names that a module binds: functions, classes, variables, fields, attributes of `self`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names
