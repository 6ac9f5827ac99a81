"""Every public spelling of one drafter loads as that drafter, in the layout its format means."""

import json
from pathlib import Path

import pytest
import spellings
import torch
from safetensors.torch import load_file, save_file

import tiny
from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.checkpoints import read_checkpoint

pytestmark = pytest.mark.integration


@torch.no_grad()
def everything(drafter: DSparkDrafter, target) -> dict[str, torch.Tensor]:
    """Everything that a drafter computes for one block after a fixed context."""
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 9, len(config.target_layer_ids) * config.target_hidden_size, generator=generator)
    block_ids = torch.full((1, config.block_size), config.mask_token_id)
    block_ids[0, 0] = 5
    embeddings = drafter.bind(target)
    cache = drafter_cache(drafter, features)
    positions = 9 + torch.arange(config.block_size)[None]
    hidden_states = drafter(block_ids, positions, draft_cache=cache, embeddings=embeddings).last_hidden_state
    found = {"hidden states": hidden_states, "base logits": drafter.base_logits(hidden_states, embeddings)}
    previous = torch.arange(config.block_size)[None] + 3
    if drafter.markov_head is not None:
        found["transition bias"] = drafter.markov_head(previous, hidden_states)
    if drafter.confidence_head is not None:
        embedded = drafter.markov_head.markov_w1(previous) if drafter.markov_head is not None else None
        found["confidence"] = drafter.confidence_head(hidden_states, embedded)
    if drafter.draft_token_ids is not None:
        found["draft vocabulary"] = drafter.draft_token_ids
    return found


def drafter_cache(drafter: DSparkDrafter, features: torch.Tensor):
    from dspark_hf.draft_cache import DraftCache

    cache = DraftCache(len(drafter.layers))
    drafter.extend_cache(cache, features, torch.arange(features.shape[1])[None])
    return cache


def assert_same(loaded: DSparkDrafter, drafter: DSparkDrafter, target) -> None:
    """The same weights to the last bit, and what is computed with them up to rounding."""
    weights = loaded.state_dict()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    torch.testing.assert_close(everything(loaded, target), everything(drafter, target), rtol=1e-5, atol=1e-5)


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    changed = json.loads(file.read_text()) | fields
    file.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))


@pytest.fixture(scope="module")
def target():
    return tiny.qwen3()


def bound(target, **fields) -> DSparkDrafter:
    drafter = tiny.random_drafter(target, **fields)
    drafter.bind(target)
    return drafter


# ---------------------------------------------------------------------- one drafter, many spellings


@pytest.mark.parametrize("spelling", spellings.DSPARK)
def test_a_dspark_drafter_in_every_spelling(target, spelling: str, tmp_path: Path):
    drafter = bound(target)
    loaded = DSparkDrafter.from_pretrained(spellings.DSPARK[spelling](drafter, tmp_path))
    assert_same(loaded, drafter, target)
    assert loaded.config.sample_from_anchor
    assert loaded.config.target_layer_ids == drafter.config.target_layer_ids
    assert not loaded.training


@pytest.mark.parametrize("spelling", spellings.DFLASH)
def test_a_dflash_drafter_in_every_spelling(target, spelling: str, tmp_path: Path):
    fields = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
    drafter = bound(target, **fields)
    loaded = DSparkDrafter.from_pretrained(spellings.DFLASH[spelling](drafter, tmp_path))
    assert_same(loaded, drafter, target)
    assert not loaded.config.sample_from_anchor
    assert loaded.config.target_layer_ids == drafter.config.target_layer_ids


@pytest.mark.parametrize("head", ["gated", "rnn"])
@pytest.mark.parametrize("spelling", ["DeepSpec", "SpecForge", "ModelOpt", "speculators"])
def test_other_sequential_heads(target, spelling: str, head: str, tmp_path: Path):
    drafter = bound(target, markov_head_type=head)
    loaded = DSparkDrafter.from_pretrained(spellings.DSPARK[spelling](drafter, tmp_path))
    assert_same(loaded, drafter, target)


def test_transformers_own_dflash(target, tmp_path: Path):
    drafter = bound(
        target,
        markov_rank=0,
        enable_confidence_head=False,
        sample_from_anchor=False,
        layer_types=["sliding_attention"] * 2,
        sliding_window=6,
        is_causal=False,
        raw_embeddings=True,
    )
    loaded = DSparkDrafter.from_pretrained(spellings.transformers_dflash(drafter, tmp_path))
    assert_same(loaded, drafter, target)
    assert loaded.config.raw_embeddings


@pytest.mark.parametrize("spelling", [spellings.lfm2, spellings.specforge], ids=["LFM2", "not marked"])
def test_interleaved_rotation_comes_from_the_drafters_own_field(target, spelling, tmp_path: Path):
    drafter = bound(target, rotary_interleaved=True)
    loaded = DSparkDrafter.from_pretrained(spelling(drafter, tmp_path))
    assert loaded.config.rotary_interleaved == (spelling is spellings.lfm2)
    if loaded.config.rotary_interleaved:
        assert_same(loaded, drafter, target)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("spelling", ["ModelOpt", "speculators"])
def test_sliding_windows_and_causal_blocks(target, spelling: str, causal: bool, tmp_path: Path):
    layers = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": causal}
    drafter = bound(target, **layers)
    folder = spellings.DSPARK[spelling](drafter, tmp_path)
    if spelling == "speculators":
        change_config(folder, sliding_window_non_causal=not causal)
    assert_same(DSparkDrafter.from_pretrained(folder), drafter, target)


def test_sliding_layers_are_causal_and_full_ones_are_not_where_nothing_is_said(target, tmp_path: Path):
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
    drafter = bound(target, markov_rank=0, enable_confidence_head=False, sample_from_anchor=False, **mixed)
    loaded = DSparkDrafter.from_pretrained(spellings.zlab(drafter, tmp_path))
    assert [loaded.config.layer_is_causal(i) for i in range(2)] == [True, False]
    assert_same(loaded, drafter, target)


@pytest.mark.parametrize("spelling", ["ModelOpt", "GGUF"])
def test_attention_sinks(target, spelling: str, tmp_path: Path):
    drafter = bound(target, attention_sinks=True)
    for layer in drafter.layers:
        torch.nn.init.normal_(layer.self_attn.attention_sink_bias)
    loaded = DSparkDrafter.from_pretrained(spellings.DSPARK[spelling](drafter, tmp_path))
    assert_same(loaded, drafter, target)


def test_a_mask_embedding_of_its_own(target, tmp_path: Path):
    drafter = bound(target, markov_rank=0, enable_confidence_head=False, has_mask_embedding=True, value_scale=0.5)
    folder = spellings.zlab(drafter, tmp_path)
    change_config(folder, attention_value_scale=0.5, partial_rotary_factor=0.5)
    loaded = DSparkDrafter.from_pretrained(folder)
    assert loaded.config.has_mask_embedding
    assert loaded.config.value_scale == 0.5
    assert loaded.config.rope_parameters["partial_rotary_factor"] == 0.5


def test_a_mask_embedding_in_a_pickle_file_is_not_left_out_silently(target, tmp_path: Path):
    folder = spellings.zlab(bound(target, markov_rank=0, enable_confidence_head=False, value_scale=0.5), tmp_path)
    change_config(folder, attention_value_scale=0.5)
    DSparkDrafter.from_pretrained(folder)
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize("place", ["at the top", "in dflash_config"])
def test_nested_fields_win(target, place: str, tmp_path: Path):
    drafter = bound(target, markov_rank=0, enable_confidence_head=False, sample_from_anchor=False)
    folder = spellings.zlab(drafter, tmp_path)
    section = spellings.taps(drafter.config)
    if place == "in dflash_config":
        section |= {"block_size": 6, "output_multiplier": 0.25, "final_logit_softcapping": 20.0}
        change_config(folder, dflash_config=section, block_size=16)
    else:
        change_config(folder, block_size=6, output_multiplier=0.25, final_logit_softcapping=20.0)
    config = DSparkDrafter.from_pretrained(folder).config
    assert (config.block_size, config.logit_scale, config.final_logit_softcapping) == (6, 0.25, 20.0)


# ---------------------------------------------------------------------- slot layout

LAYOUTS = {
    "DeepSpec": (spellings.deepspec, {}, True),
    "DeepSpec says it": (spellings.deepspec, {"sample_from_anchor": False}, False),
    "DeepSpec, vLLM's first key": (spellings.deepspec, {"dspark_bonus_anchor": True}, False),
    "SpecForge": (spellings.specforge, {}, True),
    "ModelOpt": (spellings.modelopt, {}, True),
    "DFlash class with a head": (spellings.hybrid, {}, True),
    "speculators says it": (spellings.speculators, {"sample_from_anchor": True}, True),
    "speculators denies it": (spellings.speculators, {"sample_from_anchor": False}, False),
    "speculators from before the key": (spellings.speculators, {"sample_from_anchor": None}, False),
}


@pytest.mark.parametrize(("spelling", "fields", "expected"), LAYOUTS.values(), ids=LAYOUTS)
def test_what_the_anchors_slot_does(target, spelling, fields, expected: bool, tmp_path: Path):
    folder = spelling(bound(target), tmp_path)
    change_config(folder, **fields)
    assert DSparkDrafter.from_pretrained(folder).config.sample_from_anchor is expected


def test_deepspecs_dflash_predicts_at_the_anchor_and_zlabs_does_not(target, tmp_path: Path):
    drafter = bound(target, markov_rank=0, enable_confidence_head=False, confidence_head_with_markov=False)
    assert DSparkDrafter.from_pretrained(spellings.deepspec(drafter, tmp_path / "a")).config.sample_from_anchor
    assert not DSparkDrafter.from_pretrained(spellings.zlab(drafter, tmp_path / "b")).config.sample_from_anchor


@pytest.mark.parametrize(
    "fields",
    [
        {"sample_from_anchor": True, "dspark_bonus_anchor": True},
        {"sample_from_anchor": False, "dflash_config": {"sample_from_anchor": True}},
    ],
    ids=["two keys", "two places"],
)
def test_a_file_that_says_both_is_refused(target, fields, tmp_path: Path):
    folder = spellings.deepspec(bound(target), tmp_path)
    change_config(folder, **fields)
    with pytest.raises(ValueError, match="says both that the anchor's slot predicts and that it does not"):
        DSparkDrafter.from_pretrained(folder)


def test_a_recurrent_head_that_starts_at_an_idle_anchor_is_refused(target, tmp_path: Path):
    folder = spellings.speculators(bound(target, markov_head_type="rnn"), tmp_path, sample_from_anchor=False)
    with pytest.raises(ValueError, match="recurrent head starts at the anchor's slot"):
        DSparkDrafter.from_pretrained(folder)


# ---------------------------------------------------------------------- layer ids


def test_layer_ids_that_count_inputs(target, tmp_path: Path):
    drafter = bound(target, target_layer_ids=[-1, 0, 2])
    loaded = DSparkDrafter.from_pretrained(spellings.speculators(drafter, tmp_path))
    assert loaded.config.target_layer_ids == [-1, 0, 2]
    assert loaded.config.hidden_state_indices == [0, 1, 3]


def test_layer_ids_in_both_spellings_have_to_agree(target, tmp_path: Path):
    drafter = bound(target)
    folder = spellings.deepspec(drafter, tmp_path)
    inputs = [layer_id + 1 for layer_id in drafter.config.target_layer_ids]
    change_config(folder, eagle_aux_hidden_state_layer_ids=inputs)
    assert DSparkDrafter.from_pretrained(folder).config.target_layer_ids == drafter.config.target_layer_ids
    change_config(folder, eagle_aux_hidden_state_layer_ids=drafter.config.target_layer_ids)
    with pytest.raises(ValueError, match="do not name the same taps"):
        DSparkDrafter.from_pretrained(folder)


@pytest.mark.parametrize("spelling", [spellings.zlab, spellings.speculators], ids=["z-lab", "speculators"])
def test_missing_layer_ids_are_not_guessed(target, spelling, tmp_path: Path):
    folder = spelling(bound(target, markov_rank=0, enable_confidence_head=False), tmp_path)
    change_config(folder, dflash_config={"mask_token_id": tiny.MASK_ID}, aux_hidden_state_layer_ids=None)
    with pytest.raises(ValueError, match="which target layers feed it"):
        DSparkDrafter.from_pretrained(folder)


# ---------------------------------------------------------------------- heads

LOST = {
    "both tensors": ["markov_w1.weight", "markov_w2.weight"],
    "one of two": ["markov_w2.weight"],
    "the confidence head": ["confidence_head.proj.weight", "confidence_head.proj.bias"],
}


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST)
@pytest.mark.parametrize("spelling", ["DeepSpec", "SpecForge", "speculators", "DFlash class with a head"])
def test_a_lost_head_is_not_loaded_as_another_kind_of_drafter(target, spelling: str, lost, tmp_path: Path):
    folder = spellings.DSPARK[spelling](bound(target), tmp_path)
    file = folder / "model.safetensors"
    kept = {name: t for name, t in load_file(file).items() if not name.endswith(tuple(lost))}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not fit its configuration, so it was not loaded"):
        DSparkDrafter.from_pretrained(folder)


def test_a_tensor_under_two_names_is_refused(target, tmp_path: Path):
    folder = spellings.modelopt(bound(target), tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["markov_head.markov_w1.weight"] = tensors["markov_w1.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="twice"):
        DSparkDrafter.from_pretrained(folder)


# ---------------------------------------------------------------------- draft vocabulary

SPARSE = torch.tensor([1, 2, 3, 9, 10, 40, 41, 90, 126])


@pytest.fixture
def reduced(target) -> DSparkDrafter:
    drafter = bound(target, draft_vocab_size=len(SPARSE))
    drafter.draft_token_ids.copy_(SPARSE)
    drafter.bind(target)
    return drafter


def test_a_draft_vocabulary_as_offsets(target, reduced: DSparkDrafter, tmp_path: Path):
    loaded = DSparkDrafter.from_pretrained(spellings.speculators(reduced, tmp_path))
    assert loaded.config.has_lm_head
    assert_same(loaded, reduced, target)


def test_a_draft_vocabulary_as_ids(target, reduced: DSparkDrafter, tmp_path: Path):
    assert_same(DSparkDrafter.from_pretrained(spellings.gguf_file(reduced, tmp_path)), reduced, target)


@pytest.mark.parametrize("marks", [True, False], ids=["with t2d", "without"])
@pytest.mark.parametrize("as_ids", [True, False], ids=["ids", "offsets"])
def test_which_of_the_two_a_file_holds_is_found_out(target, reduced, as_ids: bool, marks: bool, tmp_path: Path):
    folder = spellings.speculators(reduced, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if as_ids:
        tensors["d2t"] = SPARSE.clone()
    if not marks:
        del tensors["t2d"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(DSparkDrafter.from_pretrained(folder).draft_token_ids, SPARSE)


def test_a_table_that_contradicts_its_marks_is_refused(reduced, tmp_path: Path):
    folder = spellings.speculators(reduced, tmp_path)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["t2d"] = tensors["t2d"].roll(1)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="draft vocabulary is damaged"):
        DSparkDrafter.from_pretrained(folder)


def test_a_draft_vocabulary_that_is_the_whole_one_is_none(target, tmp_path: Path):
    folder = spellings.specforge(bound(target), tmp_path)
    change_config(folder, draft_vocab_size=tiny.VOCAB_SIZE)
    assert DSparkDrafter.from_pretrained(folder).config.draft_vocab_size is None


def test_the_head_of_a_reduced_vocabulary_is_the_files_even_when_embeddings_are_borrowed(
    target, reduced, tmp_path: Path
):
    loaded = DSparkDrafter.from_pretrained(spellings.speculators(reduced, tmp_path), borrow_embeddings=True)
    assert loaded.lm_head is not None
    assert_same(loaded, reduced, target)


# ---------------------------------------------------------------------- GGUF


def test_gguf_metadata_overrides_what_it_leaves_unsaid(target, tmp_path: Path):
    metadata = {
        "dflash.sample_from_anchor": False,
        "dflash.attention.causal": True,
        "dflash.attention.sliding_window": 32,
    }
    config = DSparkDrafter.from_pretrained(spellings.gguf_file(bound(target), tmp_path, metadata)).config
    assert not config.sample_from_anchor
    assert config.is_causal is True
    assert (config.layer_types, config.sliding_window) == (["sliding_attention"] * 2, 32)


@pytest.mark.parametrize(("kind", "error"), [("Q8_0", 0.01), ("Q5_1", 0.06), ("Q4_0", 0.15), ("BF16", 0.01)])
def test_quantized_gguf_matrices_are_expanded(target, kind: str, error: float, tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    drafter = bound(target)
    loaded = DSparkDrafter.from_pretrained(spellings.gguf_file(drafter, tmp_path, quantize=kind))
    for name, tensor in drafter.state_dict().items():
        got = loaded.state_dict()[name]
        if not (name.startswith("layers.") and tensor.ndim == 2):
            assert torch.equal(got, tensor), name
            continue
        difference = float((got.float() - tensor).abs().max() / tensor.abs().max())
        assert 0 < difference < error, (name, difference)
        quantized = gguf.quantize(tensor.numpy(), gguf.GGMLQuantizationType[kind])
        expanded = gguf.dequantize(quantized, gguf.GGMLQuantizationType[kind])
        assert torch.equal(got.float(), torch.from_numpy(expanded).reshape(tensor.shape)), name


def test_a_gguf_file_can_be_named_in_its_folder(target, tmp_path: Path):
    drafter = bound(target)
    file = spellings.gguf_file(drafter, tmp_path)
    assert_same(DSparkDrafter.from_pretrained(tmp_path, gguf_file=file.name), drafter, target)


def test_a_gguf_file_that_says_it_has_a_confidence_head_must_have_one(target, tmp_path: Path):
    drafter = bound(target, enable_confidence_head=False)
    file = spellings.gguf_file(drafter, tmp_path, {"dflash.has_confidence_head": True})
    with pytest.raises(ValueError, match=r"missing: confidence_head\.proj"):
        DSparkDrafter.from_pretrained(file)


@pytest.mark.parametrize("size", [0, 3, 2000])
def test_a_damaged_gguf_file_is_named(target, size: int, tmp_path: Path):
    file = spellings.gguf_file(bound(target), tmp_path)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(OSError, match=r"draft\.gguf"):
        DSparkDrafter.from_pretrained(file)


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path: Path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "other.gguf", "llama")
    writer.add_tensor("token_embd.weight", torch.zeros(2, 2).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match="architecture 'llama', not of a drafter"):
        DSparkDrafter.from_pretrained(tmp_path / "other.gguf")


# ---------------------------------------------------------------------- how files are found


def test_a_subfolder(target, tmp_path: Path):
    drafter = bound(target)
    spellings.modelopt(drafter, tmp_path / "inner")
    assert_same(DSparkDrafter.from_pretrained(tmp_path, subfolder="inner"), drafter, target)


def test_shards_in_another_spelling(target, tmp_path: Path):
    drafter = bound(target)
    spellings.modelopt(drafter, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(tensors):
        shard = f"model-{i % 2}.safetensors"
        weight_map[name] = shard
    for shard in set(weight_map.values()):
        part = {name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}
        save_file(part, tmp_path / shard, metadata={"format": "pt"})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same(DSparkDrafter.from_pretrained(tmp_path), drafter, target)


def test_what_needs_no_translation_is_loaded_by_name(target, tmp_path: Path):
    assert read_checkpoint(spellings.deepspec(bound(target), tmp_path / "a"), None, {}).loads_by_name
    assert not read_checkpoint(spellings.modelopt(bound(target), tmp_path / "b"), None, {}).loads_by_name


@pytest.mark.parametrize("spelling", ["SpecForge", "ModelOpt"])
def test_the_dtype_asked_for(target, spelling: str, tmp_path: Path):
    folder = spellings.DSPARK[spelling](bound(target), tmp_path)
    assert DSparkDrafter.from_pretrained(folder, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert DSparkDrafter.from_pretrained(folder).dtype == torch.float32


def test_no_code_of_a_checkpoint_runs(target, tmp_path: Path):
    folder = spellings.specforge(bound(target), tmp_path)  # names dspark.py in auto_map
    (folder / "dspark.py").write_text("raise SystemExit('remote code ran')")
    DSparkDrafter.from_pretrained(folder)


def test_a_given_configuration_is_used_instead(target, tmp_path: Path):
    drafter = bound(target)
    folder = spellings.modelopt(drafter, tmp_path)
    change_config(folder, dflash_config={})
    config = DSparkConfig.from_dict(drafter.config.to_dict())
    assert_same(DSparkDrafter.from_pretrained(folder, config=config), drafter, target)
