"""What the Hub shows of a drafter, and what lies beside its weights there.

Three files may lie beside a drafter's weights. They are pushed with them, and the model card is made from them:

| file | what it says | who writes it |
|---|---|---|
| `training.json` | how the drafter was trained | [`TrainingSummary.save`], called by whatever trained it |
| `results.json` | what it was measured to be worth | `dspark-hf bench` |
| `throughput_curve.json` | what a target pass costs | [`~dspark_hf.scheduling.ThroughputCurve.save`] |

Who has just trained a drafter and saved it in a folder leaves the same card there that a push would make:

```python
TrainingSummary(command="dspark-hf train ...", settings={"learning_rate": 6e-4}, results={"loss": 1.2}).save(folder)
write_card(drafter, folder)
```

A card that somebody wrote or changed is never replaced.
"""

from .card import build_card, is_generated, write_card
from .custom_generate import write_custom_generate
from .pushing import Commit, push
from .training_summary import TrainingSummary

__all__ = ["Commit", "TrainingSummary", "build_card", "is_generated", "push", "write_card", "write_custom_generate"]
