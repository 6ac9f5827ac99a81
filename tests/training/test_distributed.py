"""Two processes that share a batch train as one that has all of it."""

import json
import os
import shutil
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

folder, options = sys.argv[1], json.loads(sys.argv[2])
uneven = make_rows(8) + [{"input_ids": [5, 6, 7, 8, 9, 10, 11], "loss_mask": [0, 0, 0, 0, 0, 1, 1]}] * 8
target = tiny.qwen3()
args = DSparkTrainingArguments(
    folder, use_cpu=True, report_to="none", num_anchors=4, logging_steps=1, max_steps=3, save_steps=2,
    learning_rate=1e-3, disable_tqdm=True, ddp_backend="gloo", **options,
)
trainer = DSparkTrainer(tiny.random_drafter(target), target, args, train_dataset=uneven, eval_dataset=uneven[3:])
trainer.train(resume_from_checkpoint=len(sys.argv) > 3)
metrics = trainer.evaluate()
if trainer.is_world_process_zero():
    print("RESULT", json.dumps([[e["loss"] for e in trainer.state.log_history if "loss" in e], metrics["eval_loss"]]))
"""


FSDP = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": True}


def run(folder: Path, processes: int, resume: bool = False, **options) -> list:
    """`[losses of the steps, held-out loss]` of a run in so many processes."""
    folder.mkdir(exist_ok=True)
    script = folder / "script.py"
    script.write_text(SCRIPT)
    here = Path(__file__).parent
    paths = [str(here), str(here.parent), *sys.path, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *launcher, str(script), str(folder / "out"), json.dumps(options), *["resume"] * resume]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in result.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, result.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT"))


@pytest.mark.slow
def test_the_trajectory_does_not_depend_on_how_a_batch_is_split(tmp_path):
    """
    One process or two, in one piece or four, whole or stopped and resumed in the other number of processes. Held-out rows do
    not fill the last batch of two processes, which accelerate fills up with rows that count already.
    """
    one = run(tmp_path / "one", 1, per_device_train_batch_size=8)
    two = run(tmp_path / "two", 2, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert two[0] == pytest.approx(one[0], rel=1e-4)
    assert two[1] == pytest.approx(one[1], rel=1e-4)
    shutil.rmtree(tmp_path / "two" / "out" / "checkpoint-3")  # What a run that was stopped after step 2 leaves behind.
    resumed = run(tmp_path / "two", 2, resume=True, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    assert resumed[0] == pytest.approx(one[0], rel=1e-4)
    assert resumed[1] == pytest.approx(one[1], rel=1e-4)


@pytest.mark.slow
def test_sharded_parameters_train_as_whole_ones(tmp_path):
    one = run(tmp_path / "one", 1, per_device_train_batch_size=8)
    sharded = run(
        tmp_path / "sharded", 2, per_device_train_batch_size=4, fsdp=True, fsdp_config=FSDP, save_strategy="no"
    )
    assert sharded[0] == pytest.approx(one[0], rel=1e-4)
    assert sharded[1] == pytest.approx(one[1], rel=1e-4)
