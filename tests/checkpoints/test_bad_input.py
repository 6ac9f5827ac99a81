"""Damaged and hostile files: one clear `ValueError` or `OSError` each, quickly, and nothing on disk is touched."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import spellings
import torch
from safetensors.torch import load_file, save_file

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import inspect_checkpoint

IDS = torch.tensor([1, 2, 3, 9, 10, 40, 41, 90, 126])


def change_config(**fields) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return change


def change_layers(**fields) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["transformer_layer_config"] |= fields
        file.write_text(json.dumps(config))

    return change


def change_tensors(function: Callable[[dict], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        function(tensors)
        save_file({name: t.contiguous() for name, t in tensors.items()}, file, metadata={"format": "pt"})

    return change


def change_header(function: Callable[[dict], None]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        content = file.read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        function(header)
        written = json.dumps(header).encode()
        file.write_bytes(struct.pack("<Q", len(written)) + written + content[8 + size :])

    return change


def set_value(name: str, value: float) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors[name].view(-1)[:1].fill_(value))


def set_tensor(name: str, tensor: torch.Tensor) -> Callable[[Path], None]:
    return change_tensors(lambda tensors: tensors.update({name: tensor}))


def write(name: str, content: str | bytes) -> Callable[[Path], None]:
    data = content if isinstance(content, bytes) else content.encode()
    return lambda folder: (folder / name).write_bytes(data) and None


def shard(shard_name: str, keep: bool = False) -> Callable[[Path], None]:
    """Makes the checkpoint one whose index puts every tensor in a shard of the given name."""

    def change(folder: Path) -> None:
        names = load_file(folder / "model.safetensors").keys()
        if keep:
            (folder / "model.safetensors").rename(folder / "shard.safetensors")
        else:
            (folder / "model.safetensors").unlink()
        index = {"metadata": {}, "weight_map": dict.fromkeys(names, shard_name)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return change


def index_with_a_tensor_too_many(folder: Path) -> None:
    shard("shard.safetensors", keep=True)(folder)
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["never.saved"] = "shard.safetensors"
    file.write_text(json.dumps(index))


def cut(size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:size])

    return change


FC = "fc.weight"
UP = "layers.0.mlp.up_proj.weight"
W1 = "markov_head.markov_w1.weight"

DAMAGE = {
    # The safetensors file.
    "empty file": (cut(0), OSError, "not a readable safetensors file"),
    "file without header": (cut(5), OSError, "not a readable safetensors file"),
    "file cut short": (cut(4000), OSError, "not a readable safetensors file"),
    "header longer than the file": (
        write("model.safetensors", struct.pack("<Q", 2**40) + b"{}"),
        OSError,
        "not a readable safetensors file",
    ),
    "header of zeros": (write("model.safetensors", bytes(64)), OSError, "not a readable safetensors file"),
    "shape larger than the data": (
        change_header(lambda header: header[FC].update(shape=[2**40, 2**20])),
        OSError,
        "not a readable safetensors file",
    ),
    "offsets beyond the data": (
        change_header(lambda header: header[FC].update(data_offsets=[0, 2**50])),
        OSError,
        "not a readable safetensors file",
    ),
    "unknown type": (change_header(lambda h: h[FC].update(dtype="F512")), OSError, "not a readable safetensors file"),
    "shape that the configuration does not ask for": (
        change_header(lambda header: header[UP].update(shape=header[UP]["shape"][::-1])),
        ValueError,
        r"wrong shape: layers\.0\.mlp\.up_proj\.weight",
    ),
    # The tensors.
    "NaN weight": (set_value(FC, float("nan")), ValueError, r"fc\.weight hold NaN or infinite values"),
    "infinite weight": (set_value(W1, float("inf")), ValueError, "hold NaN or infinite values"),
    "integer weights": (
        change_tensors(lambda tensors: tensors.update({FC: tensors[FC].to(torch.int32)})),
        ValueError,
        r"wrong type: fc\.weight is I32",
    ),
    "eight-bit weights": (
        change_tensors(lambda tensors: tensors.update({FC: tensors[FC].to(torch.float8_e4m3fn)})),
        ValueError,
        r"wrong type: fc\.weight is F8_E4M3",
    ),
    "tensor missing": (change_tensors(lambda tensors: tensors.pop(FC)), ValueError, r"missing: fc\.weight"),
    "tensor with a path for a name": (
        set_tensor("../../../../etc/passwd", torch.zeros(1)),
        ValueError,
        r"unexpected: \.\./\.\./\.\./\.\./etc/passwd",
    ),
    "tensor whose name moves the cursor": (
        set_tensor("fc\x1b[2J.weight", torch.zeros(1)),
        ValueError,
        r"unexpected: 'fc\\x1b\[2J\.weight'",
    ),
    "tensor whose name looks like another": (
        set_tensor("fс.weight", torch.zeros(1)),  # noqa: RUF001
        ValueError,
        r"unexpected: 'f\\u0441\.weight'",
    ),
    "a thousand tensors too many": (
        change_tensors(lambda tensors: tensors.update({f"extra.{i}": torch.zeros(1) for i in range(1000)})),
        ValueError,
        "and 980 more",
    ),
    # Shards.
    "missing shard": (shard("model-00001-of-00002.safetensors"), OSError, r"model-00001-of-00002\.safetensors"),
    "shard in another folder": (shard("../shard.safetensors"), OSError, "not a safetensors file in the same folder"),
    "shard by absolute path": (shard("/etc/passwd"), OSError, "not a safetensors file in the same folder"),
    "shard by network path": (
        shard(r"\\host\share\a.safetensors"),
        OSError,
        "not a safetensors file in the same folder",
    ),
    "pickled shard": (shard("pytorch_model.bin"), OSError, "not a safetensors file in the same folder"),
    "index of more than the shards hold": (index_with_a_tensor_too_many, OSError, r"lack never\.saved"),
    "index that is no index": (
        lambda folder: (shard("x.safetensors")(folder), write("model.safetensors.index.json", "{}")(folder)),
        OSError,
        "no weight_map",
    ),
    "index cut short": (
        lambda folder: (
            shard("x.safetensors")(folder),
            write("model.safetensors.index.json", '{"weight_map": {')(folder),
        ),
        OSError,
        "not a readable JSON file",
    ),
    # The configuration.
    "configuration that is no JSON": (write("config.json", "{'a': 1}"), OSError, "not a readable JSON file"),
    "configuration that is a list": (
        write("config.json", "[1, 2]"),
        OSError,
        "has to hold a JSON object, but it holds a list",
    ),
    "configuration of bytes": (write("config.json", b"\xff\xfe\x00"), OSError, "not a readable JSON file"),
    "configuration nested without end": (write("config.json", "[" * 200_000), OSError, "not a readable JSON file"),
    "absurd number of layers": (change_config(num_hidden_layers=10**12), ValueError, "num_hidden_layers=1000000000000"),
    "more layers than tensors": (
        change_config(num_hidden_layers=900, layer_types=None),
        ValueError,
        "they have 2 layers",
    ),
    "absurd width": (change_config(hidden_size=10**12), ValueError, "hidden_size=1000000000000"),
    "absurd vocabulary": (change_config(vocab_size=10**15), ValueError, "vocab_size="),
    "absurd block": (change_config(block_size=10**9), ValueError, "block_size=1000000000"),
    "absurd rank": (change_config(markov_rank=10**9), ValueError, "markov_rank=1000000000"),
    "negative size": (change_config(head_dim=-8), ValueError, "head_dim=-8"),
    "fractional size": (change_config(hidden_size=32.5), ValueError, r"hidden_size=32\.5"),
    "size in words": (change_config(intermediate_size="many"), ValueError, "intermediate_size='many'"),
    "a size missing": (change_config(hidden_size=None), ValueError, "lacks hidden_size"),
    "block size missing": (change_config(block_size=None), ValueError, "lacks block_size"),
    "layer ids out of order": (change_config(target_layer_ids=[2, 0, 1]), ValueError, "strictly increasing"),
    "layer ids twice": (change_config(target_layer_ids=[1, 1]), ValueError, "strictly increasing"),
    "layer ids beyond the target": (change_config(target_layer_ids=[0, 70]), ValueError, "the target has 4 layers"),
    "layer ids of text": (change_config(target_layer_ids=["0", "1"]), ValueError, "target_layer_ids="),
    "layer ids that are no list": (change_config(target_layer_ids=3), ValueError, "must be a list of layer ids"),
    "no layer ids": (change_config(target_layer_ids=[]), ValueError, "target_layer_ids is empty"),
    "unknown head": (change_config(markov_head_type="mamba"), ValueError, "markov_head_type must be one of"),
    "mask token outside the vocabulary": (change_config(mask_token_id=10**6), ValueError, "outside the vocabulary"),
    "unknown activation": (change_config(hidden_act="__import__('os')"), ValueError, "not an activation"),
    "unknown rotation": (
        change_config(rope_parameters={"rope_type": "spiral"}),
        ValueError,
        "rope_type must be one of",
    ),
    "rotary base of zero": (
        change_config(rope_parameters={"rope_type": "default", "rope_theta": -1.0}),
        ValueError,
        "rope_theta must be a positive number",
    ),
    "rotation that is no table": (change_config(rope_parameters=[1]), ValueError, "rope_parameters must hold settings"),
    "unknown layer type": (change_config(layer_types=["linear_attention"] * 2), ValueError, "layer_types may hold"),
    "layers that slide without a window": (
        change_config(layer_types=["sliding_attention"] * 2, sliding_window=None),
        ValueError,
        "sliding_window is not set",
    ),
    "architectures that are no list": (change_config(architectures=7), ValueError, "not a list of names"),
}

VOCABULARY_DAMAGE = {
    "one token for all": (set_tensor("d2t", -torch.arange(9)), ValueError, "draft vocabulary is damaged"),
    "tokens outside the vocabulary": (
        set_tensor("d2t", torch.full((9,), 2**40)),
        ValueError,
        "draft vocabulary is damaged",
    ),
    "negative tokens": (set_tensor("d2t", torch.full((9,), -50)), ValueError, "draft vocabulary is damaged"),
    "a table that goes in circles": (set_tensor("d2t", torch.tensor([0, -1] * 4 + [0])), ValueError, "is damaged"),
    "a table of another length": (set_tensor("d2t", torch.zeros(10**6, dtype=torch.long)), ValueError, "wrong shape"),
    "a table of fractions": (set_tensor("d2t", torch.zeros(9)), ValueError, "wrong type: draft_token_ids is F32"),
    "no table": (change_tensors(lambda tensors: tensors.pop("d2t")), ValueError, "missing: draft_token_ids"),
    "draft vocabulary larger than the vocabulary": (change_config(draft_vocab_size=4096), ValueError, "does not fit"),
    "layers of an unknown model": (change_layers(model_type="../../evil"), ValueError, "transformers does not know"),
    "layers that are text": (change_config(transformer_layer_config="qwen3"), ValueError, "transformer_layer_config"),
    "layer ids below the embeddings": (change_config(aux_hidden_state_layer_ids=[-7, 1]), ValueError, "starts at -1"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    drafter.bind(target)
    return spellings.deepspec(drafter, tmp_path / "drafter")


@pytest.fixture
def reduced(tmp_path: Path) -> Path:
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, draft_vocab_size=len(IDS))
    drafter.draft_token_ids.copy_(IDS)
    drafter.bind(target)
    return spellings.speculators(drafter, tmp_path / "drafter")


def check_refused(folder: Path, error: type[Exception], message: str) -> None:
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in folder.parent.rglob("*") if file.is_file()}
    tracemalloc.start()
    with pytest.raises(error, match=message) as raised:
        DSparkDrafter.from_pretrained(folder)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 200e6
    assert len(str(raised.value)) < 5000
    assert {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in folder.parent.rglob("*") if f.is_file()} == before


@pytest.mark.parametrize(("damage", "error", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_refused(folder: Path, damage, error, message: str):
    damage(folder)
    check_refused(folder, error, message)


@pytest.mark.parametrize(("damage", "error", "message"), VOCABULARY_DAMAGE.values(), ids=VOCABULARY_DAMAGE)
def test_a_damaged_draft_vocabulary_is_refused(reduced: Path, damage, error, message: str):
    damage(reduced)
    check_refused(reduced, error, message)


def test_the_same_files_load_undamaged(folder: Path, reduced: Path):
    DSparkDrafter.from_pretrained(reduced)


@pytest.mark.parametrize("path", ["", "a\0b", "../" * 40 + "nowhere", "not a repository/at all/three", "ünïcödé"])
def test_a_missing_path_is_refused(path: str):
    with pytest.raises((OSError, ValueError)):
        DSparkDrafter.from_pretrained(path)


@pytest.mark.parametrize("kind", ["empty file", "absurd number of layers", "layer ids out of order"])
def test_inspection_refuses_the_same_damage(folder: Path, kind: str):
    damage, error, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(error, match=message):
        inspect_checkpoint(folder)


def test_unicode_in_names_of_folders_is_fine(folder: Path):
    moved = folder.rename(folder.parent / "drafter für Ωμέγα 🚀")
    assert DSparkDrafter.from_pretrained(moved).config.block_size == tiny.BLOCK_SIZE
