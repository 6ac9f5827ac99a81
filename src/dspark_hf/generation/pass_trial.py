"""Whether a pass gives each token what it would get alone, which verifying several drafts in one pass relies on.

Two ways of running a target break it. Quantized layers may have one scale for the activations of all tokens of a pass, or
choose outlier columns for all of them: then a token gets another result when others stand beside it. And in training mode,
dropout makes every pass another, or checkpoints leave out the cache. No class or setting tells reliably, so both are tried.
"""

from __future__ import annotations

import contextlib
import weakref

import torch
from torch import nn
from transformers import PreTrainedModel

from ..embeddings import device_of
from ..trials import is_near, quantized_layers, trial_ids
from .requirements import refuse
from .rollback_trial import PromptedTarget

# How far the outputs of a layer may be apart on average, in standard deviations. Layers that treat each token by itself stay
# below .002, which is the rounding of bfloat16; others are above .015.
_TOLERANCE = 0.01

_mixes_tokens: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()


def check_passes(model: PreTrainedModel) -> None:
    """
    Refuses targets whose tokens depend on more than the tokens before them. Each quantized layer is tried once.

    Raises:
        ValueError: where tokens of a pass influence each other, or chance does.
    """
    layers = list(quantized_layers(model))
    untried = [layer for layer in layers if layer not in _mixes_tokens]
    if untried:
        with contextlib.suppress(Exception):  # Some formats unpack their weights in the first pass.
            PromptedTarget(model, trial_ids(model, 2)[None])
    for layer in untried:
        _mixes_tokens[layer] = mixes_tokens(layer, model.dtype)
    for layer in layers:
        if _mixes_tokens[layer]:
            refuse(
                f"its quantized layers ({type(layer).__name__}) give a token another result when other tokens are in the same "
                "pass, because they quantize the activations of all tokens together. Quantize weights only, or each token alone"
            )
    if model.training and not agrees_with_itself(model):
        refuse(
            f"{type(model).__name__} is in training mode, in which its passes differ: dropout is on, or gradient checkpointing "
            "leaves out the cache. Call eval() on the target"
        )


@torch.no_grad()
def mixes_tokens(layer: nn.Module, dtype: torch.dtype) -> bool:
    """
    Whether a linear layer gives a token another result when another one stands beside it.

    The first token has one large entry, so that 8 bits leave little for the others. The second token is far larger, so a scale or
    outlier columns that both share change what is left of the first.

    Args:
        layer: The layer, with a number of `in_features`.
        dtype: What the model computes in.
    """
    size = layer.in_features
    assert isinstance(size, int)
    states = torch.randn(1, 2, size, generator=torch.Generator().manual_seed(0))  # [1, 2, D]
    states *= torch.tensor([[0.1], [30.0]])
    states[0, 0, 0] = 5.0
    states = states.to(device_of(layer, torch.device("cpu")), dtype)
    try:
        alone, beside = layer(states[:, :1]).float(), layer(states)[:, :1].float()
    except Exception:  # It takes other inputs, or the model does not run here at all.
        return False
    return bool((beside - alone).abs().mean() > _TOLERANCE * alone.std())


@torch.no_grad()
def agrees_with_itself(model: PreTrainedModel) -> bool:
    """Whether tokens get the same logits in two equal passes, and nearly the same with fewer tokens in the cache."""
    ids = trial_ids(model, 8)[None]
    try:
        first, second, other = (PromptedTarget(model, ids[:, :n]).feed(ids[:, n:])[:, -4:] for n in (4, 4, 1))
    except Exception:  # It cannot be fed in this form, so nothing is known.
        return True
    return torch.equal(first, second) and is_near(other, first, model)
