"""Two processes that share a batch train as one that has all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
import tiny
from conftest import make_rows
from dspark_hf.training.arguments import DSparkTrainingArguments
from dspark_hf.training.trainer import DSparkTrainer

folder, batch_size = sys.argv[1], int(sys.argv[2])
uneven = make_rows(8) + [{"input_ids": [5, 6, 7, 8, 9, 10, 11], "loss_mask": [0, 0, 0, 0, 0, 1, 1]}] * 8
target = tiny.qwen3()
args = DSparkTrainingArguments(
    folder, use_cpu=True, report_to="none", num_anchors=4, logging_steps=1, save_strategy="no", max_steps=3,
    per_device_train_batch_size=batch_size, learning_rate=1e-3, disable_tqdm=True, ddp_backend="gloo",
)
trainer = DSparkTrainer(tiny.random_drafter(target), target, args, train_dataset=uneven, eval_dataset=uneven)
trainer.train()
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print("RESULT", json.dumps([[e["loss"] for e in trainer.state.log_history if "loss" in e], metrics["eval_loss"]]))
"""


def run(folder: Path, processes: int, batch_size: int) -> list:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, str(script), str(folder / "out"), str(batch_size)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = run(tmp_path / "one", 1, 8), run(tmp_path / "two", 2, 4)
    assert two[0] == pytest.approx(one[0], rel=1e-4)
    assert two[1] == pytest.approx(one[1], rel=1e-4)
