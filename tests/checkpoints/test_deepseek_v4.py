"""The drafter in DeepSeek-V4's checkpoints: found, unpacked, and nothing else read."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_deepseek_v4 as v4
import torch
from hub_server import Hub
from safetensors.torch import load_file, save_file

import tiny
from dspark_hf import DeepseekV4Drafter, Drafter, DSparkDrafter, Eagle3Drafter
from dspark_hf.checkpoints import export, inspect_checkpoint
from dspark_hf.checkpoints.deepseek_v4 import unpack_fp4, unpack_fp8
from dspark_hf.loading import check_is_target

MAPS = {"wq_a": "q_a_proj", "wq_b": "q_b_proj", "wkv": "kv_proj", "wo_a": "o_a_proj", "wo_b": "o_b_proj"}


def assert_is(drafter: Drafter, tensors: v4.Tensors) -> None:
    """Every number of the drafter is the one that is stored, exactly."""
    state, known = drafter.state_dict(), 0
    for stage in range(3):
        for theirs, ours in MAPS.items():
            weight = v4.unpacked(tensors, f"mtp.{stage}.attn.{theirs}.weight")
            assert torch.equal(state[f"layers.{stage}.self_attn.{ours}.weight"].double(), weight)
        for expert in range(v4.NUM_EXPERTS):
            w1, w2, w3 = (v4.unpacked(tensors, f"mtp.{stage}.ffn.experts.{expert}.w{i}.weight") for i in (1, 2, 3))
            experts = f"layers.{stage}.mlp.experts"
            assert torch.equal(state[f"{experts}.gate_up_proj"][expert].double(), torch.cat([w1, w3]))
            assert torch.equal(state[f"{experts}.down_proj"][expert].double(), w2)
        for theirs, ours in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
            weight = v4.unpacked(tensors, f"mtp.{stage}.ffn.shared_experts.{theirs}.weight")
            assert torch.equal(state[f"layers.{stage}.mlp.shared_experts.{ours}.weight"].double(), weight)
        for part in ("attn", "ffn"):
            for name in ("fn", "base", "scale"):
                stored = tensors[f"mtp.{stage}.hc_{part}_{name}"]
                assert torch.equal(state[f"layers.{stage}.{part}_hc.{name}"], stored.to(torch.float32))
        known += 5 + 2 + 3 + 6
    assert torch.equal(state["fc.weight"].double(), v4.unpacked(tensors, "mtp.0.main_proj.weight"))
    assert torch.equal(state["hc_head.fn"], tensors["mtp.2.hc_head_fn"])
    assert torch.equal(
        state["confidence_head.proj.weight"].float(), tensors["mtp.2.confidence_head.proj.weight"].float()
    )
    assert len(state) == known + 3 * 7 + 2 + 1 + 3 + 2 + 1


# ---------------------------------------------------------------------- numbers


def test_every_fp4_code_and_every_scale():
    packed = torch.arange(256).to(torch.uint8).view(torch.int8).expand(3, -1)
    scales = torch.tensor([1, 127, 200]).to(torch.uint8)[:, None].repeat(1, 16).view(torch.float8_e8m0fnu)
    tensors = {"x.weight": packed, "x.scale": scales}
    assert torch.equal(unpack_fp4(packed, scales).double(), v4.unpacked(tensors, "x.weight"))


def test_every_fp8_number_in_blocks_that_are_cut_short():
    codes = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)
    weight = codes[~codes.float().isnan()].repeat(130, 1)  # [130, 254]
    scales = torch.tensor([[120, 127], [130, 110]]).to(torch.uint8).view(torch.float8_e8m0fnu)
    tensors = {"x.weight": weight, "x.scale": scales}
    assert torch.equal(unpack_fp8(weight, scales).double(), v4.unpacked(tensors, "x.weight"))


def test_the_layouts_of_the_reference(shared):
    folder = shared / "parity" / "v4_deepseek"
    stored, expected = (load_file(folder / f"quantized_layout{end}.safetensors") for end in ("", "_expected"))
    for name, unpack in (("mtp.0.attn.wq_a", unpack_fp8), ("mtp.0.ffn.experts.0.w1", unpack_fp4)):
        found = unpack(stored[f"{name}.weight"], stored[f"{name}.scale"])
        assert torch.equal(found.float(), expected[f"{name}.weight"])


# ---------------------------------------------------------------------- loading


@pytest.mark.parametrize("shards", [0, 3], ids=["one file", "shards"])
@pytest.mark.parametrize("loader", [Drafter, DSparkDrafter, DeepseekV4Drafter])
def test_it_is_found_in_the_target(loader: type[Drafter], shards: int, tmp_path: Path):
    tensors = v4.stored_tensors()
    drafter = loader.from_pretrained(v4.write(tmp_path, tensors, shards))
    assert type(drafter) is DeepseekV4Drafter and drafter.dtype == torch.bfloat16
    assert_is(drafter, tensors)
    config = drafter.config
    assert (config.block_size, config.mask_token_id, config.num_hidden_layers) == (5, tiny.MASK_ID, 3)
    assert (config.target_layer_ids, config.num_target_layers, config.markov_rank) == ([1, 2, 3], 4, v4.RANK)
    assert config.target_name_or_path == str(tmp_path) and config.gives_confidence
    assert config.name_or_path == drafter.name_or_path == ""  # The files there are about the target.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, "auto"])
def test_a_dtype(dtype, tmp_path: Path):
    tensors = v4.stored_tensors()
    drafter = Drafter.from_pretrained(v4.write(tmp_path, tensors), dtype=dtype)
    assert drafter.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    assert_is(drafter, tensors)
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    assert drafter.layers[0].attn_hc.fn.dtype == drafter.layers[0].self_attn.sinks.dtype == kept


def test_a_device_map(tmp_path: Path):
    tensors = v4.stored_tensors()
    drafter = Drafter.from_pretrained(v4.write(tmp_path, tensors), device_map={"": "cpu"})
    assert_is(drafter, tensors)


def test_one_tensor_is_unpacked_at_a_time(tmp_path: Path, monkeypatch):
    """Beside the drafter there is never more than one of its tensors, in bfloat16, and of that one expert's part."""
    from dspark_hf.checkpoints import deepseek_v4

    open_now, most, sizes = [], [], []
    unpack, stored = deepseek_v4.EmbeddedDrafter._unpack, deepseek_v4.EmbeddedDrafter.stored_tensor

    def counted(self, name):
        open_now.append(name)
        most.append(len(open_now))
        tensor = unpack(self, name)
        open_now.pop()
        return tensor

    def measured(self, name):
        tensor = stored(self, name)
        sizes.append(tensor.numel())
        return tensor

    monkeypatch.setattr(deepseek_v4.EmbeddedDrafter, "_unpack", counted)
    monkeypatch.setattr(deepseek_v4.EmbeddedDrafter, "stored_tensor", measured)
    source = deepseek_v4.open_tensors(tmp_path, v4.CONFIG, _infos(v4.write(tmp_path)))
    read = source.read(source.tensors)
    assert not most  # Nothing before it is asked for.
    assert read["layers.0.mlp.experts.gate_up_proj"][...].shape == (v4.NUM_EXPERTS, 2 * v4.WIDTH, v4.HIDDEN_SIZE)
    assert max(sizes) == v4.WIDTH * v4.HIDDEN_SIZE
    Drafter.from_pretrained(tmp_path)
    assert max(most) == 1 and len(most) == len(source.tensors) + 1


def _infos(folder: Path):
    from dspark_hf.checkpoints.files import read_tensor_index

    return {name: info for name, info in read_tensor_index(folder, None, {}).items() if name.startswith("mtp.")}


def test_it_is_saved_and_loaded_again(tmp_path: Path):
    drafter = Drafter.from_pretrained(v4.write(tmp_path / "target"))
    drafter.save_pretrained(tmp_path / "own")
    again = Drafter.from_pretrained(tmp_path / "own")
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, tensor in drafter.state_dict().items():
        other = again.state_dict()[name]
        assert other.dtype == tensor.dtype and torch.equal(other, tensor), name
    ours, theirs = drafter.config.to_dict(), again.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        ours.pop(name, None), theirs.pop(name, None)
    assert ours == theirs


def test_the_target_stays_a_target(tmp_path: Path):
    check_is_target(str(v4.write(tmp_path)))


def test_without_a_drafter_it_is_a_language_model(tmp_path: Path):
    v4.write(tmp_path, {})
    with pytest.raises(ValueError, match=r"is a language model \(DeepseekV4ForCausalLM\), not a drafter"):
        Drafter.from_pretrained(tmp_path)


def test_another_kind_refuses_it(tmp_path: Path):
    with pytest.raises(ValueError, match="DeepseekV4Drafter, not Eagle3Drafter"):
        Eagle3Drafter.from_pretrained(v4.write(tmp_path))


def test_inspection(tmp_path: Path):
    found = inspect_checkpoint(v4.write(tmp_path, shards=3))
    assert (found.format, found.refusal) == ("DeepSeek-V4", None)
    text = str(found)
    for part in ("3 (DeepSeek-V4), hidden size 64 in 4 streams", "6 experts of 32 with 2 for each token", "mask token"):
        assert part in text
    assert not found.oddities
    drafter = Drafter.from_pretrained(tmp_path)
    assert found.num_parameters == sum(tensor.numel() for tensor in drafter.state_dict().values())
    json.dumps(found.to_dict())


# ---------------------------------------------------------------------- the Hub


def test_only_the_shards_that_hold_it_are_fetched(hub: Hub, tmp_path: Path):
    tensors = v4.stored_tensors()
    hub.publish("deepseek/v4", v4.write(tmp_path / "files", tensors, shards=3, target_shards=4))
    drafter = Drafter.from_pretrained("deepseek/v4", cache_dir=tmp_path / "cache")
    assert_is(drafter, tensors)
    wanted = {f"model-{i:05d}-of-00007.safetensors" for i in (5, 6, 7)}
    named = {found[0] for request in hub.requests if (found := re.search(r"model-[^/]*\.safetensors$", request))}
    assert named == wanted
    assert {name for name in hub.sent if name.endswith(".safetensors")} == wanted
    assert drafter.config.target_name_or_path == "deepseek/v4"


def test_inspection_fetches_the_headers_of_these_shards(hub: Hub, tmp_path: Path):
    folder = v4.write(tmp_path / "files", shards=3, target_shards=4)
    hub.publish("deepseek/v4", folder)
    found = inspect_checkpoint("deepseek/v4", cache_dir=tmp_path / "cache")
    assert found.config.num_hidden_layers == 3
    named = {found[0] for request in hub.requests if (found := re.search(r"model-[^/]*\.safetensors$", request))}
    assert named == {f"model-{i:05d}-of-00007.safetensors" for i in (5, 6, 7)}


# ---------------------------------------------------------------------- files that are not right

Change = Callable[[v4.Tensors], None]


def without(*names: str) -> Change:
    return lambda tensors: [tensors.pop(name) for name in names] and None


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.update({name: change(tensors[name])})


def renamed(old: str, new: str) -> Change:
    return lambda tensors: tensors.update({new: tensors.pop(old)})


def stage_renamed(old: int, new: int) -> Change:
    def change(tensors: v4.Tensors) -> None:
        for name in [n for n in tensors if n.startswith(f"mtp.{old}.")]:
            tensors[name.replace(f"mtp.{old}.", f"mtp.{new}.")] = tensors.pop(name)

    return change


def stage_gone(stage: int) -> Change:
    return lambda tensors: [tensors.pop(name) for name in list(tensors) if name.startswith(f"mtp.{stage}.")] and None


MALFORMED: dict[str, tuple[Change | None, dict, str]] = {
    "no scales of an FP8 weight": (
        without("mtp.1.attn.wq_a.scale"),
        {},
        r"missing: the scales of mtp\.1\.attn\.wq_a\.weight, which is F8_E4M3",
    ),
    "no scales of an FP4 weight": (
        without("mtp.0.ffn.experts.3.w2.scale"),
        {},
        r"missing: the scales of mtp\.0\.ffn\.experts\.3\.w2\.weight, which is I8",
    ),
    "too few FP8 blocks": (
        replaced("mtp.0.main_proj.scale", lambda t: t[:, :1].contiguous()),
        {},
        r"wrong shape: mtp\.0\.main_proj\.scale is \[1, 1\], .* \[64, 192\] \(F8_E4M3\) needs \[1, 2\]",
    ),
    "a scale per channel under the block's name": (
        replaced("mtp.0.attn.wkv.scale", lambda t: t.repeat(16, 1)),
        {},
        r"wrong shape: mtp\.0\.attn\.wkv\.scale is \[16, 1\]",
    ),
    "too few FP4 blocks": (
        replaced("mtp.0.ffn.experts.0.w1.scale", lambda t: t[:, :1].contiguous()),
        {},
        r"wrong shape: mtp\.0\.ffn\.experts\.0\.w1\.scale is \[32, 1\], .* \(I8\) needs \[32, 2\]",
    ),
    "FP4 of odd width": (
        replaced("mtp.0.ffn.experts.0.w1.weight", lambda t: t[:, :25].contiguous()),
        {},
        r"wrong width: mtp\.0\.ffn\.experts\.0\.w1\.weight holds 50 FP4 numbers in a row, not a multiple of 32",
    ),
    "scales in float32": (
        replaced("mtp.2.attn.wo_b.scale", lambda t: t.float()),
        {},
        r"wrong type: mtp\.2\.attn\.wo_b\.scale is F32; scales are F8_E8M0",
    ),
    "scales of a weight that is not quantized": (
        replaced("mtp.2.attn.wo_b.weight", lambda t: t.to(torch.bfloat16)),
        {},
        r"mtp\.2\.attn\.wo_b\.scale scales mtp\.2\.attn\.wo_b\.weight, which is BF16 and needs no scale",
    ),
    "scales of nothing": (
        renamed("mtp.2.attn.wo_b.weight", "mtp.2.attn.wo_c.weight"),
        {},
        r"no weight belongs to mtp\.2\.attn\.wo_b\.scale",
    ),
    "another FP8": (
        replaced("mtp.1.attn.wkv.weight", lambda t: t.float().to(torch.float8_e5m2)),
        {},
        r"wrong type: mtp\.1\.attn\.wkv\.weight is F8_E5M2",
    ),
    "integers": (
        replaced("mtp.1.attn.kv_norm.weight", lambda t: t.int()),
        {},
        r"wrong type: mtp\.1\.attn\.kv_norm\.weight is I32 \[16\]",
    ),
    "the middle stage is missing": (stage_gone(1), {}, r"missing: all of stage mtp\.1"),
    "the first stage is missing": (stage_gone(0), {}, r"missing: all of stage mtp\.0"),
    "the last stage is missing": (stage_gone(2), {}, r"missing: mtp\.1\.confidence_head\.proj\.weight"),
    "stages in another order": (
        lambda tensors: (
            [change(tensors) for change in (stage_renamed(0, 9), stage_renamed(2, 0), stage_renamed(9, 2))] and None
        ),
        {},
        r"unexpected: mtp\.0\.confidence_head\.proj\.weight \[1, 72\], which belongs to stage 2",
    ),
    "an expert is missing": (
        without("mtp.1.ffn.experts.5.w3.weight", "mtp.1.ffn.experts.5.w3.scale"),
        {},
        r"missing: mtp\.1\.ffn\.experts\.5\.w3\.weight",
    ),
    "an expert too many": (
        None,
        {"n_routed_experts": 5},
        r"unexpected: mtp\.0\.ffn\.experts\.5\.w1\.weight \[32, 32\]",
    ),
    "a tensor that nobody knows": (
        lambda tensors: tensors.update({"mtp.1.enorm.weight": torch.zeros(64)}),
        {},
        r"unexpected: mtp\.1\.enorm\.weight \[64\]",
    ),
    "a stage without a number": (
        lambda tensors: tensors.update({"mtp.x.norm.weight": torch.zeros(64)}),
        {},
        r"unexpected: mtp\.x\.norm\.weight \[64\]",
    ),
    "a norm is missing": (without("mtp.0.attn.q_norm.weight"), {}, r"missing: mtp\.0\.attn\.q_norm\.weight"),
    "a part of the streams' maps is missing": (without("mtp.0.hc_ffn_base"), {}, r"missing: mtp\.0\.hc_ffn_base"),
    "taps beyond the target": (
        None,
        {"dspark_target_layer_ids": [2, 3, 4]},
        r"taps layer 4, but the target has 4 layers",
    ),
    "taps out of order": (None, {"dspark_target_layer_ids": [3, 2, 1]}, "strictly increasing"),
    "another number of taps": (None, {"dspark_target_layer_ids": [2, 3]}, r"wrong shape: fc\.weight is \[64, 192\]"),
    "no taps": (None, {"dspark_target_layer_ids": None}, "lacks dspark_target_layer_ids"),
    "another rank": (None, {"dspark_markov_rank": 6}, r"wrong shape: markov_head\.markov_w1\.weight is \[128, 8\]"),
    "a noise token beyond the vocabulary": (None, {"dspark_noise_token_id": 128}, "mask_token_id=128 is outside"),
    "no noise token": (None, {"dspark_noise_token_id": None}, "lacks dspark_noise_token_id"),
    "no hidden size": (None, {"hidden_size": None}, "lacks hidden_size"),
    "another hidden size": (None, {"hidden_size": 32}, "wrong shape"),
    "another number of streams": (None, {"hc_mult": 2}, r"wrong shape: hc_head\.base is \[4\]"),
    "another routing": (None, {"scoring_func": "softmax"}, "scoring_func='softmax'"),
    "two shared experts": (None, {"n_shared_experts": 2}, "n_shared_experts=2"),
    "heads that no group divides": (None, {"o_groups": 3}, "not a multiple of o_groups=3"),
    "no rotated channels": (None, {"qk_rope_head_dim": 0}, "qk_rope_head_dim"),
    "NaN": (
        replaced("mtp.0.attn.attn_sink", lambda t: t * torch.nan),
        {},
        r"damaged: layers\.0\.self_attn\.sinks hold NaN",
    ),
    "scales that are NaN": (
        replaced("mtp.0.attn.wkv.scale", lambda t: torch.full(t.shape, 255, dtype=torch.uint8).view(t.dtype)),
        {},
        r"damaged: layers\.0\.self_attn\.kv_proj\.weight hold NaN",
    ),
    "NVFP4": (
        lambda tensors: tensors.update({"mtp.0.ffn.experts.0.w1.weight_scale_2": torch.ones(1)}),
        {},
        "re-quantized .NVFP4. DeepSeek-V4 embedded DSpark drafter",
    ),
    "a scale for each channel": (
        renamed("mtp.0.attn.wkv.scale", "mtp.0.attn.wkv.weight_scale"),
        {},
        "one scale per channel. DeepSeek-V4 embedded DSpark drafter",
    ),
    "V4.1": (None, {"text_config": {"dspark_block_size": 5}}, r"DeepSeek-V4\.1 embedded DSpark drafter"),
    "V4.1 by its tensors": (
        renamed("mtp.2.markov_head.markov_w1.weight", "mtp.2.markov_head.embed.weight"),
        {},
        r"DeepSeek-V4\.1 embedded DSpark drafter",
    ),
}


@pytest.mark.parametrize(("change", "fields", "message"), MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_checkpoint_has_one_clear_error(change, fields: dict, message: str, tmp_path: Path):
    tensors = v4.stored_tensors()
    if change is not None:
        change(tensors)
    folder = v4.write(tmp_path, tensors, **fields)
    with pytest.raises(ValueError, match=message) as raised:
        Drafter.from_pretrained(folder)
    assert len(str(raised.value)) < 3000


def test_a_cut_off_shard(tmp_path: Path):
    shard = v4.write(tmp_path, shards=3) / "model-00004-of-00005.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"model-00004-of-00005\.safetensors.*cut short"):
        Drafter.from_pretrained(tmp_path)


def test_an_index_that_names_absent_shards(tmp_path: Path):
    (v4.write(tmp_path, shards=3) / "model-00005-of-00005.safetensors").unlink()
    with pytest.raises(OSError, match=r"model-00005-of-00005\.safetensors"):
        Drafter.from_pretrained(tmp_path)


def test_an_absent_shard_of_the_target_does_not_matter(tmp_path: Path):
    (v4.write(tmp_path, shards=3) / "model-00001-of-00005.safetensors").unlink()
    assert_is(Drafter.from_pretrained(tmp_path), v4.stored_tensors())


def test_a_shard_that_lacks_what_the_index_lists(tmp_path: Path):
    file = v4.write(tmp_path, shards=3) / "model-00005-of-00005.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({n: t for n, t in tensors.items() if n != name}, file, metadata={"format": "pt"})
    with pytest.raises(OSError, match=f"lack {re.escape(name)}, which its index lists"):
        Drafter.from_pretrained(tmp_path)


# ---------------------------------------------------------------------- written again


def stored_bytes(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    tensors = load_file(folder / "model.safetensors")
    return {
        n: (str(t.dtype), tuple(t.shape), t.flatten().view(torch.uint8).numpy().tobytes()) for n, t in tensors.items()
    }


@pytest.mark.parametrize("dtype", ["auto", torch.float32])
def test_an_unchanged_drafter_is_written_byte_for_byte(dtype, tmp_path: Path):
    source = v4.write(tmp_path / "target")
    drafter = Drafter.from_pretrained(source, dtype=dtype)
    written = export(drafter, tmp_path / "drafter", format="deepseek-v4")
    own = {name: content for name, content in stored_bytes(source).items() if name.startswith("mtp.")}
    assert stored_bytes(written.path) == own
    again = Drafter.from_pretrained(written.path, dtype=dtype)
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())
    assert again.config.target_name_or_path == str(source)


def test_what_was_changed_is_written_in_its_dtype(tmp_path: Path):
    tensors = v4.stored_tensors()
    drafter = Drafter.from_pretrained(v4.write(tmp_path / "target", tensors))
    with torch.no_grad():
        drafter.layers[1].mlp.experts.down_proj[3].mul_(1.01)
        drafter.layers[0].self_attn.q_a_proj.weight.mul_(1.01)
    drafter.config.confidence_temperatures = [1.5] * 5
    drafter.save_pretrained(tmp_path / "drafter", format="deepseek-v4")
    found = load_file(tmp_path / "drafter" / "model.safetensors")
    changed = ["mtp.1.ffn.experts.3.w2", "mtp.0.attn.wq_a"]
    assert {f"{name}.scale" for name in changed} == tensors.keys() - found.keys()
    assert all(found[f"{name}.weight"].dtype == torch.bfloat16 for name in changed)
    again = Drafter.from_pretrained(tmp_path / "drafter")
    assert again.config.confidence_temperatures == [1.5] * 5
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_without_its_source_everything_is_written_in_its_dtype(tmp_path: Path):
    drafter = Drafter.from_pretrained(v4.write(tmp_path / "target"))
    shutil.rmtree(tmp_path / "target")
    export(drafter, tmp_path / "drafter", format="deepseek-v4")
    assert {t.dtype for t in load_file(tmp_path / "drafter" / "model.safetensors").values()} == {
        torch.bfloat16,
        torch.float32,
    }
    again = Drafter.from_pretrained(tmp_path / "drafter")
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_what_the_format_has_no_place_for_is_refused(tmp_path: Path):
    drafter = Drafter.from_pretrained(v4.write(tmp_path / "target"))
    with pytest.raises(ValueError, match="vllm-sglang format cannot hold DeepSeek-V4 DSpark drafters"):
        export(drafter, tmp_path / "out", format="vllm-sglang")
    drafter.config.num_target_layers = None
    with pytest.raises(ValueError, match="number of its target's layers"):
        export(drafter, tmp_path / "out", format="deepseek-v4")
    with pytest.raises(ValueError, match="deepseek-v4 format cannot hold DSpark drafters"):
        export(tiny.random_drafter(tiny.qwen3()), tmp_path / "out", format="deepseek-v4")
    assert not (tmp_path / "out").exists()
