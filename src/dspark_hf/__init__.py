"""DSpark speculative decoding for Hugging Face transformers.

After `import dspark_hf`, transformers' `generate` accepts a drafter:
`target.generate(**inputs, assistant_model=drafter)`.
"""

from .batching import GenerationRequest, GenerationResult, generate_many
from .drafter import Drafter
from .generation import (
    Attachment,
    SpeculationStats,
    attach,
    detach,
    dspark_generate,
    record_speculation,
    register,
    unregister,
)
from .kinds.deepseek_v4.configuration_deepseek_v4 import DeepseekV4DrafterConfig
from .kinds.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Drafter
from .kinds.dflash2.configuration_dflash2 import DFlash2Config
from .kinds.dflash2.modeling_dflash2 import DFlash2Drafter
from .kinds.dspark.configuration_dspark import DSparkConfig
from .kinds.dspark.modeling_dspark import DSparkDrafter
from .kinds.eagle3.configuration_eagle3 import Eagle3Config
from .kinds.eagle3.modeling_eagle3 import Eagle3Drafter
from .modeling_drafter import DrafterOutput
from .registry import register_kind

__version__ = "0.1.0"
__all__ = [
    "Attachment",
    "DFlash2Config",
    "DFlash2Drafter",
    "DSparkConfig",
    "DSparkDrafter",
    "DeepseekV4Drafter",
    "DeepseekV4DrafterConfig",
    "Drafter",
    "DrafterOutput",
    "Eagle3Config",
    "Eagle3Drafter",
    "GenerationRequest",
    "GenerationResult",
    "SpeculationStats",
    "attach",
    "detach",
    "dspark_generate",
    "generate_many",
    "record_speculation",
    "register",
    "register_kind",
    "unregister",
]

register_kind(DSparkDrafter)
register_kind(DFlash2Drafter)
register_kind(Eagle3Drafter)
register_kind(DeepseekV4Drafter)
register()
