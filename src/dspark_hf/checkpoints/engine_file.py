"""A format that both vLLM and SGLang load: DeepSpec's, with explicit values for every field that either of them guesses.

It is read as a DeepSpec file; only writing differs.
"""

from __future__ import annotations

from typing import Any

from ..kinds.dspark.configuration_dspark import DSparkConfig
from . import deepspec


def write_config(config: DSparkConfig) -> dict[str, Any]:
    written = deepspec.write_config(config) | {
        "sample_from_anchor": config.sample_from_anchor,
        "dspark_bonus_anchor": not config.sample_from_anchor,
    }
    section: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids}
    if not config.markov_rank:  # Both engines have a separate class for plain DFlash.
        written["architectures"] = ["DFlashDraftModel"]
    if config.draft_vocab_size:
        written["draft_vocab_size"] = config.draft_vocab_size
    # Both engines apply this field to all layers. Without it, sliding layers are causal and full ones are not.
    if config.uniformly_causal is not None:
        written["is_causal"] = config.uniformly_causal
    if config.rotary_interleaved:
        written |= {"is_neox_style": False, "rope_is_neox_style": False}
    if config.attention_sinks:
        section["attention_sink_bias"] = True
    if config.target_hidden_size != config.hidden_size:
        written["target_hidden_size"] = config.target_hidden_size
    return written | {"dflash_config": section}
