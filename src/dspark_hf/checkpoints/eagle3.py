"""
EAGLE-3 drafters: DeepSpec's (`layers.0.`), SpecForge's and AngelSlim's (`midlayer.`), and those of the speculators package.

They are the same layer everywhere. DeepSpec names its taps by outputs, the others by inputs (`eagle_aux_hidden_state_layer_ids`,
sometimes in `eagle_config`); many files name none, since their engines assume the inputs of layers 2, N / 2 and N - 3 of
a target with N layers. N is in no file of the drafter, so nothing is assumed here.
"""

from __future__ import annotations

from typing import Any

from ..kinds.eagle3.configuration_eagle3 import Eagle3Config
from .fields import Fields, layer_fields
from .files import TensorInfo
from .speculators import decoder_fields, verifier

NAME = "EAGLE-3"
TENSOR = "layers.0.hidden_norm.weight"  # Of EAGLE-3's layer alone.

# Tokens drafted a round where the file does not say: the steps unrolled in the paper's training.
BLOCK_SIZE = 7


def recognise(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> bool:
    named = any("Eagle3" in str(name) for name in config.get("architectures") or ())
    return named or config.get("speculators_model_type") == "eagle3" or TENSOR in tensors


def read_config(config: dict[str, Any], tensors: dict[str, TensorInfo]) -> Eagle3Config:
    """
    Raises:
        ValueError: when the taps are not named, or the layer is not EAGLE-3's.
    """
    if config.get("speculators_model_type") is not None:
        layers = decoder_fields(config.get("transformer_layer_config"))
        own = {
            name: value for name, value in config.items() if name != "transformer_layer_config" and value is not None
        }
        config = layers | own | {"target_name_or_path": verifier(config), "num_hidden_layers": 1}
    config = config | {"num_hidden_layers": config.get("draft_num_hidden_layers", config.get("num_hidden_layers"))}
    fields = Fields(config)
    if not isinstance(inputs := config.get("eagle_aux_hidden_state_layer_ids"), list):
        inputs = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    if fields.get("target_layer_ids") is None and inputs is None:
        raise ValueError(
            "It does not say which target layers feed it. Most such drafters read the inputs of layers 2, N / 2 and N - 3 of a "
            'target with N layers: check that, and add "eagle_aux_hidden_state_layer_ids": [2, N / 2, N - 3] to its '
            "config.json."
        )
    taps = {} if inputs is None else {"eagle_aux_hidden_state_layer_ids": inputs}
    has_query_norms = "layers.0.self_attn.q_norm.weight" in tensors
    own = layer_fields(config | taps, tensors, Eagle3Config.layer_families["qwen3" if has_query_norms else "llama"])
    own |= {
        "block_size": fields.get("block_size", "ttt_length", default=BLOCK_SIZE),
        "norm_before_residual": bool(fields.get("norm_before_residual")),
        "target_name_or_path": fields.get("target_name_or_path", "target_model_name_or_path"),
    }
    return Eagle3Config(**own)
