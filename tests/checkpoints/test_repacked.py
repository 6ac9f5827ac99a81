"""Packed weights: every packing against numbers worked out by hand, and every way in which its parts may not fit."""

import json

import pytest
import spellings
import torch
from safetensors.torch import load_file, save_file

import tiny
from dspark_hf import Drafter
from dspark_hf.checkpoints import inspect_checkpoint
from dspark_hf.checkpoints.repacked import FP4_VALUES

pytestmark = pytest.mark.integration

NAME = "layers.0.mlp.up_proj"


@pytest.fixture
def folder(tmp_path):
    drafter = tiny.random_drafter(tiny.qwen3())
    folder = spellings.specforge(drafter, tmp_path / "files")
    change(folder, lambda tensors: None, torch_dtype="float32")
    return folder


def change(folder, edit, **fields):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config.pop("dtype", None)
    (folder / "config.json").write_text(json.dumps(config | fields))


def fp8(weight, scale):
    """Values that FP8 holds, and what they stand for."""
    stored = weight.clamp(-400, 400).to(torch.float8_e4m3fn)
    return stored, stored.float() * scale


def fp4_codes(shape, seed=0):
    return torch.randint(0, 16, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def pack_fp4(codes):
    """Two codes in a byte, the first in the low bits."""
    return codes[:, 0::2] | codes[:, 1::2] << 4


def set_packed(folder, parts, **fields):
    def edit(tensors):
        tensors.pop(f"{NAME}.weight")
        for ending, tensor in parts.items():
            tensors[f"{NAME}.{ending}"] = tensor

    change(folder, edit, **fields)


def loaded_weight(folder):
    return Drafter.from_pretrained(folder).state_dict()[f"{NAME}.weight"]


SHAPE = (64, 32)  # up_proj of the tiny drafter


# ------------------------------------------------------------------ packings


@pytest.mark.parametrize(
    ("scale_shape", "blocks"),
    [((), None), ((1,), None), ((64, 1), (1, 32)), ((4, 2), (16, 16)), ((64, 2), (1, 16))],
    ids=["per tensor, a scalar", "per tensor", "per channel", "by blocks", "by groups of a row"],
)
@pytest.mark.parametrize("ending", ["weight_scale", "weight_scale_inv"])
def test_fp8(folder, scale_shape, blocks, ending):
    scale = torch.rand(scale_shape) + 0.5
    stored = (torch.randn(SHAPE) * 10).to(torch.float8_e4m3fn)
    wanted = stored.float().clone()
    for row in range(64):
        for column in range(32):
            factor = scale.flatten()[0] if blocks is None else scale[row // blocks[0], column // blocks[1]]
            wanted[row, column] *= factor
    set_packed(folder, {"weight": stored, ending: scale, "input_scale": torch.tensor(0.1)})
    assert torch.equal(loaded_weight(folder), wanted)


@pytest.mark.parametrize("packing", ["modelopt", "compressed-tensors"])
def test_nvfp4(folder, packing):
    codes, scale = fp4_codes(SHAPE), (torch.rand(64, 2) + 0.5).to(torch.float8_e4m3fn)
    overall = torch.tensor([0.25])
    factor = overall if packing == "modelopt" else 1 / overall
    wanted = torch.tensor(FP4_VALUES)[codes.int()] * (scale.float() * factor).repeat_interleave(16, 1)
    parts = {
        "modelopt": {"weight": pack_fp4(codes), "weight_scale": scale, "weight_scale_2": overall},
        "compressed-tensors": {"weight_packed": pack_fp4(codes), "weight_scale": scale, "weight_global_scale": overall},
    }
    set_packed(folder, parts[packing])
    assert torch.equal(loaded_weight(folder), wanted)


def test_int4(folder):
    """compressed-tensors' pack-quantized: eight codes in a word, each its value plus 8."""
    values = torch.randint(-8, 8, SHAPE, generator=torch.Generator().manual_seed(1))
    words = sum((values[:, i::8] + 8) << 4 * i for i in range(8)).to(torch.int64)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    scale = torch.rand(64, 2) + 0.5
    set_packed(folder, {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(SHAPE)})
    assert torch.equal(loaded_weight(folder), values.float() * scale.repeat_interleave(16, 1))


def test_the_values_of_fp4_are_those_of_the_format():
    """One sign bit, two of exponent, one of mantissa: e2m1."""
    for code, value in enumerate(FP4_VALUES):
        sign, exponent, mantissa = (-1) ** (code >> 3), code >> 1 & 3, code & 1
        magnitude = mantissa / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + mantissa / 2)
        assert value == sign * magnitude


def test_unpacked_weights_are_of_the_type_that_the_file_names(folder):
    stored, _ = fp8(torch.randn(SHAPE), 1.0)
    set_packed(folder, {"weight": stored, "weight_scale": torch.tensor(2.0)}, torch_dtype="bfloat16")
    found = inspect_checkpoint(folder)
    assert found.dtypes["BF16"] == 1
    assert loaded_weight(folder).dtype in (torch.bfloat16, torch.float32)


def test_a_packed_drafter_drafts_and_is_saved_unpacked(folder, tmp_path):
    target = tiny.qwen3()
    stored, _ = fp8(torch.randn(SHAPE), 1.0)
    set_packed(
        folder, {"weight": stored, "weight_scale": torch.ones(64, 1)}, quantization_config={"quant_method": "fp8"}
    )
    drafter = Drafter.from_pretrained(folder).eval()
    inputs, settings = tiny.prompt(), {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=drafter), plain)
    drafter.save_pretrained(tmp_path / "saved")
    again = Drafter.from_pretrained(tmp_path / "saved")
    assert torch.equal(again.state_dict()[f"{NAME}.weight"], drafter.state_dict()[f"{NAME}.weight"])
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_fused_projections_are_split(folder):
    tensors = load_file(folder / "model.safetensors")
    parts = ("q_proj", "k_proj", "v_proj")
    wanted = {name: tensors[f"layers.0.self_attn.{name}.weight"] for name in parts}
    wanted |= {name: tensors[f"layers.0.mlp.{name}.weight"] for name in ("gate_proj", "up_proj")}

    def edit(tensors):
        tensors["layers.0.self_attn.qkv_proj.weight"] = torch.cat(
            [tensors.pop(f"layers.0.self_attn.{name}.weight") for name in parts]
        )
        tensors["layers.0.mlp.gate_up_proj.weight"] = torch.cat(
            [tensors.pop(f"layers.0.mlp.{name}.weight") for name in ("gate_proj", "up_proj")]
        )

    change(folder, edit)
    state = Drafter.from_pretrained(folder).state_dict()
    for name, tensor in wanted.items():
        part = "self_attn" if name in parts else "mlp"
        assert torch.equal(state[f"layers.0.{part}.{name}.weight"], tensor), name


def test_a_fused_projection_may_be_packed(folder):
    tensors = load_file(folder / "model.safetensors")
    both = torch.cat([tensors[f"layers.0.mlp.{name}.weight"] for name in ("gate_proj", "up_proj")])
    stored, meant = fp8(both, 0.5)

    def edit(tensors):
        for name in ("gate_proj", "up_proj"):
            del tensors[f"layers.0.mlp.{name}.weight"]
        tensors["layers.0.mlp.gate_up_proj.weight"] = stored
        tensors["layers.0.mlp.gate_up_proj.weight_scale"] = torch.tensor(0.5)

    change(folder, edit)
    assert torch.equal(loaded_weight(folder), meant[64:])


def test_norms_that_are_stored_as_their_distance_from_1(folder):
    """`use_gemma_norm`: the norms scale by 1 + weight."""
    tensors = load_file(folder / "model.safetensors")
    change(folder, lambda t: None, use_gemma_norm=True)
    state = Drafter.from_pretrained(folder).state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name], tensor + 1 if name.endswith("norm.weight") else tensor), name


def test_qwen35_layers(tmp_path):
    """stanleyphoong/Ornith-1.0-9B-DSpark: gated queries, norms of 1 + weight, and a rotation of a quarter of the head."""
    target = tiny.qwen3()
    made = tiny.random_drafter(target, attention_gate="query")
    folder = spellings.deepspec(made, tmp_path) if made.bind(target) else None
    native = {"architectures": ["Qwen35DSparkModel"], "model_type": "qwen3_5", "enable_qwen35_gated_q_proj": True}

    def edit(tensors):
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name] -= 1

    change(folder, edit, **native)
    loaded = Drafter.from_pretrained(folder).eval()
    assert loaded.config.attention_gate == "query"
    assert loaded.config.rope_parameters["partial_rotary_factor"] == 0.5
    for name, tensor in made.state_dict().items():
        assert torch.allclose(loaded.state_dict()[name], tensor), name
    inputs, settings = tiny.prompt(), {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=loaded), plain)


# ------------------------------------------------------------------ malformed


def packed_fp8(**changed):
    parts = {"weight": torch.zeros(SHAPE).to(torch.float8_e4m3fn), "weight_scale": torch.ones(64, 1)}
    return {name: tensor for name, tensor in (parts | changed).items() if tensor is not None}


def packed_fp4(**changed):
    parts = {
        "weight": torch.zeros(64, 16, dtype=torch.uint8),
        "weight_scale": torch.ones(64, 2).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.ones(()),
    }
    return {name: tensor for name, tensor in (parts | changed).items() if tensor is not None}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (packed_fp4(weight_scale_2=None), "packed FP4, but weight_scale_2"),
        (packed_fp4(weight_scale=None), "weight_scale is missing"),
        (packed_fp4(weight=None), "it has weight_scale, weight_scale_2, but no weight"),
        (packed_fp4(weight=torch.zeros(64, 15, dtype=torch.uint8)), "30 FP4 numbers, not a multiple of 16"),
        (
            packed_fp4(weight_scale=torch.ones(64, 4)),
            r"weight_scale is \[64, 4\]; packed FP4 \[64, 16\] needs \[64, 2\]",
        ),
        (packed_fp4(weight_scale_2=torch.ones(2)), r"weight_scale_2 is \[2\], not one number"),
        (packed_fp8(weight=None), "it has weight_scale, but no weight"),
        (packed_fp8(weight=torch.zeros(SHAPE)), "it has scales although its weight is F32"),
        (packed_fp8(weight_scale=torch.ones(64)), r"weight_scale is \[64\], which does not fit a weight \[64, 32\]"),
        (
            packed_fp8(weight_scale=torch.ones(63, 1)),
            r"\[63, 1\], which does not divide a weight \[64, 32\] into blocks",
        ),
        (packed_fp8(weight=torch.zeros(SHAPE, dtype=torch.int8)), "weight is I8, which is not a packing"),
        (
            {"weight_packed": torch.zeros(64, 4, dtype=torch.int32), "weight_scale": torch.ones(64, 5)},
            r"\[64, 5\], which does not divide a weight \[64, 32\] into groups",
        ),
        (packed_fp8(weight=torch.zeros(60, 32).to(torch.float8_e4m3fn), weight_scale=torch.ones(60, 1)), "wrong shape"),
    ],
)
def test_packed_weights_that_do_not_fit(folder, parts, message):
    set_packed(folder, parts)
    with pytest.raises(ValueError, match=message):
        Drafter.from_pretrained(folder)


def test_all_that_does_not_fit_is_in_one_message(folder):
    def edit(tensors):
        for name in ("up_proj", "gate_proj"):
            tensors[f"layers.0.mlp.{name}.weight"] = torch.zeros(SHAPE).to(torch.float8_e4m3fn)
        tensors["layers.0.mlp.down_proj.weight_scale"] = torch.ones(1)

    change(folder, edit)
    with pytest.raises(ValueError, match=r"damaged or incomplete") as refused:
        Drafter.from_pretrained(folder)
    assert all(name in str(refused.value) for name in ("up_proj", "gate_proj", "down_proj"))


def test_a_quantized_configuration_over_plain_weights_is_copied_from_the_target(folder):
    change(folder, lambda tensors: None, quantization_config={"quant_method": "fp8"})
    assert Drafter.from_pretrained(folder).config.to_dict().get("quantization_config") is None
