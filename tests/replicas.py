"""
A tiny replica of every packaging in which drafters are published, with its real fields and tensor names.

`REPLICAS` names them; `docs/results/drafters.csv` says which public drafter is packaged how.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import spellings
import torch
from generation import hybrids
from safetensors.torch import load_file
from spellings import layer_sizes
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel
from transformers.configuration_utils import ALLOWED_LAYER_TYPES

import tiny
from dspark_hf import DFlash2Config, DFlash2Drafter

DEPTH = 8  # Layers of the targets of drafters whose taps follow from the depth.
DFLASH2_SIZES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


class Replica(NamedTuple):
    """
    Args:
        build: Writes the replica into a folder, and returns what to load.
        target: A target for it.
        refusal: What the error says, for packagings that are refused; `None` for those that are read.
    """

    build: Callable[[Path], Path]
    target: Callable[[], PreTrainedModel] = tiny.qwen3
    refusal: str | None = None


# ---------------------------------------------------------------------- spellings of kinds that `spellings` does not have


def eagle3(drafter, **fields):
    """As SpecForge and AngelSlim write it: nothing about taps, a draft vocabulary, one layer called `midlayer`."""
    shown = drafter.config
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **layer_sizes(shown),
        "num_hidden_layers": 1,
        "vocab_size": shown.vocab_size,
        "draft_vocab_size": shown.draft_vocab_size or shown.vocab_size,
        "max_position_embeddings": 512,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    tensors = {
        name.replace("layers.0.", "midlayer."): tensor.clone()
        for name, tensor in drafter.state_dict().items()
        if name != "draft_token_ids"
    }
    if (ids := drafter.draft_token_ids) is not None:
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(shown.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {name: value for name, value in (config | fields).items() if value is not None}, tensors


def dflash2(drafter, **section):
    """As z-lab and incoai write it."""
    config = drafter.config
    own = {name: getattr(config, name) for name in DFLASH2_SIZES}
    own |= {name: getattr(config, name) for name in ("block_size", "mask_token_id", "target_layer_ids")}
    written = {
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "dtype": "float32",
        **layer_sizes(config),
        "vocab_size": config.vocab_size,
        "max_position_embeddings": 512,
        "num_target_layers": config.num_target_layers,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "use_sliding_window": config.sliding_window is not None,
        "is_causal": config.is_causal,
        "dflash_config": {n: v for n, v in (own | section).items() if v is not None},
    }
    return {n: v for n, v in written.items() if v is not None}


def dflash2_speculators(drafter):
    """As RedHatAI's `speculator.dflash2`: the sizes flat, the layers in a section."""
    flat = dflash2(drafter)
    section = flat.pop("dflash_config")
    layers = {
        n: flat.pop(n) for n in list(flat) if n not in ("architectures", "dtype", "is_causal", "num_target_layers")
    }
    return {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "speculators_config": {"algorithm": "dflash2", "verifier": {"name_or_path": "some/target"}},
        "transformer_layer_config": layers,
        "draft_vocab_size": drafter.config.vocab_size,
        "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in section.pop("target_layer_ids")],
        "sliding_window_non_causal": True,
        "sample_from_anchor": False,
        **section,
    }


def laguna(drafter, **fields):
    """As poolside/Laguna-XS-2.1-DFlash: 58 tensors in the real one, with `qkv_proj` fused."""
    config = drafter.config
    written = {
        "architectures": ["DFlashLagunaForCausalLM"],
        "model_type": "laguna",
        **layer_sizes(config),
        "attention_bias": False,
        "gating": "per-head",
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size,
        "max_position_embeddings": 512,
        "layer_types": config.layer_types,
        "sliding_window": config.sliding_window,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
        "torch_dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in config.target_layer_ids],
        "dflash_config": {
            "block_size": config.block_size,
            "mask_token_id": config.mask_token_id,
            "num_target_layers": config.num_target_layers,
            "target_layer_ids": config.target_layer_ids,
            "causal": True,
        },
    }
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        name = name.replace("fc_norm.", "aux_hidden_norms.")
        if "q_proj" in name:
            parts = [drafter.state_dict()[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            tensors[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "k_proj" not in name and "v_proj" not in name:
            tensors[name] = tensor.clone()
    return {name: value for name, value in (written | fields).items() if value is not None}, tensors


def laguna_speculators(drafter: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """As poolside/Laguna-XS.2-speculator.dflash: the decoder in a section, projections apart."""
    flat, _ = laguna(drafter)
    section, taps = flat.pop("dflash_config"), flat.pop("eagle_aux_hidden_state_layer_ids")
    own = ("architectures", "torch_dtype", "draft_vocab_size", "gating")
    layers = {name: value for name, value in flat.items() if name not in own} | {"model_type": "qwen3"}
    layers["rope_parameters"] = layers["rope_parameters"]["sliding_attention"]
    config = {name: flat[name] for name in own} | {
        "speculators_model_type": "dflash",
        "speculators_config": {"verifier": {"name_or_path": "poolside/Laguna-XS.2"}},
        "transformer_layer_config": layers,
        "aux_hidden_state_layer_ids": taps,
        "block_size": section["block_size"],
        "mask_token_id": section["mask_token_id"],
    }
    tensors = {name.replace("fc_norm.", "aux_hidden_norms."): t.clone() for name, t in drafter.state_dict().items()}
    return config, tensors


# ---------------------------------------------------------------------- drafters


def deep_llama() -> PreTrainedModel:
    return tiny.llama(num_hidden_layers=DEPTH)


def deep_gpt_oss() -> PreTrainedModel:
    return tiny.gpt_oss(num_hidden_layers=DEPTH)


def dspark_drafter(target: PreTrainedModel | None = None, **fields: Any) -> Any:
    target = target or tiny.qwen3()
    drafter = tiny.random_drafter(target, **fields)
    drafter.bind(target)
    return drafter


def dflash_drafter(target: PreTrainedModel | None = None, **fields: Any) -> Any:
    own = {"markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False}
    return dspark_drafter(target, **(own | {"sample_from_anchor": False} | fields))


def dflash2_drafter(target: PreTrainedModel, **fields: Any) -> DFlash2Drafter:
    own = {"num_hidden_layers": 2, "mask_token_id": tiny.MASK_ID, "initializer_range": 0.4, "block_size": 5}
    config = DFlash2Config.for_target(target.config, **(DFLASH2_SIZES | own | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return DFlash2Drafter(config).eval()


def laguna_drafter(target: PreTrainedModel, **fields: Any) -> Any:
    """Its last tap is the target's last layer."""
    own = {"attention_gate": "head", "fc_norm": True, "norm_context": True, "is_causal": True, "block_size": 5}
    own |= {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "target_layer_ids": [0, 1, 3]}
    return dflash_drafter(target, **(own | fields))


def eagle3_drafter(target: PreTrainedModel, **fields: Any) -> Any:
    return tiny.eagle3_drafter(target, **({"qk_norm": False, "target_layer_ids": [1, 3, 4]} | fields))


# ---------------------------------------------------------------------- changes to a folder


def changed(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None] | None = None, **fields: Any) -> Path:
    """Edits the tensors of a folder and sets fields of its configuration; `None` removes one."""
    tensors = load_file(folder / "model.safetensors")
    if edit is not None:
        edit(tensors)
    config = json.loads((folder / "config.json").read_text()) | fields
    return spellings.write(folder, {name: value for name, value in config.items() if value is not None}, tensors)


def in_section(folder: Path, section: str, **fields: Any) -> Path:
    """As `changed`, for the fields of a section of the configuration."""
    held = json.loads((folder / "config.json").read_text()).get(section) or {}
    held = {name: value for name, value in (held | fields).items() if value is not None}
    return changed(folder, **{section: held})


def layer_matrices(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name for name in tensors if name.startswith("layers.") and name.endswith("_proj.weight")]


def to_fp8(tensors: dict[str, torch.Tensor]) -> None:
    """compressed-tensors: a scale for each row."""
    for name in layer_matrices(tensors):
        weight = tensors.pop(name).float()
        scale = weight.abs().amax(1, keepdim=True) / 448
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[name.replace(".weight", ".weight_scale")] = scale.to(torch.bfloat16)


def to_int4(tensors: dict[str, torch.Tensor]) -> None:
    """compressed-tensors, pack-quantized: eight codes in a word, a scale for 16 of a row."""
    for name in layer_matrices(tensors):
        weight = tensors.pop(name).float()
        groups = weight.unflatten(1, (-1, 16))
        scale = groups.abs().amax(-1, keepdim=True) / 7
        codes = (groups / scale).round().clamp(-8, 7).flatten(1).long() + 8
        words = sum(codes[:, i::8] << 4 * i for i in range(8))
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        stem = name.removesuffix(".weight")
        tensors[f"{stem}.weight_packed"] = words
        tensors[f"{stem}.weight_scale"] = scale[..., 0]
        tensors[f"{stem}.weight_shape"] = torch.tensor(weight.shape)


def to_nvfp4(tensors: dict[str, torch.Tensor]) -> None:
    """ModelOpt: two codes in a byte, a scale for 16 of a row and one for all."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    for name in layer_matrices(tensors):
        weight = tensors.pop(name).float()
        groups = weight.unflatten(1, (-1, 16))
        overall = groups.abs().amax() / (6 * 448)
        scale = (groups.abs().amax(-1, keepdim=True) / 6 / overall).to(torch.float8_e4m3fn)
        scaled = groups / (scale.float() * overall)
        codes = (scaled.abs()[..., None] - grid).abs().argmin(-1) + 8 * (scaled < 0)
        codes = codes.flatten(1).to(torch.uint8)
        stem = name.removesuffix(".weight")
        tensors[name] = codes[:, 0::2] | codes[:, 1::2] << 4
        tensors[f"{stem}.weight_scale"] = scale[..., 0]
        tensors[f"{stem}.weight_scale_2"] = overall
        tensors[f"{stem}.input_scale"] = torch.tensor(1.0)


# ---------------------------------------------------------------------- packagings: DSpark and DFlash


def gemma4_deepspec(folder: Path, dflash: bool) -> Path:
    """DeepSpec's writing of Gemma 4 layers, by this package's exporter, whose files are compared with DeepSpec's elsewhere."""
    target = tiny.gemma4()
    layers = {"head_dim": 16, "num_key_value_heads": 1, "attention_k_eq_v": True, "sandwich_norms": True}
    layers |= {"v_norm": True, "layer_scalar": True, "attention_scaling": 1.0}
    drafter = (dflash_drafter if dflash else dspark_drafter)(target, sample_from_anchor=True, **layers)
    drafter.save_pretrained(folder, format="deepspec")
    return folder


def nemotron(folder: Path, packed: bool) -> Path:
    """Both spellings of the taps, sinks, causal windows, its own embedding, and an anchor that predicts nothing."""
    target = hybrids.target("nemotron_h")
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": True}
    drafter = dspark_drafter(
        target, sample_from_anchor=False, enable_confidence_head=False, attention_sinks=True, **window
    )
    taps = drafter.config.target_layer_ids
    spellings.normalised_specforge(drafter, folder)
    fields = {
        "eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in taps],
        "target_layer_ids": taps,
        "mask_token_id": drafter.config.mask_token_id,
        "pard_token": drafter.config.mask_token_id,
        "sample_from_anchor": False,
        "dspark_bonus_anchor": True,
        "dspark_markov_rank": drafter.config.markov_rank,
        "dspark_fixup_head_type": "markov",
        "has_embed_tokens": True,
        "has_lm_head": False,
        "attention_sink_bias": True,
        "rope_parameters": None,
        "auto_map": None,
    }
    embedding = target.get_input_embeddings().weight.detach().clone()

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed_tokens.weight"] = embedding
        if packed:
            to_nvfp4(tensors)

    changed(folder, edit, **fields)
    section = {"causal": True, "use_swa": True, "swa_window_size": 8, "sample_from_anchor": False}
    return in_section(folder, "dflash_config", **section)


def nemotron_dflash(folder: Path) -> Path:
    """Its sibling: blocks that see both ways, YaRN, and no block size."""
    drafter = dflash_drafter(hybrids.target("nemotron_h"), block_size=16)
    spellings.zlab(drafter, folder)
    yarn = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 64}
    return changed(folder, to_nvfp4, rope_scaling=yarn, block_size=None)


@functools.cache
def glm5_next() -> PreTrainedModel:
    """A tiny GLM-5.3-Flash where transformers has it, with its streams; otherwise a stand-in."""
    if "indexed_attention" not in ALLOWED_LAYER_TYPES:
        return tiny.qwen3()
    experts = {"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2}
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "v_head_dim": 8, "qk_nope_head_dim": 8}
    index = {"index_topk": 4, "index_head_dim": 8, "index_n_heads": 8, "index_kpool": 4, "indexer_types": ["full"] * 4}
    linear = {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention", "indexed_attention"] * 2}
    own = {"num_key_value_heads": 4, "head_dim": 0, "mlp_layer_types": ["dense", *["sparse"] * 3]}
    text = tiny.target_config("Glm5NextText", **experts, **latent, **index, **linear, **own)
    config = CONFIG_MAPPING["glm5_next"](text_config=text.to_dict())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config).eval().requires_grad_(False)


def glm_flash(folder: Path) -> Path:
    """The last tap is what the target's last layer gives."""
    return spellings.speculators(dspark_drafter(glm5_next(), target_layer_ids=[0, 1, 3], tap_before_norm=True), folder)


def inherited(folder: Path) -> Path:
    """satgeze's and Koopah's: DeepSpec's layers, and a configuration that drags the target's fields along."""
    spellings.normalised_specforge(dspark_drafter(), folder)
    rope = {"rope_theta": 10_000.0, "rope_type": "default", "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}
    return changed(folder, rope_parameters=rope, attn_output_gate=True, linear_num_key_heads=16, auto_map=None)


def qwen35_layers(folder: Path) -> Path:
    """Ornith's: gated queries, norms of 1 + weight, a part of the head rotated."""
    spellings.deepspec(dspark_drafter(attention_gate="query"), folder)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.endswith("norm.weight"):
                tensors[name] -= 1

    return changed(folder, edit, architectures=["Qwen35DSparkModel"], model_type="qwen3_5")


def mimo(folder: Path) -> Path:
    """The vector of its masked slots is in a pickle beside the weights, whose file has another name than usual."""
    spellings.zlab(dflash_drafter(), folder)
    changed(folder, attention_value_scale=0.5, partial_rotary_factor=0.5)
    weights = (folder / "model.safetensors").rename(folder / "dflash_draft_model.safetensors")
    index = {"weight_map": dict.fromkeys(load_file(weights), weights.name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.save({"mask_token_id": 7, "embedding": torch.ones(32)}, folder / "mask_embedding.pt")
    return folder


def with_tensors(folder: Path, names: list[str], **fields: Any) -> Path:
    """SpecForge's packaging with what another method adds to it."""
    spellings.specforge(dspark_drafter(), folder)
    return changed(folder, lambda tensors: tensors.update({name: torch.zeros(2, 2) for name in names}), **fields)


def laguna_folder(folder: Path, pack: Callable[..., None] | None = None) -> Path:
    config, tensors = laguna(laguna_drafter(tiny.qwen3()))
    if pack is not None:
        pack(tensors)
        config["quantization_config"] = {"quant_method": "compressed-tensors"}
    return spellings.write(folder, config, tensors)


def deepseek_v4(folder: Path, **fields: Any) -> Path:
    """The drafter's part of a checkpoint of DeepSeek-V4."""
    shutil.copytree(Path(__file__).parent / "data" / "parity" / "v4_deepseek" / "drafter", folder, dirs_exist_ok=True)
    return changed(folder, **fields) if fields else folder


# ---------------------------------------------------------------------- packagings: EAGLE-3


def eagle3_folder(folder: Path, target: PreTrainedModel | None = None, **fields: Any) -> Path:
    made = eagle3_drafter(target or deep_llama(), draft_vocab_size=40, has_lm_head=True)
    made.draft_token_ids.copy_(torch.cat([torch.arange(20), torch.arange(20) * 3 + 40]))
    return spellings.write(folder, *eagle3(made, **fields))


def eagle3_deepspec(folder: Path) -> Path:
    """DeepSpec names its layer `layers.0` and its taps by their outputs, and has the target's embedding and head."""
    made = eagle3_drafter(deep_llama(), has_embed_tokens=True, has_lm_head=True, target_layer_ids=[0, 1, 2, 3, 4])
    config, _ = eagle3(
        made, architectures=["Qwen3Eagle3Model"], target_layer_ids=[0, 1, 2, 3, 4], draft_vocab_size=None
    )
    return spellings.write(folder, config | {"ttt_length": 7}, dict(made.state_dict()))


def eagle3_speculators(folder: Path, **fields: Any) -> Path:
    made = eagle3_drafter(deep_llama(), draft_vocab_size=40, has_lm_head=True, has_embed_tokens=True)
    made.draft_token_ids.copy_(torch.cat([torch.arange(20), torch.arange(20) * 3 + 40]))
    flat, tensors = eagle3(made)
    own = ("architectures", "torch_dtype", "draft_vocab_size")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}},
        "draft_vocab_size": 40,
        "norm_before_residual": True,
        "target_hidden_size": None,
        "transformer_layer_config": {name: value for name, value in flat.items() if name not in own},
    }
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return spellings.write(folder, config | fields, named)


def eagle3_llama4(folder: Path) -> Path:
    eagle3_folder(folder)
    return changed(folder, model_type="llama4_text", intermediate_size_mlp=64, intermediate_size=16)


def eagle3_gpt_oss(folder: Path) -> Path:
    """NVIDIA's third: the last tap is the last layer, and a norm comes before the projection."""
    target = deep_gpt_oss()
    made = eagle3_drafter(target, norm_before_fc=True, head_dim=16)
    section = {"eagle_aux_hidden_state_layer_ids": [5, 6, DEPTH], "norm_before_fc": True, "use_aux_hidden_state": True}
    return spellings.write(folder, *eagle3(made, eagle_config=section))


def eagle3_last_state(folder: Path) -> Path:
    made = eagle3_drafter(deep_gpt_oss(), target_layer_ids=[DEPTH - 1], use_aux_hidden_state=False)
    return spellings.write(folder, *eagle3(made, eagle_config={"use_aux_hidden_state": False}))


def eagle3_pickle(folder: Path) -> Path:
    eagle3_folder(folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 6, "v_head_dim": 5}


def eagle3_latent(folder: Path, **variant: Any) -> Path:
    """Kimi's: latent attention in the draft layer; `fc_norm` and `norm_output` in EAGLE-3.1's."""
    made = eagle3_drafter(deep_llama(), **LATENT, num_key_value_heads=4, head_dim=4, rotary_interleaved=True, **variant)
    yarn = {
        "type": "yarn",
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 128,
    }
    config, tensors = eagle3(
        made, architectures=["Eagle3DeepseekV2ForCausalLM"], model_type="kimi_k2", head_dim=None, rope_scaling=yarn
    )
    config |= LATENT | {"qk_rope_head_dim": 4, "num_key_value_heads": 4, "eagle_config": variant or None}
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    return spellings.write(folder, {name: value for name, value in config.items() if value is not None}, named)


def _dflash2_folder(folder: Path, spell: Callable[..., dict[str, Any]], target: PreTrainedModel) -> Path:
    window = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False}
    made = dflash2_drafter(target, **window)
    return spellings.write(folder, spell(made), dict(made.state_dict()))


def _qwen35() -> PreTrainedModel:
    return hybrids.target("qwen3_5")


def _nemotron() -> PreTrainedModel:
    return hybrids.target("nemotron_h")


REPLICAS: dict[str, Replica] = {
    # DSpark
    "DeepSpec": Replica(lambda f: spellings.deepspec(dspark_drafter(), f)),
    "DeepSpec, Gemma 4": Replica(lambda f: gemma4_deepspec(f, dflash=False), tiny.gemma4),
    "DeepSpec fields over copied ones": Replica(inherited),
    "Qwen3.5 layers": Replica(qwen35_layers),
    "speculators": Replica(lambda f: spellings.speculators(dspark_drafter(), f)),
    "speculators, reduced vocabulary": Replica(lambda f: spellings.speculators(dspark_drafter(draft_vocab_size=40), f)),
    "speculators, no sample_from_anchor": Replica(
        lambda f: spellings.speculators(dspark_drafter(sample_from_anchor=False), f, sample_from_anchor=None)
    ),
    "speculators, last layer tapped": Replica(glm_flash, glm5_next),
    "speculators, FP8": Replica(
        lambda f: changed(
            spellings.speculators(dspark_drafter(), f),
            to_fp8,
            quantization_config={"quant_method": "compressed-tensors"},
        )
    ),
    "SpecForge": Replica(lambda f: spellings.specforge(dspark_drafter(), f)),
    "LFM2": Replica(
        lambda f: spellings.lfm2(dspark_drafter(hybrids.target("lfm2"), rotary_interleaved=True), f),
        lambda: hybrids.target("lfm2"),
    ),
    "DFlash class with a sequential head": Replica(lambda f: spellings.hybrid(dspark_drafter(), f)),
    "Nemotron": Replica(lambda f: nemotron(f, packed=False), _nemotron),
    "Nemotron, NVFP4": Replica(lambda f: nemotron(f, packed=True), _nemotron),
    "DeepSeek-V4": Replica(deepseek_v4, lambda: hybrids.build("deepseek_v4", vocab_size=96)),
    "DeepSeek-V4.1": Replica(
        lambda f: deepseek_v4(f, text_config={"dspark_block_size": 5}), refusal="DeepSeek-V4.1 embedded DSpark drafter"
    ),
    "K3": Replica(
        lambda f: with_tensors(f, ["layers.0.self_attn.kv_a_proj_with_mqa.weight"], architectures=["K3DSparkModel"]),
        refusal="latent-attention (MLA) DSpark drafter",
    ),
    "Bonsai": Replica(
        lambda f: with_tensors(f, ["log_snr_embed.fc1.weight"]), refusal="noise-conditioned (Bonsai) drafter"
    ),
    # DFlash
    "DeepSpec DFlash": Replica(lambda f: spellings.deepspec(dflash_drafter(sample_from_anchor=True), f)),
    "DeepSpec DFlash, Gemma 4": Replica(lambda f: gemma4_deepspec(f, dflash=True), tiny.gemma4),
    "z-lab DFlash": Replica(lambda f: spellings.zlab(dflash_drafter(), f)),
    "z-lab DFlash, recurrent target": Replica(lambda f: spellings.zlab(dflash_drafter(_qwen35()), f), _qwen35),
    "z-lab DFlash, mask vector in a pickle": Replica(mimo, refusal="mask_embedding.pt"),
    "transformers DFlash": Replica(lambda f: spellings.transformers_dflash(dflash_drafter(), f)),
    "speculators DFlash": Replica(lambda f: spellings.speculators(dflash_drafter(), f)),
    "speculators DFlash, recurrent target": Replica(
        lambda f: spellings.speculators(dflash_drafter(_nemotron()), f), _nemotron
    ),
    "speculators DFlash, DeepSeek-V4": Replica(
        lambda f: spellings.speculators(dflash_drafter(hybrids.target("deepseek_v4")), f),
        lambda: hybrids.target("deepseek_v4"),
    ),
    "ModelOpt DFlash, NVFP4": Replica(nemotron_dflash, _nemotron),
    "Laguna": Replica(laguna_folder),
    "Laguna, FP8": Replica(lambda f: laguna_folder(f, to_fp8)),
    "Laguna, INT4": Replica(lambda f: laguna_folder(f, to_int4)),
    "Laguna, NVFP4": Replica(lambda f: laguna_folder(f, to_nvfp4)),
    "Laguna, speculators": Replica(
        lambda f: spellings.write(f, *laguna_speculators(laguna_drafter(tiny.qwen3()))),
    ),
    # Others
    "DFlash2": Replica(lambda f: _dflash2_folder(f, dflash2, tiny.qwen3())),
    "DFlash2, recurrent target": Replica(lambda f: _dflash2_folder(f, dflash2, _qwen35()), _qwen35),
    "DFlash2, speculators": Replica(lambda f: _dflash2_folder(f, dflash2_speculators, tiny.qwen3())),
    "DFly": Replica(lambda f: with_tensors(f, ["layer_fusion_weights"]), refusal="DFly drafter"),
    # EAGLE-3
    "EAGLE-3, DeepSpec": Replica(eagle3_deepspec, deep_llama),
    "EAGLE-3, SpecForge": Replica(eagle3_folder, deep_llama),
    "EAGLE-3, SpecForge, recurrent target": Replica(
        lambda f: eagle3_folder(f, hybrids.build("qwen3_5", num_hidden_layers=DEPTH)),
        lambda: hybrids.build("qwen3_5", num_hidden_layers=DEPTH),
    ),
    "EAGLE-3, Llama 4 fields": Replica(eagle3_llama4, deep_llama),
    "EAGLE-3, speculators": Replica(eagle3_speculators, deep_llama),
    "EAGLE-3, speculators, taps named": Replica(
        lambda f: eagle3_speculators(f, eagle_aux_hidden_state_layer_ids=[2, 4, 5]), deep_llama
    ),
    "EAGLE-3, ModelOpt": Replica(eagle3_gpt_oss, deep_gpt_oss),
    "EAGLE-3, ModelOpt, last state": Replica(eagle3_last_state, deep_gpt_oss),
    "EAGLE-3, pickle": Replica(eagle3_pickle, deep_llama, refusal="Only safetensors files are read"),
    "EAGLE-3, latent attention": Replica(eagle3_latent, deep_llama),
    "EAGLE-3.1, latent attention": Replica(lambda f: eagle3_latent(f, fc_norm=True, norm_output=True), deep_llama),
    "P-EAGLE": Replica(
        lambda f: eagle3_speculators(f, speculators_model_type="peagle"), deep_llama, refusal="P-EAGLE drafter"
    ),
}
