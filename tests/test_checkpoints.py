"""Loading and saving: what comes back is what was saved, and nothing that does not fit is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel

import tiny
from dspark_hf import DSparkConfig, DSparkDrafter

pytestmark = pytest.mark.integration


@pytest.fixture
def deepspec(data: Path, tmp_path: Path) -> Path:
    """A DeepSpec checkpoint that a test may change."""
    folder = tmp_path / "deepspec"
    shutil.copytree(data / "parity" / "a_qwen3_vanilla_confmarkov" / "drafter", folder)
    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of our own that a test may change."""
    folder = tmp_path / "saved"
    tiny.random_drafter(tiny.qwen3()).save_pretrained(folder)
    return folder


def change_config(folder: Path, **fields) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def tensors_of(drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in drafter.state_dict().items()}


def assert_same_tensors(one: DSparkDrafter, other: DSparkDrafter) -> None:
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


@torch.no_grad()
def block_logits(drafter: DSparkDrafter, target=None) -> torch.Tensor:
    """Base logits of one block after a fixed context."""
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 6, len(config.target_layer_ids) * config.target_hidden_size, generator=generator)
    block_ids = torch.full((1, config.block_size), config.mask_token_id)
    embeddings = drafter.bind(target)
    positions = 6 + torch.arange(config.block_size)[None]
    hidden_states = drafter(block_ids, positions, context_features=features).last_hidden_state
    return drafter.base_logits(hidden_states, embeddings)


# ---------------------------------------------------------------------- round trips

KINDS = {
    "as it is": {},
    "rnn head": {"markov_head_type": "rnn"},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "Gemma 4 layers": {"v_norm": True, "sandwich_norms": True, "layer_scalar": True, "attention_k_eq_v": True},
    "own embeddings": {"has_embed_tokens": True, "has_lm_head": True},
}


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_saving_and_loading_changes_nothing(fields, tmp_path: Path):
    drafter = tiny.random_drafter(tiny.qwen3(), **fields)
    drafter.save_pretrained(tmp_path / "first")
    again = DSparkDrafter.from_pretrained(tmp_path / "first")
    assert_same_tensors(drafter, again)
    assert not again.training
    again.save_pretrained(tmp_path / "second")
    files = {file.name for file in (tmp_path / "first").iterdir()}
    assert files == {"config.json", "generation_config.json", "model.safetensors"}
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name


def test_the_auto_classes_find_it(saved: Path):
    assert isinstance(AutoConfig.from_pretrained(saved), DSparkConfig)
    drafter = AutoModel.from_pretrained(saved)
    assert isinstance(drafter, DSparkDrafter)
    assert_same_tensors(drafter, DSparkDrafter.from_pretrained(saved))


def test_a_sharded_checkpoint_is_read(tmp_path: Path):
    drafter = tiny.random_drafter(tiny.qwen3())
    drafter.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert_same_tensors(drafter, DSparkDrafter.from_pretrained(tmp_path))


def test_a_missing_shard_is_named(tmp_path: Path):
    tiny.random_drafter(tiny.qwen3()).save_pretrained(tmp_path, max_shard_size="30KB")
    shard = min(tmp_path.glob("*.safetensors"))
    shard.unlink()
    with pytest.raises(OSError, match=shard.name):
        DSparkDrafter.from_pretrained(tmp_path)


def test_generation_settings_are_kept(tmp_path: Path):
    drafter = tiny.random_drafter(tiny.qwen3())
    assert drafter.generation_config.num_assistant_tokens == tiny.BLOCK_SIZE
    assert drafter.generation_config.assistant_confidence_threshold == 0.0
    drafter.generation_config.num_assistant_tokens = 2
    drafter.generation_config.assistant_confidence_threshold = 0.5
    drafter.save_pretrained(tmp_path)
    again = DSparkDrafter.from_pretrained(tmp_path).generation_config
    assert (again.num_assistant_tokens, again.assistant_confidence_threshold) == (2, 0.5)


def test_the_configuration_names_no_folder_of_the_machine(saved: Path):
    DSparkDrafter.from_pretrained(saved).save_pretrained(saved)
    assert str(saved) not in (saved / "config.json").read_text()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_dtype_asked_for_is_the_one_loaded_and_saved(saved: Path, tmp_path: Path, dtype: torch.dtype):
    drafter = DSparkDrafter.from_pretrained(saved, dtype=dtype)
    assert {tensor.dtype for tensor in drafter.parameters()} == {dtype}
    drafter.save_pretrained(tmp_path / "again")
    assert {tensor.dtype for tensor in load_file(tmp_path / "again" / "model.safetensors").values()} == {dtype}
    assert DSparkDrafter.from_pretrained(tmp_path / "again", dtype="auto").dtype == dtype


def test_rotary_frequencies_are_not_rounded_with_the_weights(saved: Path):
    full = DSparkDrafter.from_pretrained(saved).rotary_emb.inv_freq
    loaded = DSparkDrafter.from_pretrained(saved, dtype=torch.bfloat16).rotary_emb.inv_freq
    torch.testing.assert_close(loaded, full)  # Both are float32.


# ---------------------------------------------------------------------- embeddings


def test_borrowed_embeddings_are_not_saved(tmp_path: Path):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    drafter.bind(target)
    drafter.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert names == drafter.state_dict().keys()
    assert not {"embed_tokens.weight", "lm_head.weight"} & names


@pytest.mark.parametrize("build", [tiny.qwen3, tiny.gemma3], ids=["qwen3", "scaled embeddings"])
@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 20}], ids=["full vocabulary", "reduced vocabulary"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied target", "tied target"])
def test_included_embeddings_make_the_file_usable_without_the_target(build, fields, tied: bool, tmp_path: Path):
    target = build(tie_word_embeddings=tied)
    drafter = tiny.random_drafter(target, **fields)
    if drafter.draft_token_ids is not None:
        drafter.draft_token_ids.copy_(torch.arange(20) * 3)
    expected = block_logits(drafter, target)
    drafter.save_pretrained(tmp_path, include_embeddings=True)
    again = DSparkDrafter.from_pretrained(tmp_path)
    assert (again.config.has_embed_tokens, again.config.has_lm_head) == (True, True)
    torch.testing.assert_close(block_logits(again), expected)
    torch.testing.assert_close(block_logits(again, target), expected)
    # The drafter itself goes on borrowing.
    assert drafter.embed_tokens is None
    assert not drafter.config.has_embed_tokens
    assert drafter.bind().lm_head is target.get_output_embeddings()


def test_embeddings_to_include_must_come_from_somewhere(tmp_path: Path):
    with pytest.raises(ValueError, match=r"drafter\.bind\(target\)"):
        tiny.random_drafter(tiny.qwen3()).save_pretrained(tmp_path, include_embeddings=True)


def test_the_checkpoints_own_head_counts_even_where_the_targets_differs(deepspec: Path):
    target = tiny.qwen3(vocab_size=211, hidden_size=64, num_hidden_layers=6)
    drafter = DSparkDrafter.from_pretrained(deepspec)
    assert drafter.bind(target).lm_head is drafter.lm_head
    borrower = DSparkDrafter.from_pretrained(deepspec, borrow_embeddings=True)
    assert borrower.bind(target).lm_head is target.lm_head
    assert not torch.allclose(block_logits(drafter, target), block_logits(borrower, target), rtol=1e-2, atol=1e-2)


# ---------------------------------------------------------------------- what does not fit is not loaded


@pytest.mark.parametrize("folder", ["deepspec", "saved"])
def test_one_error_lists_every_tensor_that_does_not_fit(folder: str, request: pytest.FixtureRequest):
    path = request.getfixturevalue(folder)

    def change(tensors):
        del tensors["fc.weight"], tensors["norm.weight"]
        tensors["surprise.weight"] = torch.zeros(2)
        tensors["markov_head.markov_w1.weight"] = tensors["markov_head.markov_w1.weight"][:-1].clone()

    change_tensors(path, change)
    with pytest.raises(ValueError, match="do not fit its configuration, so it was not loaded") as raised:
        DSparkDrafter.from_pretrained(path)
    listed = [line.removeprefix("- ").split(" [")[0].split(" is")[0] for line in str(raised.value).splitlines()[1:]]
    assert listed == [
        "missing: fc.weight",
        "missing: norm.weight",
        "unexpected: surprise.weight",
        "wrong shape: markov_head.markov_w1.weight",
    ]


@pytest.mark.parametrize(
    "gone", ["markov_head.", "markov_head.markov_w2", "confidence_head.", "confidence_head.proj.bias"]
)
def test_a_lost_head_is_not_loaded_as_another_kind_of_drafter(deepspec: Path, gone: str):
    change_tensors(deepspec, lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(gone)])
    with pytest.raises(ValueError, match=f"missing: {gone}"):
        DSparkDrafter.from_pretrained(deepspec)


@pytest.mark.parametrize(
    "fields", [{"markov_rank": 0, "confidence_head_with_markov": False}, {"enable_confidence_head": False}]
)
def test_a_head_the_configuration_does_not_name_is_not_dropped(deepspec: Path, fields):
    change_config(deepspec, **fields)
    with pytest.raises(ValueError, match="unexpected: "):
        DSparkDrafter.from_pretrained(deepspec)


def test_another_configuration_can_be_given_and_is_checked_too(saved: Path):
    config = DSparkConfig.from_pretrained(saved)
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    with pytest.raises(ValueError, match=r"missing: layers\.2\.input_layernorm\.weight"):
        DSparkDrafter.from_pretrained(saved, config=config)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickle_files_are_not_opened(saved: Path, name: str):
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle file was opened",))

    (saved / "model.safetensors").unlink()
    torch.save(Bomb(), saved / name)
    with pytest.raises(OSError, match="Only safetensors files are read"):
        DSparkDrafter.from_pretrained(saved)


@pytest.mark.parametrize("size", [0, 5, 4000], ids=["empty", "no header", "cut short"])
def test_a_damaged_file_is_named(saved: Path, size: int):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(OSError, match=r"model\.safetensors is not a readable safetensors file"):
        DSparkDrafter.from_pretrained(saved)


def test_a_folder_without_anything_is_refused(tmp_path: Path):
    with pytest.raises(OSError, match=r"config\.json"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(OSError, match="nowhere"):
        DSparkDrafter.from_pretrained(tmp_path / "nowhere")


def test_a_model_that_is_not_a_drafter_is_refused(tmp_path: Path):
    tiny.qwen3().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"is a language model \(Qwen3ForCausalLM\), not a drafter: use it as the target"
    ):
        DSparkDrafter.from_pretrained(tmp_path)
    change_config(tmp_path, architectures=["Qwen3Model"])
    with pytest.raises(
        ValueError, match=r"not a drafter in a known format: its model_type is 'qwen3'.*Qwen3Model.*DeepSpec"
    ):
        DSparkDrafter.from_pretrained(tmp_path)


# ---------------------------------------------------------------------- DeepSpec's own checkpoints

INHERITED = {
    "partial rotation": {"partial_rotary_factor": 0.25},
    "partial rotation, nested": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    },
    "multimodal positions": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
            "mrope_interleaved": True,
        }
    },
    "rotation by layer type": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 123.0},
        }
    },
    "rotation in the old spelling": {"rope_parameters": None, "rope_theta": 10_000.0, "rope_scaling": None},
    "tied embeddings": {"tie_word_embeddings": True},
    "windows": {"use_sliding_window": False, "max_window_layers": 1},
    "mixture of experts": {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]},
}


@pytest.mark.parametrize("fields", INHERITED.values(), ids=INHERITED)
def test_what_a_configuration_inherited_from_the_target_changes_nothing(deepspec: Path, fields):
    expected = block_logits(DSparkDrafter.from_pretrained(deepspec))
    change_config(deepspec, **fields)
    drafter = DSparkDrafter.from_pretrained(deepspec)
    torch.testing.assert_close(block_logits(drafter), expected)
    assert not torch.equal(drafter.embed_tokens.weight, drafter.lm_head.weight)


def test_the_rotary_base_is_read_from_both_spellings(deepspec: Path):
    change_config(deepspec, rope_parameters=None, rope_theta=777.0)
    assert DSparkDrafter.from_pretrained(deepspec).config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": 777.0,
    }
    scaling = {"type": "linear", "factor": 2.0}
    change_config(deepspec, rope_parameters=None, rope_theta=777.0, rope_scaling=scaling)
    assert DSparkDrafter.from_pretrained(deepspec).config.rope_parameters == {
        "rope_type": "linear",
        "rope_theta": 777.0,
        "factor": 2.0,
    }


def test_a_deepspec_checkpoint_is_kept_whole_in_our_format(deepspec: Path, tmp_path: Path):
    drafter = DSparkDrafter.from_pretrained(deepspec)
    drafter.save_pretrained(tmp_path / "ours")
    again = DSparkDrafter.from_pretrained(tmp_path / "ours")
    assert_same_tensors(drafter, again)
    assert json.loads((tmp_path / "ours" / "config.json").read_text())["model_type"] == "dspark"
    torch.testing.assert_close(block_logits(drafter), block_logits(again))


def test_embeddings_left_out_of_a_deepspec_checkpoint_are_borrowed(deepspec: Path):
    change_tensors(deepspec, lambda tensors: [tensors.pop(name) for name in ("embed_tokens.weight", "lm_head.weight")])
    drafter = DSparkDrafter.from_pretrained(deepspec)
    assert (drafter.config.has_embed_tokens, drafter.config.has_lm_head) == (False, False)
    target = tiny.qwen3(vocab_size=211, hidden_size=64, num_hidden_layers=6)
    assert drafter.bind(target).embed_tokens is target.get_input_embeddings()


def test_auto_model_does_not_take_a_deepspec_checkpoint_for_a_qwen3(deepspec: Path):
    """`AutoModel` goes by the model type, which these files borrow from their target; so it is not the way to load them."""
    assert AutoConfig.from_pretrained(deepspec).model_type == "qwen3"
