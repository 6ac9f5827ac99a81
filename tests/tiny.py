"""Tiny random targets and drafters, built in code in milliseconds.

`initializer_range` is .4: with the usual .02 a model this small repeats one token, and an output that never changes
hides every mistake of bookkeeping. There is no end-of-sequence token unless a test asks for one.

```python
import tiny

target = tiny.qwen3()                             # or tiny.TARGETS["gemma3"](seed=1, num_hidden_layers=6)
drafter = tiny.random_drafter(target)             # nearly every draft is rejected
drafter = tiny.perfect_drafter(tiny.bigram())     # every draft is accepted, at any temperature
```
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel

from dspark_hf import DSparkConfig, DSparkDrafter, Eagle3Config, Eagle3Drafter

VOCAB_SIZE = 128
HIDDEN_SIZE = 32
NUM_LAYERS = 4
SLIDING_WINDOW = 8
PAD_ID = 0
MASK_ID = VOCAB_SIZE - 1  # a token like any other to the target, which may well produce it
BLOCK_SIZE = 4

ALTERNATING = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)


# ---------------------------------------------------------------------- targets


def target_config(family: str, **fields: Any) -> PreTrainedConfig:
    """The configuration of a tiny target; `family` names its transformers class, as in `"Qwen3"`."""
    common = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 2 * HIDDEN_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "initializer_range": 0.4,
        "tie_word_embeddings": False,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return getattr(transformers, f"{family}Config")(**(common | fields))


def build_target(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A target with weights drawn from `seed`; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target = transformers.AutoModelForCausalLM.from_config(config)
    return target.eval().requires_grad_(False)


def qwen3(seed: int = 0, **fields: Any) -> PreTrainedModel:
    return build_target(target_config("Qwen3", **fields), seed)


def llama(seed: int = 0, **fields: Any) -> PreTrainedModel:
    return build_target(target_config("Llama", **fields), seed)


def mistral(seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Every layer has a sliding window."""
    return build_target(target_config("Mistral", **({"sliding_window": SLIDING_WINDOW} | fields)), seed)


def gemma3(seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Sliding and full layers, scaled embeddings."""
    own = {"sliding_window": SLIDING_WINDOW, "layer_types": ALTERNATING, "query_pre_attn_scalar": 8}
    return build_target(target_config("Gemma3Text", **(own | fields)), seed)


def gemma4(seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Sliding and full layers, the full ones with keys as values; scaled embeddings; soft-capped logits."""
    own = {
        "sliding_window": SLIDING_WINDOW,
        "layer_types": ALTERNATING,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 30.0,
    }
    return build_target(target_config("Gemma4Text", **(own | fields)), seed)


def gpt_oss(seed: int = 0, **fields: Any) -> PreTrainedModel:
    """Sliding and full layers with attention sinks, and a mixture of experts."""
    own = {
        "sliding_window": SLIDING_WINDOW,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    return build_target(target_config("GptOss", **(own | fields)), seed)


def qwen3_moe(seed: int = 0, **fields: Any) -> PreTrainedModel:
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": HIDDEN_SIZE, "decoder_sparse_step": 1}
    return build_target(target_config("Qwen3Moe", **(own | fields)), seed)


def qwen3_5(seed: int = 0, **fields: Any) -> PreTrainedModel:
    """A hybrid: three layers of gated delta rule, whose state cannot be cropped, and one of full attention."""
    own = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    return build_target(target_config("Qwen3_5Text", **(own | fields)), seed)


def bigram(seed: int = 0, build: Callable[..., PreTrainedModel] = qwen3, **fields: Any) -> PreTrainedModel:
    """A target whose every layer adds nothing, so that its distribution depends on the last token alone."""
    target = build(seed, **fields)
    for name, weight in target.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    return target


TARGETS: dict[str, Callable[..., PreTrainedModel]] = {
    "qwen3": qwen3,
    "llama": llama,
    "mistral": mistral,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "gpt_oss": gpt_oss,
    "qwen3_moe": qwen3_moe,
    "qwen3_5": qwen3_5,
}
SLIDING_TARGETS = ("mistral", "gemma3", "gemma4", "gpt_oss")
HYBRID_TARGETS = ("qwen3_5",)


def transition_logits(target: PreTrainedModel) -> torch.Tensor:
    """The distribution of a [`bigram`] target in closed form: logits `[V, V]` of the next token, one row per last token."""
    logits = target.get_output_embeddings()(_bigram_states(target))
    cap = getattr(target.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


def _bigram_states(target: PreTrainedModel) -> torch.Tensor:
    """The last hidden state of a [`bigram`] target after each token, `[V, D]`."""
    return target.get_decoder().norm(target.get_input_embeddings()(torch.arange(VOCAB_SIZE)))


# ---------------------------------------------------------------------- drafters


def drafter_config(target: PreTrainedModel, **fields: Any) -> DSparkConfig:
    """A tiny drafter's configuration for `target`; `fields` are those of `DSparkConfig.for_target`."""
    own = {
        "block_size": BLOCK_SIZE,
        "num_hidden_layers": 2,
        "markov_rank": 8,
        "mask_token_id": MASK_ID,
        "initializer_range": 0.4,
    }
    return DSparkConfig.for_target(target.config, **(own | fields))


def build_drafter(config: DSparkConfig, seed: int = 0) -> DSparkDrafter:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = DSparkDrafter(config)
    return drafter.eval()


def random_drafter(target: PreTrainedModel, seed: int = 0, **fields: Any) -> DSparkDrafter:
    """A drafter that has learnt nothing: nearly all it drafts is rejected."""
    return build_drafter(drafter_config(target, **fields), seed)


def perfect_drafter(target: PreTrainedModel, block_size: int = BLOCK_SIZE, **fields: Any) -> DSparkDrafter:
    """
    A drafter whose distribution is exactly the target's, by construction: the sequential head IS the [`bigram`] target.

    The final norm's weight is 0, so the base logits are 0; `W1[v]` is the target's last hidden state after token `v`
    and `W2` its LM head. A confidence head says .99 everywhere.
    """
    for name, weight in target.named_parameters():
        assert not (name.endswith(("o_proj.weight", "down_proj.weight")) and weight.any()), "needs tiny.bigram()"
    assert not getattr(target.config, "final_logit_softcapping", None), "the transition bias is never capped"
    drafter = random_drafter(target, block_size=block_size, **({"markov_rank": target.config.hidden_size} | fields))
    head = target.get_output_embeddings().weight  # [V, D]
    if drafter.draft_token_ids is not None:
        head = head[drafter.draft_token_ids]
    with torch.no_grad():
        drafter.norm.weight.zero_()
        drafter.markov_head.markov_w1.weight.copy_(_bigram_states(target))
        drafter.markov_head.markov_w2.weight.copy_(head)
        if drafter.confidence_head is not None:
            drafter.confidence_head.proj.weight.zero_()
            drafter.confidence_head.proj.bias.fill_(4.6)
    return drafter


def eagle3_drafter(target: PreTrainedModel, seed: int = 0, **fields: Any) -> Eagle3Drafter:
    """An EAGLE-3 drafter that has learnt nothing; `fields` are those of `Eagle3Config.for_target`."""
    config = Eagle3Config.for_target(target.config, **({"block_size": BLOCK_SIZE, "initializer_range": 0.4} | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = Eagle3Drafter(config)
    return drafter.eval()


def perfect_eagle3_drafter(target: PreTrainedModel, **fields: Any) -> Eagle3Drafter:
    """
    An EAGLE-3 drafter whose distribution is exactly that of a [`bigram`] target.

    Its attention sees nothing but its own step (queries and keys are one constant, so that their score has a sharp peak
    at distance 0), and the value there is the token's normed embedding less the normed state: that takes the old state off
    the residual stream and leaves the token's.
    """
    own = {"qk_norm": False, "attention_bias": True, "num_key_value_heads": target.config.num_attention_heads}
    drafter = eagle3_drafter(target, **(own | fields))
    attention, size = drafter.layers[0].self_attn, target.config.hidden_size
    with torch.no_grad():
        for parameter in (*attention.parameters(), *drafter.layers[0].mlp.parameters(), *drafter.fc.parameters()):
            parameter.zero_()
        attention.q_proj.bias.fill_(20.0)
        attention.k_proj.bias.fill_(20.0)
        attention.v_proj.weight.copy_(torch.cat([torch.eye(size), -torch.eye(size)], dim=1))
        attention.o_proj.weight.copy_(torch.eye(size))
        drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    return drafter


# ---------------------------------------------------------------------- inputs


def prompt(length: int = 9, seed: int = 0, num_rows: int = 1) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` of random prompts, `[num_rows, length]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB_SIZE - 1, (num_rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def left_padded(*prompts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Several one-row prompts as one batch, padded on the left."""
    longest = max(p["input_ids"].shape[1] for p in prompts)

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(tensor, (longest - tensor.shape[1], 0), value=PAD_ID)

    return {name: torch.cat([padded(p[name]) for p in prompts]) for name in ("input_ids", "attention_mask")}
