"""`Drafter`, the base class of all drafters: loading, saving and pushing to the Hub."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub import CommitInfo

from .checkpoints import Export, export, read_checkpoint
from .checkpoints.engines import launch_command
from .checkpoints.files import THROUGHPUT_CURVE_NAME
from .configuration_drafter import DrafterConfig
from .hub import Commit, push, write_custom_generate
from .modeling_drafter import DrafterModel
from .registry import drafter_class
from .scheduling import ThroughputCurve
from .storage.atomic import whole_files

if TYPE_CHECKING:
    from typing_extensions import Self

# The weights of a model in one file or in shards, and the index of the shards.
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


class Drafter(DrafterModel):
    """
    The base class of all drafters: models that draft tokens for a target from the target's hidden states.

    `Drafter.from_pretrained` loads a drafter of any kind; the class of a kind, such as [`DSparkDrafter`], loads that kind only.
    A drafter's `generation_config` holds transformers' settings for assisted generation: `num_assistant_tokens` (drafts per
    round) and `assistant_confidence_threshold` (drafting stops at the first slot below this confidence).
    """

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        config: DrafterConfig | None = None,
        borrow_embeddings: bool = False,
        **kwargs: Any,
    ) -> Self:
        """
        Loads a drafter from a folder or a Hub repository, in any format of `dspark_hf.checkpoints`.

        Args:
            pretrained_model_name_or_path: Folder or repository name.
            config (`DrafterConfig`, *optional*): Used instead of the checkpoint's configuration.
            borrow_embeddings (`bool`): Do not read the checkpoint's embedding and LM head; use the target's.
            kwargs: As in [`~transformers.PreTrainedModel.from_pretrained`] (`dtype`, `device_map`, `revision`, ...).

        Raises:
            ValueError: when the checkpoint is not a drafter of this class's kind, or its tensors do not fit its
                configuration; one message lists every missing, unexpected and wrongly shaped tensor.
            OSError: when there is no such folder, repository or safetensors file. Pickle files are not read.
        """
        checkpoint = read_checkpoint(pretrained_model_name_or_path, config, kwargs)
        config = checkpoint.config
        kind = cls._class_for(pretrained_model_name_or_path, config)
        config.has_embed_tokens &= not borrow_embeddings
        config.has_lm_head &= not borrow_embeddings or bool(config.draft_vocab_size)
        with torch.device("meta"):
            expected = {name: tuple(t.shape) for name, t in kind(config).state_dict().items()}
        checkpoint.check_tensors(expected)
        for name in ("use_safetensors", "gguf_file"):
            kwargs.pop(name, None)
        if checkpoint.loads_by_name:
            loaded: Any = super(Drafter, kind).from_pretrained(
                pretrained_model_name_or_path, *model_args, config=config, use_safetensors=True, **kwargs
            )
        else:
            tensors, path = checkpoint.read_tensors(set(expected)), config.name_or_path
            loaded = super(Drafter, kind).from_pretrained(
                None, *model_args, config=config, state_dict=tensors, **kwargs
            )
        drafter: Any = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        if not checkpoint.loads_by_name:  # transformers was given no name.
            drafter.name_or_path = drafter.config.name_or_path = path
        drafter.check_values(pretrained_model_name_or_path)
        # transformers reads the generation settings only for models that can generate alone.
        # `update` ignores names that transformers does not know.
        for name, value in checkpoint.generation_settings.items():
            setattr(drafter.generation_config, name, value)
        if checkpoint.throughput_curve is not None:
            drafter.throughput_curve = ThroughputCurve.from_dict(checkpoint.throughput_curve)
        return loaded

    @classmethod
    def _class_for(cls, path: Any, config: DrafterConfig) -> Any:
        """The class to load a checkpoint with: that of its kind. `ValueError` when this class is of another kind."""
        kind = drafter_class(config)
        if issubclass(kind, cls):
            return kind
        if not issubclass(cls, kind):
            raise ValueError(
                f"{path} holds a drafter of class {kind.__name__}, not {cls.__name__}: load it with {kind.__name__} or Drafter."
            )
        return cls

    def save_pretrained(  # type: ignore[override]
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: dict[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        *,
        include_embeddings: bool = False,
        format: str | None = None,
        custom_generate: bool = False,
        **kwargs: Any,
    ) -> Export | None:
        """
        Writes the drafter's weights (without what it borrows from the target), configuration and generation settings.

        Args:
            save_directory: Folder to write to.
            is_main_process, state_dict: As in [`~transformers.PreTrainedModel.save_pretrained`].
            push_to_hub (`bool`):
                Push it as well, with the files about it in `save_directory`. The arguments of [`~Drafter.push_to_hub`]
                may follow; `repo_id` is the folder's name by default.
            include_embeddings (`bool`): Also write the borrowed embedding and LM head, which makes the file usable
                without the target at the cost of its size.
            format (`str`, *optional*):
                Write a format for other software instead and return the result of [`~dspark_hf.checkpoints.export`].
            custom_generate (`bool`):
                Also write the code that makes `generate(custom_generate=save_directory, drafter=save_directory)` work in a
                program that does not import dspark_hf. Once pushed, `generate(custom_generate=repo_id)` is enough.
            kwargs: As in [`~transformers.PreTrainedModel.save_pretrained`].
        """
        hub = {name: kwargs.pop(name) for name in PUSH_ARGUMENTS if name in kwargs} if push_to_hub else {}
        written = None
        if format is not None:
            written = export(self, save_directory, format) if is_main_process else None
        else:
            model = self.owning_embeddings() if include_embeddings else self
            model._write_files(save_directory, is_main_process, state_dict, **kwargs)
        if custom_generate and is_main_process:
            write_custom_generate(save_directory)
        if push_to_hub and is_main_process:
            kwargs |= {"include_embeddings": include_embeddings, "format": format, "custom_generate": custom_generate}
            hub = {"repo_id": Path(save_directory).name, "companion_folder": save_directory} | hub
            self.push_to_hub(state_dict=state_dict, **hub, **kwargs)
        return written

    def _write_files(
        self, folder: Any, is_main_process: bool, state_dict: dict[str, torch.Tensor] | None, **kwargs: Any
    ) -> None:
        """Writes weights, configuration, generation settings and cost curve; files of an earlier save are replaced."""
        if not is_main_process:  # Takes part in gathering distributed weights, but writes nothing.
            super().save_pretrained(folder, is_main_process, state_dict, **kwargs)
            return
        with whole_files(folder) as part:
            super().save_pretrained(part, is_main_process, state_dict, **kwargs)
            self.generation_config.save_pretrained(part)
            if self.throughput_curve is not None:
                self.throughput_curve.save(part / THROUGHPUT_CURVE_NAME)
            written = {file.name for file in part.iterdir()}
        if any(map(WEIGHT_FILES.fullmatch, written)):
            # An old single file would be read instead of new shards, and an old index instead of a new single file.
            for file in Path(folder).iterdir():
                if WEIGHT_FILES.fullmatch(file.name) and file.name not in written:
                    file.unlink()

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        tags: list[str] | None = None,
        base_model: str | None = None,
        license: str | None = None,
        companion_folder: Any = None,
        **kwargs: Any,
    ) -> CommitInfo:
        """
        Pushes the drafter to the Hub in one commit, with a model card.

        `training.json`, `results.json` (of `dspark-hf bench`) and `throughput_curve.json` in the folder of the weights are
        pushed too, and the card reports what they hold. A card that was written or edited by hand, in that folder or on the
        Hub, is not replaced.

        Args:
            repo_id (`str`): Repository, `name` or `owner/name`. It is created if it does not exist.
            commit_message, commit_description, private, token, revision, create_pr:
                As in [`~transformers.PreTrainedModel.push_to_hub`].
            tags (`list[str]`, *optional*): Additional tags for the card.
            base_model (`str`, *optional*):
                The target's name on the Hub, under which the drafter is listed; the configuration's
                `target_name_or_path` by default.
            license (`str`, *optional*): The drafter's licence; by default the target's.
            companion_folder: The folder of `training.json` and the other files; by default the one the drafter was loaded from.
            kwargs: As in [`~Drafter.save_pretrained`]: `format`, `include_embeddings`, `max_shard_size`, and
                `custom_generate=True` for the code that `generate(custom_generate=repo_id)` runs.

        Returns:
            `huggingface_hub.CommitInfo`.
        """

        def write(folder: Path) -> dict[str, str]:
            written = self.save_pretrained(folder, **kwargs)
            return {} if written is None else {e: launch_command(e, self.config, repo_id) for e in written.launch}

        commit = Commit(repo_id, private, token, revision, create_pr, commit_message, commit_description)
        return push(self, commit, write, companion_folder, tags=tags or (), base_model=base_model, license=license)


# Keyword arguments of `save_pretrained` that belong to the push.
PUSH_ARGUMENTS = tuple(
    name
    for name, parameter in inspect.signature(Drafter.push_to_hub).parameters.items()
    if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
)
