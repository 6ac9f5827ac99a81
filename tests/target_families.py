"""
A tiny model of every causal and every image-text class of transformers.

Most configurations follow from their class: every field whose name is in `SMALL` gets that value, in the parts of a composite
configuration too. `SPECIAL` holds what a family needs beyond that. Weights are drawn wide, so that outputs vary.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from generation import hybrids
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import tiny

MAPPINGS: dict[str, dict[str, Any]] = {
    "causal": dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image-text": dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}

_LAYERS = tiny.NUM_LAYERS
IMAGE_ID = 100  # The token that stands for a part of an image.
SMALL: dict[str, Any] = {
    "vocab_size": tiny.VOCAB_SIZE,
    "pad_token_id": tiny.PAD_ID,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.4,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    # widths
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "dim_model": 32,
    "emb_dim": 32,
    "embedding_size": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 64,
    "ffn_dim": 64,
    "n_inner": 64,
    "dim_ff": 64,
    "decoder_ffn_dim": 64,
    "encoder_ffn_dim": 64,
    "ffn_hidden_size": 64,
    # depth
    "num_hidden_layers": _LAYERS,
    "num_layers": _LAYERS,
    "n_layer": _LAYERS,
    "n_layers": _LAYERS,
    "decoder_layers": _LAYERS,
    "encoder_layers": _LAYERS,
    # heads
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_attention_groups": 2,
    "head_dim": 8,
    "dim_head": 8,
    "attention_head_dim": 8,
    "kv_channels": 8,
    "rotary_dim": 8,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24,
    "expert_ffn_hidden_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "is_decoder": True,
    "vocab_size_per_layer_input": tiny.VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    # compressed keys and values
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 24,
    "index_head_dim": 16,
    "index_topk": 4,
    # windows
    "sliding_window": tiny.SLIDING_WINDOW,
    "attention_chunk_size": tiny.SLIDING_WINDOW,
    "window_size": tiny.SLIDING_WINDOW,
    "attention_window_size": tiny.SLIDING_WINDOW,
    # recurrent states
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "lru_width": 32,
    # pixels and sounds
    "image_size": 16,
    "patch_size": 4,
    "out_hidden_size": 32,
    "projection_dim": 32,
    "depth": 2,
    "num_channels": 3,
    "in_channels": 3,
    "mm_hidden_size": 32,
    "spatial_merge_size": 1,
    "temporal_patch_size": 1,
    "num_mel_bins": 16,
    "mm_tokens_per_image": 4,
    "image_grid_pinpoints": [[16, 16]],
    "projection_hidden_size": 32,
    "image_token_id": IMAGE_ID,
    "image_token_index": IMAGE_ID,
    "video_token_id": 101,
    "video_token_index": 101,
    "audio_token_id": 102,
    "audio_token_index": 102,
    "vision_start_token_id": 103,
    "image_start_token_id": 103,
    "vision_end_token_id": 104,
    "image_end_token_id": 104,
    "video_start_token_id": 105,
    "video_end_token_id": 106,
    "max_source_positions": 32,
}


def class_of(mapping: str, model_type: str) -> str:
    """The name of the model class that a mapping has for a type of configuration."""
    found = MAPPINGS[mapping][model_type]
    return found if isinstance(found, str) else found[0]


def config_of(model_type: str, mapping: str = "causal") -> PreTrainedConfig:
    """A tiny configuration."""
    return _shrunk(CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {}))


def _shrunk(config_class: type[PreTrainedConfig], special: dict[str, Any]) -> PreTrainedConfig:
    default = config_class()
    known = {name for name in SMALL if name in vars(default) or name in _parameters(config_class)}
    fields = {name: SMALL[name] for name in known if name not in config_class.attribute_map}
    if (
        "kv_lora_rank" in fields and "num_key_value_heads" in fields
    ):  # The heads are expanded from the compressed keys and values.
        fields |= {"num_key_value_heads": fields.get("num_attention_heads", 4)}
        fields.pop("head_dim", None)
    if "mrope_section" in getattr(config_class, "ignore_keys_at_rope_validation", ()) and "rope_parameters" in vars(
        default
    ):
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    for name, part in getattr(config_class, "sub_configs", {}).items():
        value = getattr(default, name, None)
        part_class = type(value) if isinstance(value, PreTrainedConfig) else part
        if name in special and isinstance(special[name], PreTrainedConfig):
            continue
        if special.get(name) is DEFAULT:
            continue
        if isinstance(part_class, type) and part_class.__name__ != "AutoConfig":
            fields[name] = _shrunk(part_class, special.get(name, {}))
    own = {
        name: value
        for name, value in special.items()
        if name not in fields or not isinstance(value, dict) or name not in getattr(config_class, "sub_configs", {})
    }
    fields = {name: value for name, value in (fields | own).items() if value is not DEFAULT}
    if fields.get("head_dim", 0) is None:
        del fields["head_dim"]
    return config_class(**fields)


def _parameters(config_class: type) -> set[str]:
    return set(inspect.signature(config_class.__init__).parameters)


DEFAULT = object()  # As a value in SPECIAL: the field stays at its default.

_IDS = {"bos_token_id": 1, "eos_token_id": 2}
_DOTS3 = {"num_key_value_heads": 4}
_KOSMOS = {"embed_dim": 32, "layers": _LAYERS, "attention_heads": 4}
_BY_LAYER = {kind: {"rope_type": "default", "rope_theta": 10_000.0} for kind in ("full_attention", "sliding_attention")}
_IMAGE_VOCABULARY = {"<image>": IMAGE_ID, "<|extra_200|>": 101} | {
    f"IMGIMG{c}Z": 102 + i for i, c in enumerate("ABCDEFGH")
}
_QWEN4 = {
    "indexer_n_heads": 24,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_lowrank": 8,
    "ngram_vocab_size_base": 200,
    "split_ngram_parts": 2,
}
SPECIAL: dict[str, dict[str, Any]] = {family: dict(fields) for family, (_, fields) in hybrids.FAMILIES.items()} | {
    "lfm2_moe": dict(hybrids.FAMILIES["lfm2_moe"][1]),
    "jamba": dict(hybrids.WRONG_FAMILIES["jamba"][1]),
    "zamba": dict(hybrids.WRONG_FAMILIES["zamba"][1]),
    "cwm": _IDS,
    "emu3": {"text_config": _IDS, "vocabulary_map": _IMAGE_VOCABULARY},
    "mllama": {
        "text_config": _IDS,
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
    },
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "vipllava": {"vision_feature_layer": [-2, -1]},
    "kimi_k25": {"vision_config": {"merge_kernel_size": [1, 1]}},
    "modernbert-decoder": _IDS,
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "dots1": {"n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "pyramid_num_routed": [-1, -1, 4, 4],
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "adapter_merge_size": 1,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": _DOTS3,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2_vl": {"text_config": dict(hybrids.FAMILIES["lfm2"][1])},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (16, 16)},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "time_step_min": 1e-9,  # As for Nemotron-H.
    },
    "qwen3_vl_moe": {"text_config": {"sliding_window": None}},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 103, "text_config": {"sliding_window": None}},
    "dbrx": {
        "attn_config": {"rope_theta": 10_000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
    "zaya": {"num_experts_per_tok": 1},
    "cohere_compass_text": {"rope_parameters": _BY_LAYER},
    "cohere_compass": {"text_config": {"rope_parameters": _BY_LAYER}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "longcat_flash": {"head_dim": 8},
    "inkling2_text": {"unpadded_vocab_size": tiny.VOCAB_SIZE},
    "inkling2_loop_text": {"unpadded_vocab_size": tiny.VOCAB_SIZE},
    "inkling2": {"text_config": {"unpadded_vocab_size": tiny.VOCAB_SIZE}, "vision_config": {"text_hidden_size": 32}},
    "inkling2_loop": {
        "text_config": {"unpadded_vocab_size": tiny.VOCAB_SIZE},
        "vision_config": {"text_hidden_size": 32},
    },
    "qwen4_exp_text": _QWEN4,
    "qwen4_exp": {"text_config": _QWEN4},
    "glm4v_moe": {"text_config": {"partial_rotary_factor": 1.0}},
    "florence2": {"vision_config": DEFAULT},
    "molmo2": {"vision_config": DEFAULT},
    "glm5_next": {"text_config": {"index_topk": 16, "qk_rope_head_dim": 0}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [24, 24]}},
    "chameleon": {"vocabulary_map": _IMAGE_VOCABULARY, "vq_config": {"num_embeddings": 8}},
    "llama4": {
        "vision_config": {
            "intermediate_size": 128,
            "projector_input_dim": 32,
            "projector_output_dim": 32,
            "vision_output_dim": 32,
        }
    },
    "muse_glimmer": {"out_hidden_size": 128},
    "muse_spark": {"out_hidden_size": 128},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}},
    "diffusion_gemma": {"text_config": {"top_k_experts": 2}},
    "granite4_vision": {
        "deepstack_layer_map": [[-1, 1]],
        "spatial_target_layers": [2],
        "downsample_rate": "1/2",
        "vision_config": {"hidden_size": 64},
    },
    "inkling_mm_model": {"vision_config": {"patch_size": 40, "temporal_patch_size": 2}},
    "nemotron_h_omni": {
        "text_config": dict(hybrids.FAMILIES["nemotron_h"][1]) | {"time_step_min": 1e-9},
        "vision_config": {"video_temporal_patch_size": 2},
    },
    # Plain decoding clamps time steps in passes over several tokens only, so that these differ from passes over one.
    "nemotron_h": dict(hybrids.FAMILIES["nemotron_h"][1]) | {"time_step_min": 1e-9},
    "apertus1p5": {
        "audio_config": {"codebook_dim": 32, "codebook_size": 8},
        "vision_config": {"codebook_size": 8},
        "image_token_offset": 108,
        "audio_token_offset": 116,
    },
    "kosmos-2": {"text_config": _KOSMOS},
    "kosmos-2.5": {"text_config": _KOSMOS},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "num_hidden_layers": tiny.NUM_LAYERS,
        "encoder_config": {"hidden_size_global": 32},
        "decoder_config": {"hidden_size_global": 32},
    },
    "paddleocr_vl": {
        "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}}
    },
    "qwen2_5_omni_thinker": {"vision_start_token_id": 103},
}


# Their loops amplify rounding, so that passes of other lengths give other tokens in float32.
CHAOTIC = ("hrm_text",)


def build(mapping: str, model_type: str, seed: int = 0) -> PreTrainedModel:
    """A tiny model in evaluation mode."""
    model_class = getattr(transformers, class_of(mapping, model_type))
    config = config_of(model_type, mapping)
    parts = {part: name for name, part in type(config).sub_configs.items()}
    if not isinstance(config, model_class.config_class) and model_class.config_class in parts:
        config = getattr(config, parts[model_class.config_class])  # Of a composite model, the part that is a decoder.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        _widen(model)
        # Without the user's word, the configurations of MPT and Evolla turn it off.
        model.generation_config.use_cache = True
        if hasattr(model, "set_default_language"):  # X-MOD
            model.set_default_language("en_XX")
    return model.eval().requires_grad_(False).to(torch.float64 if model_type in CHAOTIC else torch.float32)


def _widen(model: PreTrainedModel) -> None:
    """Matrices are drawn so that each layer changes what it gets; other weights stay as the class initialises them."""
    for name, weight in model.named_parameters():
        if weight.dim() >= 2 and not name.endswith(("A_log", "conv1d.weight")):
            fan_in = weight.shape[-1]
            with torch.no_grad():
                weight.normal_(0, 2.2 / fan_in**0.5)
        elif name.endswith(("_gate", "alpha_cross_attn", "alpha_dense")) and not weight.any():
            torch.nn.init.constant_(weight, 0.7)  # What comes from an image would not be let through.
    # A head that is the embedding answers a token with itself.
    head = model.get_output_embeddings()
    if isinstance(head, torch.nn.Linear):
        head.weight = torch.nn.Parameter(torch.randn(head.weight.shape) * 2.2 / head.weight.shape[1] ** 0.5)
