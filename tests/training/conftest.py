"""Rows to train on, and a trainer around a tiny drafter and its target."""

import pytest
import torch

import tiny
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.trainer import DSparkTrainer


def make_rows(count: int, length: int = 18, prompt: int = 5) -> list[dict]:
    """Rows of different lengths."""
    generator = torch.Generator().manual_seed(count)
    rows = []
    for index in range(count):
        size = length + index % 4
        ids = torch.randint(1, tiny.MASK_ID, (size,), generator=generator)
        rows.append({"input_ids": ids.tolist(), "loss_mask": [0] * prompt + [1] * (size - prompt)})
    return rows


KINDS = {"DSpark": tiny.random_drafter, "EAGLE-3": tiny.eagle3_drafter}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def new_drafter(request):
    """Makes a drafter for a target, of each kind that has a training of its own."""
    return request.param


@pytest.fixture
def make_trainer(tmp_path):
    """Builds a trainer; options that are fields of the arguments go there, the others to the trainer."""

    def build(drafter=None, target=None, folder="run", rows=None, eval_rows=None, callbacks=None, **options):
        target = target if target is not None else tiny.qwen3()
        drafter = drafter if drafter is not None else tiny.random_drafter(target)
        defaults = {
            "use_cpu": True,
            "report_to": "none",
            "num_anchors": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "learning_rate": 1e-3,
            "per_device_train_batch_size": 2,
        }
        args = DSparkTrainingArguments(tmp_path / folder, **(defaults | options))
        rows = make_rows(8) if rows is None else rows
        return DSparkTrainer(drafter, target, args, train_dataset=rows, eval_dataset=eval_rows, callbacks=callbacks)

    return build


@pytest.fixture
def rows():
    return make_rows
