"""`--help` and `--version` import nothing heavy, so that they answer at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer")

import typer

from dspark_hf_cli.app import app

COMMANDS = list(typer.main.get_command(app).commands)
HEAVY = {"torch", "transformers", "dspark_hf", "datasets", "matplotlib", "scipy", "huggingface_hub"}
# Runs the command line, then prints which of the heavy packages that imported.
CODE = f"""if True:
    import sys
    from dspark_hf_cli import main
    try:
        main()
    except SystemExit as exit_:
        print("exit code", exit_.code or 0)
    print("imported:", sorted({HEAVY!r} & set(sys.modules)))
"""


def last_lines(*arguments: str) -> list[str]:
    """What a fresh process says last."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    output = subprocess.check_output([sys.executable, "-c", CODE, *arguments], env=environment, text=True)
    return output.splitlines()[-2:]


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)],
    ids=" ".join,
)
def test_help_and_version_import_nothing_heavy(arguments):
    assert last_lines(*arguments) == ["exit code 0", "imported: []"]


def test_the_check_sees_what_a_command_imports():
    assert "torch" in last_lines("env")[-1]
