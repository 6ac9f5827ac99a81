"""Targets whose rotary positions change with the length of a pass: `dynamic` and `longrope` scaling."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from .transformers_names import modules_of


class RopeLimit(NamedTuple):
    """
    The length up to which the rotary frequencies of a target are the original ones.

    Each pass chooses them by its largest position, for all of its tokens. So a draft beyond the limit would change
    how the tokens before it are rotated, where token-by-token decoding rotates each by its own position.

    Args:
        kind: `"dynamic"` (frequencies change with every token beyond the limit) or `"longrope"` (one other set beyond it).
        length: The limit, in tokens.
        num_padding: Padding tokens of the row, which have no position.
    """

    kind: str
    length: int
    num_padding: int = 0

    def max_drafts(self, num_tokens: int) -> int:
        """
        How many drafts may be verified such that every token is rotated as if it were decoded alone.

        Args:
            num_tokens: Tokens of the row so far, including the anchor and padding.
        """
        # All tokens after the change have the frequencies of long sequences. Some models discard their cache at the change
        # and process the whole sequence again; no draft is verified in that pass.
        if self.kind == "longrope" and num_tokens - self.num_padding > self.length + 1:
            return sys.maxsize
        return max(0, self.length - num_tokens)


def rope_limit(model: torch.nn.Module) -> RopeLimit | None:
    """The limit of a target; `None` for targets whose frequencies never change, which most are."""
    for module in modules_of(model):
        kinds = vars(module).get("rope_type")
        for layer_type, kind in (kinds if isinstance(kinds, dict) else {None: kinds}).items():
            if kind == "longrope":
                parameters = vars(module)["config"].rope_parameters
                parameters = parameters if layer_type is None else parameters[layer_type]
                return RopeLimit("longrope", parameters["original_max_position_embeddings"])
            if kind is not None and "dynamic" in kind:
                return RopeLimit("dynamic", vars(module)["original_max_seq_len"])
    return None
