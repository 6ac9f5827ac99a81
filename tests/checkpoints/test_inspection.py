"""What is said about a checkpoint before it is loaded."""

import json
import re
from pathlib import Path

import pytest
import spellings

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import export, inspect_checkpoint
from dspark_hf.checkpoints.engines import CHECKED

FORMATS = {
    "DeepSpec": "DeepSpec",
    "SpecForge": "SpecForge",
    "ModelOpt": "ModelOpt",
    "speculators": "speculators",
    "DFlash class with a head": "z-lab DFlash",
    "GGUF": "GGUF",
}


@pytest.fixture(scope="module")
def target():
    return tiny.qwen3()


def bound(target, **fields) -> DSparkDrafter:
    drafter = tiny.random_drafter(target, **fields)
    drafter.bind(target)
    return drafter


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(("spelling", "name"), FORMATS.items(), ids=FORMATS)
def test_the_format_and_everything_about_it(target, spelling: str, name: str, tmp_path: Path):
    drafter = bound(target)
    found = inspect_checkpoint(spellings.DSPARK[spelling](drafter, tmp_path))
    assert found.format == name
    assert found.refusal is None
    assert found.config.target_layer_ids == drafter.config.target_layer_ids
    described = found.to_dict()["description"]
    assert described["drafts"].startswith(
        f"the anchor predicts: a block of {tiny.BLOCK_SIZE} gives {tiny.BLOCK_SIZE} drafts"
    )
    assert described["heads"] == "vanilla Markov head of rank 8, confidence head that reads the Markov embedding"
    own = drafter.num_parameters()
    embeddings = 2 * tiny.VOCAB_SIZE * tiny.HIDDEN_SIZE if spelling == "DeepSpec" else 0
    assert found.num_parameters == own + embeddings
    assert found.num_bytes == 4 * found.num_parameters
    text = str(found)
    assert f"hidden_states{drafter.config.hidden_state_indices}" in text
    assert "2 (qwen3), hidden size 32, 4/2 heads of 8, MLP 64" in text
    json.dumps(found.to_dict())


def test_our_own_format_is_served_by_none_and_that_can_be_changed(target, tmp_path: Path):
    bound(target).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert found.format == "dspark-hf"
    assert all("convert to" in reasons[0] for reasons in found.engines.values())


def test_an_engine_that_reads_it_has_no_reason_not_to(target, tmp_path: Path):
    folder = spellings.deepspec(bound(target), tmp_path)
    change_config(folder, partial_rotary_factor=None)
    engines = inspect_checkpoint(folder).engines
    assert engines["vLLM"] == engines["SGLang"] == []
    assert "does not read DeepSpec files" in engines["TensorRT-LLM"][0]


def test_a_file_that_an_engine_would_misread_is_not_for_it(target, tmp_path: Path):
    copied = inspect_checkpoint(spellings.deepspec(bound(target), tmp_path / "a")).engines
    assert "rotate only a part of each head" in copied["vLLM"][0]
    assert not copied["SGLang"]
    nested = spellings.normalised_specforge(bound(target), tmp_path / "b")
    change_config(nested, markov_rank=None)
    assert "markov_rank at the top level only" in inspect_checkpoint(nested).engines["SGLang"][0]


ODD = {
    "an unsaid layout": (spellings.specforge, {}, "does not say whether the anchor predicts"),
    "code of its own": (spellings.specforge, {}, r"auto_map.*not run"),
    "what was copied from the target": (spellings.deepspec, {}, "partial_rotary_factor, num_experts copied"),
    "copies of the target's tensors": (spellings.deepspec, {}, r"embed_tokens\.weight and lm_head\.weight"),
    "fields in two places": (
        spellings.specforge,
        {"mask_token_id": 3},
        f"mask_token_id is given as {tiny.MASK_ID} and as 3",
    ),
    "drafts a round that do not fit": (
        spellings.speculators,
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]}},
        "asks for 3 drafts per round, but its block gives 4",
    ),
    "an unknown target": (spellings.speculators, {}, "how many layers its target has"),
    "the target's last layer": (spellings.deepspec, {"target_layer_ids": [0, 3]}, "last layer"),
    "the embedding output": (spellings.deepspec, {"target_layer_ids": [-1, 1]}, "taps the embedding output"),
}


@pytest.mark.parametrize(("spelling", "fields", "message"), ODD.values(), ids=ODD)
def test_what_is_odd_is_said(target, spelling, fields, message: str, tmp_path: Path):
    folder = spelling(bound(target), tmp_path)
    change_config(folder, **fields)
    found = inspect_checkpoint(folder)
    oddities = "\n".join(found.oddities)
    assert re.search(message, oddities), oddities
    assert "  odd: " in str(found)


def test_pickle_files_beside_the_weights_are_pointed_out(target, tmp_path: Path):
    folder = spellings.zlab(bound(target, markov_rank=0, enable_confidence_head=False), tmp_path)
    (folder / "mask_embedding.pt").write_bytes(b"")
    assert "mask_embedding.pt in the same folder: pickle files are not read" in inspect_checkpoint(folder).oddities


# Fields of a speculators file as other software writes it, and whether vLLM takes its layers as they were trained.
FULL = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
CAUSALITY = {
    "DFlash, full layers": (FULL, {"sliding_window_non_causal": False}, False),
    "DFlash, full layers, without the field": (FULL, {"sliding_window_non_causal": None}, True),
    "DFlash, sliding layers": (FULL | SLIDING, {"sliding_window_non_causal": False}, True),
    "DSpark, full layers": ({}, {"sliding_window_non_causal": False}, True),
    "DSpark, sliding layers": (SLIDING, {"sliding_window_non_causal": False}, True),
    "DSpark, sliding layers both ways": (SLIDING, {"sliding_window_non_causal": True}, False),
}


@pytest.mark.parametrize(("fields", "changed", "is_right"), CAUSALITY.values(), ids=CAUSALITY)
def test_files_whose_layers_vllm_takes_to_be_causal_are_named(target, fields, changed, is_right, tmp_path: Path):
    drafter = bound(target, target_name_or_path="some/target", **fields)
    folder = export(drafter, tmp_path / "out", "speculators").path
    raw = json.loads((folder / "config.json").read_text()) | changed
    raw = {name: value for name, value in raw.items() if value is not None}
    del raw["transformer_layer_config"]["is_causal"]
    (folder / "config.json").write_text(json.dumps(raw))
    misread = [reason for reason in inspect_checkpoint(folder).engines["vLLM"] if "other layers to be causal" in reason]
    assert len(misread) == (not is_right)


def test_what_is_known_about_an_engine_is_said(target, tmp_path: Path):
    written = export(bound(target), tmp_path / "out", "vllm-sglang")
    for text in (str(written), str(inspect_checkpoint(written.path))):
        assert f"drafts compared with vLLM {CHECKED['vLLM'].run}" in text
        assert f"by the rules of SGLang {CHECKED['SGLang'].rules}, not run" in text
