"""Set-up of every test: no network, one thread, and where the reference vectors are."""

import functools
import os
from pathlib import Path
from typing import Any

# Read by the libraries when they are imported, so before any of them is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

TESTS = Path(__file__).parent

pytest_plugins = ["hub_server"]

# Tests here rely on internals of transformers, so they run on the lowest supported version as well.
INTEGRATION_FOLDERS = (TESTS / "generation",)
# All other tests compare what is computed; `make test-numeric` runs those where results are rounded differently.
NOT_NUMERIC = {
    TESTS / name
    for name in (
        "cli",
        "conversations",
        "storage",
        "test_architecture.py",
        "test_documents.py",
        "test_examples.py",
        "test_hub.py",
    )
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shift-weights",
        action="store_true",
        help="Place every weight that from_pretrained loads one element after a 64-byte boundary.",
    )
    parser.addoption("--seed", type=int, default=0, help="Random seed that every test starts with.")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # Models this small only lose time to a second one.
    logging.disable_progress_bar()
    if config.getoption("shift_weights"):
        _shift_loaded_weights()


def pytest_report_header(config: pytest.Config) -> str:
    placed = "one element off alignment" if config.getoption("shift_weights") else "as the file has them"
    return (
        f"torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}, loaded weights {placed}"
    )


def _shift_loaded_weights() -> None:
    """
    Makes `from_pretrained` return weights whose addresses are no multiple of 16 bytes.

    Loaded weights stay where the safetensors file has them, and files place them anywhere. Matrix products of a single row
    then differ in their last bits from those of the same weights in memory that torch allocated. Whether a file shows this
    depends on its tensors and on the processor; shifted weights show it nearly always.
    """
    original = PreTrainedModel.from_pretrained.__func__

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        loaded = original(cls, *args, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded  # With loading information.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and tensor.is_floating_point():
                tensor.data = _shifted(tensor.data)
        return loaded

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values one element after the start of new memory, which torch aligns to 64 bytes."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in INTEGRATION_FOLDERS):
            item.add_marker(pytest.mark.integration)
        if NOT_NUMERIC.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.numeric)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed(pytestconfig: pytest.Config) -> None:
    torch.manual_seed(pytestconfig.getoption("seed"))


@pytest.fixture(scope="session")
def data() -> Path:
    """Small reference files that are part of the repository."""
    return TESTS / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The full reference data, which is not part of the repository: `DSPARK_HF_SHARED`, or `shared` beside it."""
    folder = Path(os.environ.get("DSPARK_HF_SHARED") or TESTS.parents[1] / "shared")
    if not folder.is_dir():
        pytest.skip(f"no reference data: {folder} does not exist (set DSPARK_HF_SHARED)")
    return folder
