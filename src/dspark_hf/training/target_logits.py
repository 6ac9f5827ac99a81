"""The factor and soft cap that a target applies to the output of its LM head to get its logits.

Model families have different names for the factor, and the same name can mean multiplication in one family and division in
another (Cohere's `logit_scale`, Granite's and HyperCLOVA X's `logits_scaling`, Falcon-H1's `lm_head_multiplier`). So it is
measured instead of being read from the configuration.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from ..embeddings import target_embeddings
from ..target_config import logit_softcap
from ..transformers_names import compute_device

_TOKENS = 16  # Tokens of the text used for measuring.
_SAME = 5e-3  # A factor closer to 1 than this counts as 1, because 16-bit logits are not more precise.
_UNEXPLAINED = 0.05  # Largest share of the logits' norm that factor and soft cap do not explain, because of rounding.


class LogitRule(NamedTuple):
    """
    Args:
        scale: Factor on the LM head's output.
        softcap: `c` in `c * tanh(logits / c)`, applied after the factor; `None` for no soft cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's logits in float32, from the head's output `[..., V]`, which is not modified."""
        logits = logits.to(torch.float32, copy=True)
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


@torch.no_grad()
def logit_rule(target: PreTrainedModel) -> LogitRule:
    """
    Compares the target's logits with its LM head's output on a few tokens.

    Raises:
        ValueError: when a factor and the configured soft cap do not explain the logits. The drafter would then learn a
            distribution that is not the target's.
    """
    text = target.config.get_text_config(decoder=True)
    softcap = logit_softcap(text)
    lm_head = target_embeddings(target)[1]
    ids = torch.arange(1, 1 + _TOKENS, device=compute_device(target))[None] % text.vocab_size  # [1, T]
    theirs = target(input_ids=ids, use_cache=False).logits.double()  # [1, T, V]
    states = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    head = lm_head(states).to(theirs.device).double()
    plain = theirs if softcap is None else softcap * torch.atanh((theirs / softcap).clamp(-0.999, 0.999))
    inside = torch.isfinite(theirs) if softcap is None else (theirs / softcap).abs() < 0.99  # Others say little.
    head, plain = head[inside], plain[inside]
    scale = float((head * plain).sum() / (head * head).sum().clamp_min(1e-12))
    unexplained = float((plain - scale * head).norm() / plain.norm().clamp_min(1e-12))
    if unexplained > _UNEXPLAINED:
        raise ValueError(
            f"The logits of {type(target).__name__} are not its LM head's output times a factor, under a soft cap of "
            f"{softcap} ({unexplained:.0%} of them is unexplained), so its distribution cannot be computed from hidden states "
            "and a drafter would learn another one. Train for a target of another family."
        )
    return LogitRule(1.0 if abs(scale - 1) < _SAME else scale, softcap)
