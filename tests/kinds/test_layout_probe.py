"""The probe finds a drafter that is labelled with the wrong slot layout."""

import json
from pathlib import Path

import pytest
import spellings
import torch
from transformers import AutoModelForCausalLM

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.kinds.dspark.layout_probe import probe_layout

DFLASH = "d_qwen3_dflash"
DSPARK = "a_qwen3_vanilla_confmarkov"


def fitted(shared: Path, case: str) -> tuple[DSparkDrafter, torch.nn.Module, list[torch.Tensor]]:
    """A drafter that was fitted to its target, whose anchor predicts, and the prompts that it knows."""
    folder = shared / "parity" / case
    target = AutoModelForCausalLM.from_pretrained(folder / "target").eval()
    drafter = DSparkDrafter.from_pretrained(folder / "drafter", borrow_embeddings=True).eval()
    drafter.bind(target)
    runs = json.loads((folder / "generation.json").read_text())["runs"]
    prompts = {run["prompt_index"]: run["prompt_ids"] for run in runs}
    return drafter, target, [torch.tensor([prompt]) for prompt in prompts.values()]


@pytest.mark.parametrize("declared", [True, False], ids=["labelled right", "labelled wrong"])
def test_a_fitted_drafter(shared: Path, declared: bool):
    drafter, target, prompts = fitted(shared, DFLASH)
    drafter.config.sample_from_anchor = declared
    probe = probe_layout(drafter, target, prompts, max_new_tokens=24)
    assert probe.acceptance[True] > 1.5 > 0.1 > probe.acceptance[False]
    assert probe.is_mislabelled is not declared
    assert ("The file is mislabelled" if not declared else "The declared layout is right") in str(probe)


PACKED = {
    "DeepSpec's, as it was trained": (spellings.deepspec, {}, False),
    "z-lab's, whose anchor predicts nothing": (spellings.zlab, {}, True),
    "speculators' that says it": (spellings.speculators, {"sample_from_anchor": True}, False),
    "speculators' from before the key": (spellings.speculators, {"sample_from_anchor": None}, True),
}


@pytest.mark.parametrize(("spelling", "fields", "mislabelled"), PACKED.values(), ids=PACKED)
def test_what_a_packaging_means_decides_what_is_accepted(
    shared: Path, spelling, fields, mislabelled: bool, tmp_path: Path
):
    drafter, target, prompts = fitted(shared, DFLASH)
    loaded = DSparkDrafter.from_pretrained(spelling(drafter, tmp_path, **fields)).eval()
    probe = probe_layout(loaded, target, prompts, max_new_tokens=24)
    assert probe.declared is not mislabelled
    assert probe.is_mislabelled is mislabelled


def test_a_strong_sequential_head_can_make_up_for_either(shared: Path):
    """Nearly all that this drafter knows is the token before, so both layouts do; the probe does not guess."""
    drafter, target, prompts = fitted(shared, DSPARK)
    for declared in (True, False):
        drafter.config.sample_from_anchor = declared
        probe = probe_layout(drafter, target, prompts, max_new_tokens=24)
        assert not probe.is_mislabelled
        assert "too small to decide" in str(probe)


@pytest.mark.parametrize("spelling", ["SpecForge", "ModelOpt", "speculators", "GGUF"])
def test_a_fitted_drafter_accepts_as_much_in_every_spelling(shared: Path, spelling: str, tmp_path: Path):
    drafter, target, prompts = fitted(shared, DSPARK)
    expected = probe_layout(drafter, target, prompts[:1], max_new_tokens=16)
    loaded = DSparkDrafter.from_pretrained(spellings.DSPARK[spelling](drafter, tmp_path)).eval()
    assert probe_layout(loaded, target, prompts[:1], max_new_tokens=16) == expected


def test_a_drafter_that_accepts_nothing_is_not_called_mislabelled():
    target = tiny.qwen3()
    probe = probe_layout(tiny.random_drafter(target), target, [tiny.prompt()["input_ids"]], max_new_tokens=16)
    assert not probe.is_mislabelled
    assert probe.num_blocks == 15


def test_a_perfect_drafter_is_right_wherever_its_vocabulary_reaches():
    target = tiny.bigram()
    prompts = [tiny.prompt(seed=seed)["input_ids"] for seed in range(3)]
    for size in (None, 100):
        probe = probe_layout(tiny.perfect_drafter(target, draft_vocab_size=size), target, prompts, max_new_tokens=16)
        # The last blocks of a sequence have fewer tokens to be right about.
        assert (probe.acceptance[True] > 2.6) is (size is None)
        assert probe.acceptance[True] > 0


@pytest.mark.parametrize(("fields", "message"), [({"block_size": 1}, "one layout only"), ({}, "Only 0 blocks")])
def test_what_cannot_be_probed_is_refused(fields, message: str):
    target = tiny.qwen3()
    with pytest.raises(ValueError, match=message):
        probe_layout(tiny.random_drafter(target, **fields), target, [])
