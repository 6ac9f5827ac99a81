"""DSpark speculative decoding for Hugging Face transformers.

`import dspark_hf` is all it takes: `target.generate(**inputs, assistant_model=drafter)` then drafts with a
[`DSparkDrafter`].
"""

from transformers import AutoConfig, AutoModel

from .configuration_dspark import DSparkConfig
from .configuration_eagle3 import Eagle3Config
from .drafter import Drafter
from .generation import SpeculationStats, dspark_generate, record_speculation, register, unregister
from .modeling_dspark import DSparkDrafter, DSparkOutput
from .modeling_eagle3 import Eagle3Drafter

__version__ = "0.1.0"
__all__ = [
    "DSparkConfig",
    "DSparkDrafter",
    "DSparkOutput",
    "Drafter",
    "Eagle3Config",
    "Eagle3Drafter",
    "SpeculationStats",
    "dspark_generate",
    "record_speculation",
    "register",
    "unregister",
]

AutoConfig.register(DSparkConfig.model_type, DSparkConfig, exist_ok=True)
AutoModel.register(DSparkConfig, DSparkDrafter, exist_ok=True)
AutoConfig.register(Eagle3Config.model_type, Eagle3Config, exist_ok=True)
AutoModel.register(Eagle3Config, Eagle3Drafter, exist_ok=True)
register()
