"""What is written in a public format is the same drafter, bit for bit, or is not written."""

import json
from pathlib import Path

import engine_rules
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoConfig

import tiny
from dspark_hf import DSparkConfig, DSparkDrafter
from dspark_hf.checkpoints import export, inspect_checkpoint

pytestmark = pytest.mark.integration

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6}
MIXED = SLIDING | {"layer_types": ["full_attention", "sliding_attention"]}
DFLASH = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
ALL = set(DSparkConfig.export_formats)

# A kind of drafter, and the formats that hold it.
KINDS = {
    "as it is": ({}, ALL),
    "no confidence head": ({"enable_confidence_head": False, "confidence_head_with_markov": False}, ALL),
    "gated head": ({"markov_head_type": "gated"}, ALL),
    "rnn head": ({"markov_head_type": "rnn"}, {"deepspec", "vllm-sglang", "speculators"}),
    "fill-in": ({"sample_from_anchor": False}, {"vllm-sglang", "speculators", "modelopt"}),
    "fill-in DFlash": (DFLASH | {"sample_from_anchor": False}, {"vllm-sglang", "speculators", "modelopt"}),
    "DeepSpec's DFlash": (DFLASH, {"deepspec", "speculators", "modelopt"}),
    "sliding and causal": (SLIDING, {"vllm-sglang", "speculators", "modelopt"}),
    "sliding both ways": (SLIDING | {"is_causal": False}, {"vllm-sglang", "speculators", "modelopt"}),
    "mixed layers": (MIXED, {"vllm-sglang", "speculators"}),
    "mixed layers both ways": (MIXED | {"is_causal": False}, {"vllm-sglang", "speculators"}),
    "mixed layers of DFlash": (DFLASH | MIXED | {"sample_from_anchor": False}, {"vllm-sglang", "speculators"}),
    "DFlash, sliding and causal": (
        DFLASH | SLIDING | {"sample_from_anchor": False},
        {"vllm-sglang", "speculators", "modelopt"},
    ),
    "full and causal": ({"is_causal": True}, {"vllm-sglang", "modelopt"}),
    "yarn": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            }
        },
        ALL,
    ),
    "interleaved rotation": ({"rotary_interleaved": True}, {"vllm-sglang"}),
    "attention sinks": ({"attention_sinks": True}, {"vllm-sglang", "modelopt"}),
    "reduced vocabulary": ({"draft_vocab_size": 20}, {"vllm-sglang", "speculators"}),
    "embedding tapped": ({"target_layer_ids": [-1, 0, 2]}, ALL),
    "calibrated": ({"confidence_temperatures": [1.0, 1.5, 2.0, 2.5]}, ALL),
}
HELD = [(kind, format) for kind, (_, formats) in KINDS.items() for format in sorted(formats)]
NOT_HELD = [(kind, format) for kind, (_, formats) in KINDS.items() for format in sorted(ALL - formats)]


def drafter_of(kind: str, **fields) -> DSparkDrafter:
    target = tiny.qwen3()
    target.config.name_or_path = "some/target"
    drafter = tiny.random_drafter(target, **(KINDS[kind][0] | fields))
    if drafter.draft_token_ids is not None:
        drafter.draft_token_ids.copy_(torch.arange(20) * 5 + torch.arange(20) % 2)
    if drafter.config.attention_sinks:
        for layer in drafter.layers:
            torch.nn.init.normal_(layer.self_attn.attention_sink_bias)
    drafter.bind(target)
    drafter.target_kept_alive = [target]
    return drafter


@pytest.mark.parametrize(("kind", "format"), HELD, ids=[" in ".join(case) for case in HELD])
def test_a_round_trip_changes_nothing(kind: str, format: str, tmp_path: Path):
    drafter = drafter_of(kind).to(torch.bfloat16)
    drafter.bind(drafter.target_kept_alive[0].to(torch.bfloat16))
    written = drafter.save_pretrained(tmp_path / "once", format=format)
    assert {file.name for file in tmp_path.iterdir()} == {"once"}
    again = DSparkDrafter.from_pretrained(written.path)
    assert again.dtype == torch.bfloat16
    ours, theirs = drafter.state_dict(), again.state_dict()
    for name, tensor in ours.items():
        assert torch.equal(theirs[name], tensor), name
    assert theirs.keys() - ours.keys() <= {"embed_tokens.weight", "lm_head.weight"}
    assert again.config.num_draft_tokens == drafter.config.num_draft_tokens
    assert again.config.target_layer_ids == drafter.config.target_layer_ids

    if format == "speculators":  # Its file names the target; the others have no place for that.
        assert again.config.target_name_or_path == "some/target"
    else:
        again.config.target_name_or_path = "some/target"
    again.config.num_target_layers = drafter.config.num_target_layers
    again.bind(drafter.target_kept_alive[0])
    export(again, tmp_path / "twice", format)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "once" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes(), name


@pytest.mark.parametrize(("kind", "format"), NOT_HELD, ids=[" in ".join(case) for case in NOT_HELD])
def test_what_a_format_cannot_hold_is_refused_and_leaves_nothing(kind: str, format: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot hold this drafter|can serve this drafter"):
        export(drafter_of(kind), tmp_path / "out", format)
    assert not list(tmp_path.iterdir())


def test_gemma4_layers(data: Path, shared: Path, tmp_path: Path):
    source = shared / "parity" / "f_gemma4_vanilla_confmarkov" / "drafter"
    drafter = DSparkDrafter.from_pretrained(source)
    for format in ("deepspec", "vllm-sglang"):
        written = export(drafter, tmp_path / format, format)
        again = DSparkDrafter.from_pretrained(written.path)
        assert all(
            torch.equal(again.state_dict()[n], t) for n, t in drafter.state_dict().items() if n in again.state_dict()
        )
        assert written.refused["SGLang"][0] == "it does not support Gemma 4 drafters"
        assert "vLLM" in written.launch
    drafter.config.target_name_or_path = "some/target"
    with pytest.raises(ValueError, match="cannot hold this drafter"):
        export(drafter, tmp_path / "speculators", "speculators")


def test_deepspecs_own_files_come_back_as_they_were(data: Path, tmp_path: Path):
    source = data / "parity" / "a_qwen3_vanilla_confmarkov" / "drafter"
    export(DSparkDrafter.from_pretrained(source), tmp_path / "deepspec", "deepspec")
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "deepspec" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    old, new = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "deepspec"))
    asked_for = (
        "architectures",
        "target_layer_ids",
        "mask_token_id",
        "enable_confidence_head",
        "block_size",
    )
    asked_for += ("markov_rank", "markov_head_type", "confidence_head_with_markov", "num_target_layers", "layer_types")
    for name in (
        *asked_for,
        "hidden_size",
        "head_dim",
        "rope_parameters",
        "tie_word_embeddings",
        "model_type",
        "vocab_size",
    ):
        assert new[name] == old[name], name


# ---------------------------------------------------------------------- the file for the engines


def test_the_engine_file_leaves_nothing_to_guess(tmp_path: Path):
    written = export(drafter_of("as it is").to(torch.bfloat16), tmp_path / "out", "vllm-sglang")
    config = json.loads((written.path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"]
    assert config["model_type"] == "qwen3"
    assert (config["sample_from_anchor"], config["dspark_bonus_anchor"]) == (True, False)
    assert config["dflash_config"] == {"mask_token_id": tiny.MASK_ID, "target_layer_ids": config["target_layer_ids"]}
    assert {"markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov"} <= config.keys()
    assert "auto_map" not in config
    assert config["rope_parameters"].keys() == {"rope_type", "rope_theta"}
    with safe_open(written.path / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
        assert {opened.get_slice(name).get_dtype() for name in opened.keys()} == {"BF16"}
        assert not {"embed_tokens.weight", "lm_head.weight"} & set(opened.keys())
    assert not written.refused
    assert not written.notes


def test_transformers_keeps_the_window(tmp_path: Path):
    export(drafter_of("sliding and causal"), tmp_path / "out", "vllm-sglang")
    parsed = AutoConfig.from_pretrained(tmp_path / "out")
    assert (parsed.sliding_window, parsed.is_causal) == (6, True)


def test_the_launch_commands_are_exact(tmp_path: Path):
    written = export(drafter_of("fill-in"), tmp_path / "out", "vllm-sglang")
    vllm = {
        "method": "dspark",
        "model": str(written.path),
        "num_speculative_tokens": tiny.BLOCK_SIZE - 1,
        "draft_sample_method": "greedy",
        "attention_backend": "FLASH_ATTN",
    }
    assert written.launch["vLLM"] == f"vllm serve some/target --speculative-config '{json.dumps(vllm)}'"
    assert "--speculative-algorithm DSPARK" in written.launch["SGLang"]
    assert f"--speculative-num-draft-tokens {tiny.BLOCK_SIZE}" in written.launch["SGLang"]
    assert written.launch["vLLM"] in str(written)


def test_plain_dflash_is_served_as_such(tmp_path: Path):
    written = export(drafter_of("fill-in DFlash"), tmp_path / "out", "vllm-sglang")
    assert '"method": "dflash"' in written.launch["vLLM"]
    assert "DFLASH" in written.launch["SGLang"]
    assert json.loads((written.path / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]


NOT_SERVED = {
    "gated head": dict.fromkeys(("vLLM", "llama.cpp"), "only supports vanilla sequential heads, not gated"),
    "rnn head": dict.fromkeys(("vLLM", "llama.cpp"), "only supports vanilla sequential heads, not rnn"),
    "reduced vocabulary": {"SGLang": "no reduced draft vocabulary"},
    "embedding tapped": {"SGLang": "cannot tap the embedding output"},
}


@pytest.mark.parametrize(("kind", "reasons"), NOT_SERVED.items(), ids=NOT_SERVED)
def test_an_engine_that_cannot_serve_it_is_named_with_the_reason(kind: str, reasons, tmp_path: Path):
    written = export(drafter_of(kind), tmp_path / "out", "vllm-sglang")
    assert written.refused.keys() == reasons.keys()
    for engine, reason in reasons.items():
        assert reason in "; ".join(written.refused[engine])
        assert engine not in written.launch
        assert f"not for {engine}" in str(written)


def test_vllm_makes_the_layers_of_a_speculators_dflash_drafter_alike(tmp_path: Path):
    written = export(drafter_of("mixed layers of DFlash"), tmp_path / "out", "speculators")
    assert written.refused["vLLM"] == ["some draft layers are causal and some are not"]
    assert "vLLM" in export(drafter_of("mixed layers of DFlash"), tmp_path / "other", "vllm-sglang").launch


def test_another_activation_is_for_no_engine(tmp_path: Path):
    with pytest.raises(ValueError, match=r"No engine.*\n- vLLM: its draft layers have silu.*this drafter's gelu"):
        export(drafter_of("as it is", hidden_act="gelu"), tmp_path / "out", "vllm-sglang")


@pytest.mark.parametrize(("kind", "format"), HELD, ids=[" in ".join(case) for case in HELD])
def test_engines_derive_this_drafter_from_the_fields(kind: str, format: str, tmp_path: Path):
    drafter = drafter_of(kind)
    config = drafter.config
    written = export(drafter, tmp_path / "out", format)
    fields = json.loads((written.path / "config.json").read_text())
    with safe_open(written.path / "model.safetensors", framework="pt") as opened:
        names, dtypes = set(opened.keys()), {opened.get_slice(name).get_dtype() for name in opened.keys()}
    layers = range(config.num_hidden_layers)
    meant = engine_rules.Reading(
        method="dspark" if config.markov_rank else "dflash",
        causal=[config.layer_is_causal(i) for i in layers],
        windows=[config.layer_window(i) for i in layers],
        aux_layers=config.hidden_state_indices,
        sample_from_anchor=config.sample_from_anchor,
        mask_token_id=config.mask_token_id,
        markov_rank=config.markov_rank,
        confidence_with_markov=config.confidence_head_with_markov if config.enable_confidence_head else None,
        rotated_part=1.0,
        rope_theta=config.rope_parameters["rope_theta"],
        rotary_interleaved=config.rotary_interleaved,
        draft_vocab_size=config.logits_size,
        target_hidden_size=config.target_hidden_size,
    )
    for engine in engine_rules.READERS.keys() & written.launch.keys():
        assert engine_rules.READERS[engine](fields) == meant, engine
    # Both share the target's embedding and LM head where the file has none, and take every tensor as `dtype` says.
    assert not fields["tie_word_embeddings"]
    assert (
        names.isdisjoint({"embed_tokens.weight", "lm_head.weight"}) or config.draft_vocab_size or format == "deepspec"
    )
    assert dtypes <= {"F32", "I64", "BOOL"} and fields["dtype"] == "float32"
    if config.draft_vocab_size:
        tensors = load_file(written.path / "model.safetensors")
        assert torch.equal(torch.arange(config.draft_vocab_size) + tensors["d2t"], drafter.draft_token_ids)
        assert "lm_head.weight" in names


def test_llama_layers_are_for_no_engine(tmp_path: Path):
    with pytest.raises(ValueError, match=r"No engine.*\n- vLLM: .*not llama"):
        export(drafter_of("as it is", qk_norm=False), tmp_path / "out", "vllm-sglang")


def test_scaled_embeddings_are_for_no_engine(tmp_path: Path):
    with pytest.raises(ValueError, match="does not scale embedding rows"):
        export(drafter_of("as it is", embedding_scale=8.0), tmp_path / "out", "vllm-sglang")


# ---------------------------------------------------------------------- what is checked before anything is written


def test_the_last_layer_of_the_target_is_not_tapped(tmp_path: Path):
    with pytest.raises(ValueError, match="last layer"):
        export(drafter_of("as it is", target_layer_ids=[0, 3]), tmp_path / "out", "vllm-sglang")


def test_broken_weights_are_not_written(tmp_path: Path):
    drafter = drafter_of("as it is")
    with torch.no_grad():
        drafter.fc.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"fc\.weight hold NaN"):
        export(drafter, tmp_path / "out", "vllm-sglang")
    assert not list(tmp_path.iterdir())


def test_weights_of_two_types_are_not_written(tmp_path: Path):
    drafter = drafter_of("as it is")
    drafter.fc.to(torch.bfloat16)
    with pytest.raises(ValueError, match="one dtype for all weights"):
        export(drafter, tmp_path / "out", "vllm-sglang")


@pytest.mark.parametrize("name", ["my-dflash-drafter", "Eagle"])
def test_a_name_that_vllm_takes_for_another_method_is_refused(name: str, tmp_path: Path):
    with pytest.raises(ValueError, match="chooses the kind of drafter by"):
        export(drafter_of("as it is"), tmp_path / name, "vllm-sglang")


def test_nothing_is_overwritten(tmp_path: Path):
    export(drafter_of("as it is"), tmp_path / "out", "modelopt")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(FileExistsError, match="already holds something"):
        export(drafter_of("gated head"), tmp_path / "out", "modelopt")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


def test_an_empty_folder_may_be_written_to(tmp_path: Path):
    (tmp_path / "out").mkdir()
    assert export(drafter_of("as it is"), tmp_path / "out", "modelopt").path == tmp_path / "out"


@pytest.mark.parametrize(
    ("kind", "format"), [("as it is", "deepspec"), ("reduced vocabulary", "vllm-sglang")], ids=["deepspec", "reduced"]
)
def test_embeddings_that_have_to_be_in_the_file_must_come_from_somewhere(kind: str, format: str, tmp_path: Path):
    drafter = drafter_of(kind)
    drafter.unbind()
    with pytest.raises(ValueError, match=r"drafter\.bind\(target\)"):
        export(drafter, tmp_path / "out", format)


def test_copies_of_the_targets_tensors_are_left_out_for_engines(tmp_path: Path):
    drafter = drafter_of("as it is").owning_embeddings()
    written = export(drafter, tmp_path / "out", "vllm-sglang")
    assert any("are left out" in note for note in written.notes)
    assert not {"embed_tokens.weight", "lm_head.weight"} & load_file(tmp_path / "out" / "model.safetensors").keys()


def test_a_head_of_its_own_is_not_left_out_silently(tmp_path: Path):
    drafter = drafter_of("as it is").owning_embeddings()
    with torch.no_grad():
        drafter.lm_head.weight[0].add_(1.0)
    drafter.bind(drafter.target_kept_alive[0])
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from its target's"):
        export(drafter, tmp_path / "out", "vllm-sglang")
    export(drafter, tmp_path / "out", "deepspec")


def test_a_draft_vocabulary_out_of_order_is_not_written(tmp_path: Path):
    drafter = drafter_of("reduced vocabulary")
    drafter.draft_token_ids.copy_(drafter.draft_token_ids.flip(0))
    with pytest.raises(ValueError, match="ascending order"):
        export(drafter, tmp_path / "out", "speculators")


def test_speculators_files_name_their_target(tmp_path: Path):
    with pytest.raises(ValueError, match="target_name_or_path"):
        export(drafter_of("as it is", target_name_or_path=None), tmp_path / "out", "speculators")


def test_an_unknown_format_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="format must be one of"):
        export(drafter_of("as it is"), tmp_path / "out", "onnx")


@pytest.mark.parametrize("format", sorted(ALL))
def test_inspection_agrees_with_what_was_written(format: str, tmp_path: Path):
    written = export(drafter_of("as it is"), tmp_path / "out", format)
    found = inspect_checkpoint(written.path)
    for engine in written.launch:
        assert found.engines[engine] == []


def test_saving_what_was_loaded_changes_no_byte(tmp_path: Path):
    tiny.random_drafter(tiny.qwen3()).to(torch.bfloat16).save_pretrained(tmp_path / "first")
    DSparkDrafter.from_pretrained(tmp_path / "first", dtype="auto").save_pretrained(tmp_path / "second")
    first, second = ({f.name: f.read_bytes() for f in (tmp_path / name).iterdir()} for name in ("first", "second"))
    assert first == second and len(first) == 3
