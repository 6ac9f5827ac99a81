"""`examples/lora.py` runs, on tiny models."""

import runpy
import sys
from pathlib import Path

import pytest
import tiny_folders

EXAMPLES = Path(__file__).parents[2] / "examples"

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.integration,
    # peft asks transformers for an attribute by its old name.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]


def test_lora(monkeypatch, capsys, tmp_path):
    folders = tiny_folders.save(tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    options = ("--target", folders.target, "--drafter", folders.random, "--steps", 2, "--max-new-tokens", 12)
    monkeypatch.setattr(sys, "argv", ["lora.py", *map(str, options)])
    runpy.run_path(str(EXAMPLES / "lora.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert "tokens a target pass before" in printed and "with it: " in printed
    assert (tmp_path / "runs" / "lora" / "adapter_model.safetensors").exists()
