"""The candidate generator of each kind of drafter."""

from __future__ import annotations

from ..drafter import Drafter
from ..kinds.dflash2.modeling_dflash2 import DFlash2Drafter
from ..kinds.dspark.modeling_dspark import DSparkDrafter
from ..kinds.eagle3.modeling_eagle3 import Eagle3Drafter
from .candidate_generator import DrafterCandidateGenerator
from .dflash2_candidate_generator import DFlash2CandidateGenerator
from .dspark_candidate_generator import DSparkCandidateGenerator
from .eagle3_candidate_generator import Eagle3CandidateGenerator

GENERATORS: dict[type[Drafter], type[DrafterCandidateGenerator]] = {
    DSparkDrafter: DSparkCandidateGenerator,
    DFlash2Drafter: DFlash2CandidateGenerator,
    Eagle3Drafter: Eagle3CandidateGenerator,
}


def generator_of(drafter: Drafter) -> type[DrafterCandidateGenerator]:
    """
    The candidate generator for a drafter of this class, or of the closest base class that has one.

    Raises:
        ValueError: when no generator is registered for its kind.
    """
    for kind in type(drafter).__mro__:
        if kind in GENERATORS:
            return GENERATORS[kind]
    raise ValueError(f"No candidate generator is known for {type(drafter).__name__}: add one to GENERATORS.")
