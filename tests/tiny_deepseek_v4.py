"""A tiny DeepSeek-V4: the target, and its checkpoint with the embedded drafter in the quantized layout of the released files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, PreTrainedModel

import tiny

HIDDEN_SIZE, WIDTH, NUM_EXPERTS, NUM_STREAMS, RANK, NUM_LAYERS = 64, 32, 6, 4, 8, 4
NUM_HEADS, HEAD_DIM, ROTATED, Q_RANK, GROUPS, O_RANK = 4, 16, 4, 32, 2, 16

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])

Tensors = dict[str, torch.Tensor]


def target(seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Sliding, compressed sparse and heavily compressed layers, the first with hash routing."""
    common = {
        "vocab_size": tiny.VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "moe_intermediate_size": WIDTH,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "q_lora_rank": Q_RANK,
        "partial_rotary_factor": ROTATED / HEAD_DIM,
        "num_experts_per_tok": 2,
        "n_routed_experts": NUM_EXPERTS,
        "max_position_embeddings": 512,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
        "hc_mult": NUM_STREAMS,
        "sliding_window": 8,
        "o_groups": GROUPS,
        "o_lora_rank": O_RANK,
        # With few heads the indexer's scores tie at 0, and the shape of a pass would choose among the tied.
        "index_n_heads": 24,
        "index_head_dim": 8,
        "index_topk": 3,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": tiny.PAD_ID,
    }
    config = DeepseekV4Config(**(common | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = DeepseekV4ForCausalLM(config)
        for name, buffer in made.named_buffers():
            if name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), NUM_EXPERTS).topk(buffer.shape[1]).indices)
    made.set_experts_implementation("eager")
    return made.eval().requires_grad_(False)


# ---------------------------------------------------------------------- the checkpoint

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "vocab_size": tiny.VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": NUM_LAYERS,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "qk_rope_head_dim": ROTATED,
    "q_lora_rank": Q_RANK,
    "o_groups": GROUPS,
    "o_lora_rank": O_RANK,
    "n_routed_experts": NUM_EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "swiglu_limit": 10.0,
    "hidden_act": "silu",
    "hc_mult": NUM_STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "compress_ratios": [0, 4, 128, 0, 0, 0, 0],
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
    "dspark_block_size": 5,
    "dspark_noise_token_id": tiny.MASK_ID,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_markov_rank": RANK,
}


def stored_tensors(seed: int = 0) -> Tensors:
    """The drafter's tensors under the names and in the types of the released files, random."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.2, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * std).to(dtype)

    def scale(*shape: int) -> torch.Tensor:
        return torch.randint(121, 126, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    def fp8(name: str, rows: int, columns: int) -> Tensors:
        weight = normal(rows, columns, std=8.0, dtype=torch.float8_e4m3fn)
        return {f"{name}.weight": weight, f"{name}.scale": scale(-(-rows // 128), -(-columns // 128))}

    def fp4(name: str, rows: int, columns: int) -> Tensors:
        packed = torch.randint(0, 256, (rows, columns // 2), generator=generator, dtype=torch.uint8).view(torch.int8)
        return {f"{name}.weight": packed, f"{name}.scale": scale(rows, columns // 32)}

    def streams(name: str, size: int, scales: int) -> Tensors:
        fn = normal(size, NUM_STREAMS * HIDDEN_SIZE, dtype=torch.float32)
        base, factor = normal(size, dtype=torch.float32), 1 + normal(scales, dtype=torch.float32)
        return {f"{name}_fn": fn, f"{name}_base": base, f"{name}_scale": factor}

    mixed, heads = (2 + NUM_STREAMS) * NUM_STREAMS, NUM_HEADS * HEAD_DIM
    tensors: Tensors = {}
    for stage in range(3):
        own = {"attn_norm.weight": 1 + normal(HIDDEN_SIZE), "ffn_norm.weight": 1 + normal(HIDDEN_SIZE)}
        own |= fp8("attn.wq_a", Q_RANK, HIDDEN_SIZE) | fp8("attn.wq_b", heads, Q_RANK)
        own |= fp8("attn.wkv", HEAD_DIM, HIDDEN_SIZE) | fp8("attn.wo_a", GROUPS * O_RANK, heads // GROUPS)
        own |= fp8("attn.wo_b", HIDDEN_SIZE, GROUPS * O_RANK)
        own |= {"attn.q_norm.weight": 1 + normal(Q_RANK), "attn.kv_norm.weight": 1 + normal(HEAD_DIM)}
        own |= {"attn.attn_sink": normal(NUM_HEADS, dtype=torch.float32)}
        own |= {"ffn.gate.weight": normal(NUM_EXPERTS, HIDDEN_SIZE)}
        own |= {"ffn.gate.bias": normal(NUM_EXPERTS, dtype=torch.float32)}
        for name, rows, columns in (("w1", WIDTH, HIDDEN_SIZE), ("w2", HIDDEN_SIZE, WIDTH), ("w3", WIDTH, HIDDEN_SIZE)):
            own |= fp8(f"ffn.shared_experts.{name}", rows, columns)
            for expert in range(NUM_EXPERTS):
                own |= fp4(f"ffn.experts.{expert}.{name}", rows, columns)
        own |= streams("hc_attn", mixed, 3) | streams("hc_ffn", mixed, 3)
        if stage == 0:
            own |= fp8("main_proj", HIDDEN_SIZE, 3 * HIDDEN_SIZE) | {"main_norm.weight": 1 + normal(HIDDEN_SIZE)}
        if stage == 2:
            own |= {"norm.weight": 1 + normal(HIDDEN_SIZE)} | streams("hc_head", NUM_STREAMS, 1)
            own |= {f"markov_head.markov_w{i}.weight": normal(tiny.VOCAB_SIZE, RANK) for i in (1, 2)}
            own |= {"confidence_head.proj.weight": normal(1, HIDDEN_SIZE + RANK)}
        tensors |= {f"mtp.{stage}.{name}": tensor for name, tensor in own.items()}
    return tensors


def unpacked(tensors: Tensors, name: str) -> torch.Tensor:
    """The numbers that a stored weight stands for, in float64, entry by entry as the format describes them."""
    weight, scale = tensors[name], tensors.get(name.removesuffix("weight") + "scale")
    if scale is None:
        return weight.double()
    factor = 2.0 ** (scale.view(torch.uint8).double() - 127)
    if weight.dtype == torch.int8:
        codes = weight.view(torch.uint8).int()
        numbers = torch.zeros(len(codes), 2 * codes.shape[1], dtype=torch.float64)
        for half, code in enumerate((codes % 16, codes // 16)):
            numbers[:, half::2] = FP4[code % 8] * torch.where(code < 8, 1.0, -1.0)
        rows, columns, block = torch.arange(len(numbers))[:, None], torch.arange(numbers.shape[1]), 32
        return numbers * factor[rows, columns // block]
    rows, columns = torch.arange(weight.shape[0])[:, None] // 128, torch.arange(weight.shape[1]) // 128
    return weight.double() * factor[rows, columns]


def write(folder: Path, tensors: Tensors | None = None, shards: int = 0, target_shards: int = 2, **fields: Any) -> Path:
    """
    A checkpoint of target and drafter.

    Args:
        folder: Where to.
        tensors: The drafter's; those of `stored_tensors` by default.
        shards: Shards that hold the drafter and nothing else, behind `target_shards` others; 0 for one file with everything.
        fields: Of the configuration; `None` leaves one out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {name: value for name, value in (CONFIG | fields).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = stored_tensors() if tensors is None else tensors
    others = {
        "embed.weight": torch.zeros(tiny.VOCAB_SIZE, HIDDEN_SIZE),
        "layers.0.attn.wkv.weight": torch.zeros(64, 64),
    }
    if not shards:
        save_file(others | tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names, total = sorted(tensors), shards + target_shards
    parts: list[Tensors] = [others] + [
        {f"layers.{i}.attn.wkv.weight": torch.zeros(64, 64)} for i in range(1, target_shards)
    ]
    parts += [{name: tensors[name] for name in names[i::shards]} for i in range(shards)]
    weight_map = {}
    for number, part in enumerate(parts, start=1):
        file = f"model-{number:05d}-of-{total:05d}.safetensors"
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
