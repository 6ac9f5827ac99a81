"""Every writer of files in the package: a full disk leaves what was there before, and says so in one sentence."""

import ast
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny_folders
import torch
from full_disk import full_disk
from safetensors.torch import load_file

import dspark_hf
import dspark_hf_cli
import tiny
from dspark_hf import Drafter
from dspark_hf.evaluation import report
from dspark_hf.hub import TrainingSummary, write_card, write_custom_generate
from dspark_hf.scheduling import ThroughputCurve
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, add_lora, cache_features
from dspark_hf.training.history import write_csv
from dspark_hf.training.run import save_training_curve

Write = Callable[[], object]

# peft asks transformers for an attribute by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")

TARGET = tiny.qwen3()
CURVE = ThroughputCurve([1, 2, 4], [0.1, 0.11, 0.13])
DOCUMENT: dict[str, Any] = {"settings": {}, "environment": {}, "results": [], "identity": {}, "identity_note": ""}
HISTORY = [{"step": step, "loss": 1.0, "epoch": 0.1} for step in range(20)]
ROWS = [{"input_ids": list(range(1, 19)), "loss_mask": [0] * 4 + [1] * 14}] * 4


def drafter(**fields) -> Drafter:
    made = tiny.random_drafter(TARGET, **fields)
    made.bind(TARGET)
    made.config.target_name_or_path = "some/target"
    made.throughput_curve = CURVE
    return made


def trainer(folder: Path, adapter: bool = False) -> DSparkTrainer:
    model = drafter()
    if adapter:
        model.save_pretrained(folder.parent / "base")
        model = add_lora(Drafter.from_pretrained(folder.parent / "base"), 2, ["q_proj"])
    arguments = DSparkTrainingArguments(
        folder, use_cpu=True, report_to="none", num_anchors=2, max_steps=2, save_steps=1, disable_tqdm=True
    )
    return DSparkTrainer(model, TARGET, arguments, train_dataset=ROWS, processing_class=tiny_folders.tokenizer())


def saved(**options) -> Callable[[Path], Write]:
    return lambda folder: partial(drafter().save_pretrained, folder, **options)


# What is to be written to a folder, made while there is room; calling it writes.
WRITERS: dict[str, Callable[[Path], Write]] = {
    "save_pretrained": saved(),
    "save_pretrained in shards": saved(max_shard_size="50KB"),
    "save_pretrained with embeddings": saved(include_embeddings=True),
    "save_pretrained of EAGLE-3": lambda folder: partial(tiny.eagle3_drafter(TARGET).save_pretrained, folder),
    "export for both engines": saved(format="vllm-sglang"),
    "export to DeepSpec": saved(format="deepspec"),
    "export to speculators": saved(format="speculators"),
    "export to TensorRT-LLM": saved(format="modelopt"),
    "trainer of a drafter": lambda folder: trainer(folder).save_model,
    "trainer of an adapter": lambda folder: trainer(folder, adapter=True).save_model,
    "trainer's state": lambda folder: trainer(folder).save_state,
    "cost curve": lambda folder: partial(CURVE.save, folder / "curve.json"),
    "code for generate": lambda folder: partial(write_custom_generate, folder),
    "card": lambda folder: partial(write_card, drafter(), folder),
    "training summary": lambda folder: partial(TrainingSummary(command="dspark-hf train").save, folder),
    "table of the log": lambda folder: partial(write_csv, HISTORY, folder / "log.csv"),
    "figure of the training": lambda folder: partial(save_training_curve, HISTORY, folder / "curve.png"),
    "report": lambda folder: partial(report.write_html, DOCUMENT, folder / "report.html", {}),
}
MAKE_THEIR_FOLDER = ("save_pretrained", "export", "trainer", "code", "table")  # The others are given one.


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def writer(name: str, folder: Path) -> Write:
    if not name.startswith(MAKE_THEIR_FOLDER):
        folder.mkdir(parents=True)
    return WRITERS[name](folder)


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_nothing_and_says_so(name, tmp_path):
    writer(name, tmp_path / "whole" / "out")()
    whole = contents(tmp_path / "whole" / "out")
    folder = tmp_path / "other" / "out"
    write = writer(name, folder)
    for limit in {0, *(len(content) - 1 for content in whole.values())}:
        with full_disk(limit), pytest.raises(OSError, match="could not be written: ") as caught:
            write()
        assert "\n" not in str(caught.value) and str(caught.value).count("could not be written") == 1
        assert contents(folder) == {}, f"with files of up to {limit} bytes"
    write()
    assert contents(folder).keys() == whole.keys()


@pytest.mark.parametrize("name", [name for name in WRITERS if not name.startswith("export")])
def test_a_full_disk_leaves_what_was_there(name, tmp_path):
    folder = tmp_path / "out"
    write = writer(name, folder)
    write()
    before = contents(folder)
    smallest, largest = (choose(map(len, before.values())) for choose in (min, max))
    for limit in (smallest // 2, largest - 1):
        with full_disk(limit), pytest.raises(OSError, match="What was there before is unchanged"):
            write()
        assert contents(folder) == before


def test_shards_and_whole_files_replace_each_other(tmp_path):
    first, second = tiny.random_drafter(TARGET, seed=1), tiny.random_drafter(TARGET, seed=2)
    (tmp_path / "notes.safetensors").write_bytes(b"stays")
    for saved, options in ((first, {}), (second, {"max_shard_size": "50KB"}), (first, {})):
        saved.save_pretrained(tmp_path, **options)
        loaded = Drafter.from_pretrained(tmp_path)
        assert torch.equal(loaded.layers[0].mlp.up_proj.weight, saved.layers[0].mlp.up_proj.weight)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors*")) == ["model.safetensors", "notes.safetensors"]


def test_a_cache_whose_disk_is_full_resumes_with_the_next_shard(tmp_path):
    config = tiny.drafter_config(TARGET)

    def write() -> Path:
        return cache_features(TARGET, config, ROWS, tmp_path / "cache", shard_rows=2, progress=False)

    with full_disk(200), pytest.raises(OSError, match=r"safetensors' could not be written: File too large\."):
        write()
    assert [
        file for file in (tmp_path / "cache").iterdir() if file.suffix != ".lock" and file.name != "index.json"
    ] == []
    write()
    assert all(load_file(file) for file in (tmp_path / "cache").glob("*.safetensors"))


def test_a_checkpoint_that_finds_no_room_is_removed_and_the_last_whole_one_named(tmp_path):
    run = trainer(tmp_path)
    run.train()
    sizes = [file.stat().st_size for file in (tmp_path / "checkpoint-2").iterdir()]
    before = contents(tmp_path / "checkpoint-1")
    for limit in (min(sizes) - 1, max(sizes) - 1, (tmp_path / "checkpoint-2" / "model.safetensors").stat().st_size):
        with full_disk(limit), pytest.raises(OSError, match="checkpoint-1'; training resumes from it") as caught:
            run._save_checkpoint(run.model, None)
        assert "checkpoint-2' could not be saved and was removed" in str(caught.value)
        assert "\n" not in str(caught.value) and "could not be written" not in str(caught.value)
        assert not (tmp_path / "checkpoint-2").exists() and contents(tmp_path / "checkpoint-1") == before


# ----------------------------------------------------------------------------------------------- no writer is forgotten

# Files that are no result: the kernel's switch for its memory counters, and a folder that is deleted after a push.
OTHERS = {"meter.py", "pushing.py"}
WRITES = {"write_text", "write_bytes", "save_pretrained", "savefig", "save_file", "copyfile", "save_to_json", "save"}
HELPERS = {"write_text", "write_bytes"}  # Those of `storage.atomic`, when they are called as functions.


def unsafe_writes(source: str) -> list[str]:
    """Calls that write files, outside of a `with whole_file(...) as part` or `whole_files`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        opens = name == "open" and any(isinstance(a, ast.Constant) and str(a.value)[:1] in "wax" for a in node.args)
        helper = name in HELPERS and isinstance(node.func, ast.Name)
        if ((name in WRITES and not helper) or opens) and "part" not in {
            part.id for part in ast.walk(node) if isinstance(part, ast.Name)
        }:
            found.append(ast.unparse(node))
    return found


# What writes whole files itself, or into a buffer.
SAFE = {
    "self.throughput_curve.save",
    "curve.save",
    "copy.save_pretrained",
    "saved.save_pretrained",
    "self.save_pretrained",
    "drafter.save_pretrained",
    "super().save_pretrained",  # On other processes than the main one, where nothing is written.
    "figure.savefig",
    "summary_of(run, command, typed).save",
    "TrainingSummary",  # Its `save` writes a whole file.
    "self._rollback.save",  # These keep the states of a cache in memory.
    "self._window.save",
    "rollback.save",
    "layer.save",
    "self.path.open",  # Lines are appended one by one.
}


@pytest.mark.parametrize("package", [dspark_hf, dspark_hf_cli], ids=lambda package: package.__name__)
def test_every_file_is_written_beside_its_destination(package):
    found = [
        f"{file.name}: {call}"
        for file in Path(package.__file__).parent.rglob("*.py")
        if file.name not in OTHERS
        for call in unsafe_writes(file.read_text(encoding="utf-8"))
        if call.partition("(")[0] not in SAFE and not call.startswith(tuple(SAFE))
    ]
    assert not found, "use storage.atomic: " + "; ".join(found)


def test_the_check_sees_an_unsafe_write():
    assert unsafe_writes("path.write_text(text)\nwith open(path, 'w') as file: file.write('')") == [
        "path.write_text(text)",
        "open(path, 'w')",
    ]
    assert unsafe_writes("with whole_file(path) as part: part.write_text(text)\nopen(path, 'rb')") == []
