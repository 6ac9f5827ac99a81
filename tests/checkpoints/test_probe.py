"""The probe finds a drafter that is labelled with the wrong slot layout."""

import json
from pathlib import Path

import pytest
import spellings
import torch
from transformers import AutoModelForCausalLM

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import probe_layout

pytestmark = pytest.mark.integration


def trained(shared: Path, case: str) -> tuple[DSparkDrafter, torch.nn.Module, list[torch.Tensor]]:
    """A drafter that was fitted to its target, whose anchor predicts, and prompts it knows."""
    folder = shared / "parity" / case
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    drafter = DSparkDrafter.from_pretrained(folder / "drafter").eval()

    prompts = json.loads((folder / "generation.json").read_text())["prompts"]
    return drafter, target, [torch.tensor([prompt]) for prompt in prompts]


@pytest.mark.parametrize("case", ["a_qwen3_vanilla_confmarkov", "d_qwen3_dflash"])
@pytest.mark.parametrize("declared", [True, False], ids=["labelled right", "labelled wrong"])
def test_a_fitted_drafter(shared: Path, case: str, declared: bool):
    drafter, target, prompts = trained(shared, case)
    drafter.config.sample_from_anchor = declared
    probe = probe_layout(drafter, target, prompts, max_new_tokens=24)
    assert probe.better is True
    assert probe.is_mislabelled is not declared
    assert ("mislabelled" in str(probe)) is not declared
    assert probe.acceptance[True] > 1.5 > probe.acceptance[False]


@pytest.mark.parametrize("spelling", ["SpecForge", "ModelOpt", "speculators"])
def test_a_fitted_drafter_accepts_as_much_in_every_spelling(shared: Path, spelling: str, tmp_path: Path):
    drafter, target, prompts = trained(shared, "a_qwen3_vanilla_confmarkov")
    expected = probe_layout(drafter, target, prompts[:1], max_new_tokens=16)
    borrower = DSparkDrafter.from_pretrained(
        shared / "parity" / "a_qwen3_vanilla_confmarkov" / "drafter", borrow_embeddings=True
    )
    borrower.bind(target)
    loaded = DSparkDrafter.from_pretrained(spellings.DSPARK[spelling](borrower, tmp_path)).eval()
    assert probe_layout(loaded, target, prompts[:1], max_new_tokens=16) == expected


def test_a_drafter_that_accepts_nothing_is_not_called_mislabelled():
    target = tiny.qwen3()
    probe = probe_layout(tiny.random_drafter(target), target, [tiny.prompt()["input_ids"]], max_new_tokens=16)
    assert not probe.is_mislabelled
    assert probe.num_blocks == 15


def test_a_perfect_drafter_of_a_reduced_vocabulary():
    target = tiny.bigram()
    drafter = tiny.perfect_drafter(target, draft_vocab_size=100)
    probe = probe_layout(drafter, target, [tiny.prompt(seed=seed)["input_ids"] for seed in range(3)], max_new_tokens=16)
    assert probe.acceptance[True] > 0


def test_a_block_of_one_has_one_layout():
    target = tiny.qwen3()
    with pytest.raises(ValueError, match="one layout only"):
        probe_layout(tiny.random_drafter(target, block_size=1), target, [])
