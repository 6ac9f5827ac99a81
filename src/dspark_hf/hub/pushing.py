"""Pushes a drafter's weights, the files about them and the model card in one commit."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.hf_api import RepoFile
from transformers.utils import CONFIG_NAME

from ..checkpoints.reading import read_checkpoint
from ..modeling_drafter import DrafterModel
from ..storage.atomic import write_text
from .card import BENCHMARK_FILE, CARD_FILE, CURVE_FILE, build_card, figure_files, is_generated
from .custom_generate import FOLDER, write_custom_generate
from .private import public_name, without_local_paths
from .training_summary import TRAINING_FILE, TrainingSummary

# Files about the drafter. The first two describe these weights, the third the target.
ABOUT_WEIGHTS = (TRAINING_FILE, BENCHMARK_FILE)
COMPANIONS = (*ABOUT_WEIGHTS, CURVE_FILE)


@dataclass
class Commit:
    """
    Where a push goes and how it is described: the arguments of transformers' `push_to_hub`.

    Args:
        repo_id: Repository, `name` or `owner/name`; created if it does not exist.
        private: Whether a new repository is private; the owner's setting by default.
        token: A token, or whether to use the stored one.
        revision: Branch to commit to, created if it does not exist; `main` by default.
        create_pr: Open a pull request instead.
        message, description: Message and description of the commit.
    """

    repo_id: str
    private: bool | None = None
    token: str | bool | None = field(default=None, repr=False)  # Not shown in tracebacks and logs.
    revision: str | None = None
    create_pr: bool = False
    message: str | None = None
    description: str | None = None


def push(
    drafter: DrafterModel,
    commit: Commit,
    write: Callable[[Path], Mapping[str, str]],
    companion_folder: str | PathLike[str] | None = None,
    **card: Any,
) -> CommitInfo:
    """
    Writes a drafter and the files about it to a temporary folder, and commits that folder.

    `training.json`, `results.json` and `throughput_curve.json` are pushed with the weights. If they are already in the
    repository, they stay if the weights there are the same, and are removed otherwise, because they describe other weights. A
    card that was written or edited by hand stays.

    Args:
        drafter: The drafter.
        commit: Where it goes.
        write: Writes weights and configuration to a folder; returns the commands that serve it, by engine.
        companion_folder: A folder with the same weights and files about them; by default the one they were loaded from.
        card: `base_model`, `license` and `tags` as in [`~dspark_hf.hub.build_card`].
    """
    api = HfApi(token=commit.token, library_name="dspark-hf")
    repo_id = api.create_repo(commit.repo_id, private=commit.private, exist_ok=True).repo_id
    if commit.revision is not None and not commit.revision.startswith("refs/pr/"):
        api.create_branch(repo_id, branch=commit.revision, exist_ok=True)
    there = Remote.look(api, repo_id, commit.revision)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / repo_id.split("/")[-1]
        serving = write(folder)
        if (folder / FOLDER).exists():
            write_custom_generate(folder, repo_id)
        if (source := _source(drafter, companion_folder)) is not None:
            _copy_companions(source, folder)
        _hide_local_paths(folder, card.get("base_model"))
        same_weights = there.holds(folder)
        there.fetch(COMPANIONS if same_weights else [CURVE_FILE], folder)
        there.fetch([CARD_FILE], folder, replace=True)
        card_file = folder / CARD_FILE
        if not card_file.exists() or is_generated(card_file.read_text(encoding="utf-8")):
            has_code = (folder / FOLDER).exists() or any(name.startswith(f"{FOLDER}/") for name in there.files)
            build_card(
                drafter, folder, repo_id=repo_id, serving=serving, custom_generate=has_code, token=commit.token, **card
            ).save(card_file)
        files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
        stale = [] if same_weights else sorted(there.files.keys() & set(ABOUT_WEIGHTS) - set(files))
        return api.create_commit(
            repo_id,
            [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in files]
            + [CommitOperationDelete(path_in_repo=name) for name in stale],
            commit_message=commit.message or f"Upload {type(drafter).__name__}",
            commit_description=commit.description,
            revision=commit.revision,
            create_pr=commit.create_pr,
        )


@dataclass
class Remote:
    """The files of a repository before a push."""

    api: HfApi
    repo_id: str
    revision: str | None
    files: dict[str, RepoFile] = field(default_factory=dict)

    @classmethod
    def look(cls, api: HfApi, repo_id: str, revision: str | None) -> Remote:
        listed = api.list_repo_tree(repo_id, revision=revision, recursive=True)
        return cls(api, repo_id, revision, {file.path: file for file in listed if isinstance(file, RepoFile)})

    def holds(self, folder: Path) -> bool:
        """Whether its weights equal those in a folder, byte for byte."""
        theirs = {name: file.lfs.sha256 if file.lfs else None for name, file in self.files.items()}
        ours = {file.name: _sha256(file) for file in folder.glob("*.safetensors")}
        return ours == {name: digest for name, digest in theirs.items() if name.endswith(".safetensors")}

    def fetch(self, names: Iterable[str], folder: Path, replace: bool = False) -> None:
        """Downloads the files that exist in the repository into a folder."""
        for name in self.files.keys() & set(names):
            if replace or not (folder / name).exists():
                shutil.copyfile(self.api.hf_hub_download(self.repo_id, name, revision=self.revision), folder / name)


def _source(drafter: DrafterModel, companion_folder: str | PathLike[str] | None) -> Path | None:
    """The folder with files about this drafter's weights; `None` if the weights were changed since they were read from it."""
    if companion_folder is not None:
        return Path(companion_folder)
    folder = Path(drafter.config.name_or_path or "")
    if not drafter.config.name_or_path or not any((folder / name).is_file() for name in (*COMPANIONS, CARD_FILE)):
        return None
    return folder if _has_weights_of(folder, drafter) else None


def _has_weights_of(folder: Path, drafter: DrafterModel) -> bool:
    ours = drafter.state_dict()
    try:
        stored = read_checkpoint(folder, None, {}).read_tensors(set(ours))
    except (OSError, ValueError):
        return False
    return stored.keys() == ours.keys() and all(torch.equal(stored[name].to(ours[name]), ours[name]) for name in ours)


def _copy_companions(source: Path, folder: Path) -> None:
    names = [*COMPANIONS, CARD_FILE, *figure_files(TrainingSummary.load(source), source)]
    for name in names:
        if (source / name).is_file() and not (folder / name).exists():
            shutil.copyfile(source / name, folder / name)


def _hide_local_paths(folder: Path, base_model: str | None) -> None:
    """Replaces local paths in the files to push by their last part, that of the target by its name on the Hub if it is given."""
    for file in (folder / name for name in COMPANIONS):
        if file.is_file():
            content = without_local_paths(json.loads(file.read_text(encoding="utf-8")))
            write_text(file, json.dumps(content, indent=1) + "\n")
    config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    target = config.get("target_name_or_path")
    if target and public_name(target) != target:
        config["target_name_or_path"] = base_model or public_name(target)
        write_text(folder / CONFIG_NAME, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()
