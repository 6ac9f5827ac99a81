"""The model card of a drafter, and the files that are pushed to the Hub with its weights.

Three files in the folder of a drafter's weights are pushed with it, and the model card reports what they hold:

| file | content | written by |
|---|---|---|
| `training.json` | how the drafter was trained | [`TrainingSummary.save`], called by `dspark-hf train` |
| `results.json` | acceptance and speed | `dspark-hf bench` |
| `throughput_curve.json` | the cost of a target pass | [`~dspark_hf.scheduling.ThroughputCurve.save`] |

After training without this package's trainer, this writes the card that a push would write:

```python
TrainingSummary(command="dspark-hf train ...", settings={"learning_rate": 6e-4}, results={"loss": 1.2}).save(folder)
write_card(drafter, folder)
```

A card that was written or edited by hand is never replaced.
"""

from .card import build_card, is_generated, write_card
from .custom_generate import write_custom_generate
from .pushing import Commit, push
from .training_summary import TrainingSummary

__all__ = ["Commit", "TrainingSummary", "build_card", "is_generated", "push", "write_card", "write_custom_generate"]
