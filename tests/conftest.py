"""What every test gets: no network, one thread, and the reference vectors where they lie."""

import os
from pathlib import Path

# Read by the libraries when they are imported, so before any of them is.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from transformers.utils import logging

TESTS = Path(__file__).parent

pytest_plugins = ["hub_server"]

# Tests here touch what transformers keeps to itself, so they run on the lowest supported version as well.
INTEGRATION_FOLDERS = (TESTS / "generation",)


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)  # Models this small only lose time to a second one.
    logging.disable_progress_bar()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if any(folder in item.path.parents for folder in INTEGRATION_FOLDERS):
            item.add_marker(pytest.mark.integration)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


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
