"""`generate(custom_generate=...)` with a drafter's repository, for a program that imports nothing but transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_folders
import torch
from hub_server import TOKEN, USER, Hub

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.generation.from_repository import generate_with

NAME = f"{USER}/drafter-1.0"
SOURCE = str(Path(__file__).parents[2] / "src")

PROGRAM = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
assert "dspark_hf" not in sys.modules
target_folder, token, *places = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target_folder)
passes = 0
def count(*args): globals().__setitem__("passes", passes + 1)
target.register_forward_hook(count)
inputs = {"input_ids": torch.arange(5, 12)[None], "attention_mask": torch.ones(1, 7, dtype=torch.long)}
settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
plain = target.generate(**inputs, **settings)
found = [[True, passes]]
for place in places:
    passes = 0
    code, _, weights = place.partition("=")
    where = {"custom_generate": code} | ({"drafter": weights} if weights else {})
    output = target.generate(**inputs, **settings, **where, trust_remote_code=True, token=token)
    found.append([torch.equal(plain, output), passes])
print(json.dumps(found))
"""


@pytest.fixture
def folders(tmp_path: Path) -> tiny_folders.Folders:
    return tiny_folders.save(tmp_path / "models")


def test_from_a_private_repository_and_from_a_folder(hub: Hub, folders, tmp_path: Path):
    drafter, folder = DSparkDrafter.from_pretrained(folders.perfect), tmp_path / "with-code"
    drafter.save_pretrained(folder, custom_generate=True)
    drafter.push_to_hub(NAME, token=TOKEN, private=True, custom_generate=True)
    assert "custom_generate" in hub.tree(NAME)["README.md"].decode().split("---")[1]
    environment = {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(tmp_path / "home"),
        "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")]),
    }
    command = [
        sys.executable,
        "-c",
        PROGRAM,
        str(folders.target),
        TOKEN,
        NAME,
        f"{folder}={folder}",
        f"{folder}={NAME}",
        NAME,
    ]
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert TOKEN not in result.stderr + result.stdout
    (_, plain_passes), *drafted = json.loads(result.stdout.splitlines()[-1])
    assert plain_passes == 20
    assert all(same and passes < 10 for same, passes in drafted) and len(drafted) == 4


def test_the_code_is_not_run_unasked(folders, tmp_path: Path):
    DSparkDrafter.from_pretrained(folders.perfect).save_pretrained(tmp_path / "with-code", custom_generate=True)
    with pytest.raises(ValueError, match="trust_remote_code"):
        tiny.bigram().generate(torch.ones(1, 3, dtype=torch.long), custom_generate=str(tmp_path / "with-code"))


def test_a_drafter_can_be_named_or_given(folders):
    target, inputs = tiny.bigram(), torch.arange(5, 12)[None]
    settings = {"inputs": inputs, "max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    plain = target.generate(**settings)
    for drafter in (str(folders.perfect), folders.perfect, DSparkDrafter.from_pretrained(folders.perfect)):
        assert torch.equal(generate_with(target, drafter=drafter, **settings), plain)
    with pytest.raises(ValueError, match="custom_generate=folder, drafter=folder"):
        generate_with(target, **settings)
