"""The context of block drafters, whose keys and values of all layers can be computed together."""

from __future__ import annotations

import torch

from ..kinds.dspark.modeling_dspark import DSparkDrafter
from .draft_context import DraftContext

_FEW_TOKENS = 64  # Up to this many tokens per row, context is projected for all layers together.


class DSparkContext(DraftContext):
    """The context of the rows of a block drafter. The tokens of a round are projected for all layers in one product."""

    drafter: DSparkDrafter

    def __init__(self, drafter: DSparkDrafter, num_rows: int = 1):
        super().__init__(drafter, num_rows)
        self._projection = drafter.context_projection()

    def _extend_cache(self, features: torch.Tensor, positions: torch.Tensor, counts: list[int]) -> None:
        # For a prompt, one product per layer is large enough, and a joint one would hold all keys and values twice for a moment.
        projection = self._projection if features.shape[1] <= _FEW_TOKENS else None
        self.drafter.extend_cache(self.cache, features, positions, counts, projection)
