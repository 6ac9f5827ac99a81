"""What every drafter has: the embedding and LM head it speaks through, its files, and its knobs for `generate`."""

from __future__ import annotations

import copy
import inspect
import re
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import CommitInfo
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .checkpoints import Export, export, read_checkpoint
from .checkpoints.engines import launch_command
from .checkpoints.files import THROUGHPUT_CURVE_NAME
from .configuration_drafter import DrafterConfig
from .embeddings import SharedEmbeddings, target_embeddings
from .hub import Commit, push, write_custom_generate
from .layers import DSparkAttention, DSparkRMSNorm
from .registry import drafter_class
from .scheduling import ThroughputCurve
from .storage.atomic import whole_files

# The weights of a model in one file or in shards, and the index of the shards.
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass
class DSparkOutput(ModelOutput):
    """
    What one pass of the backbone gives.

    Args:
        loss (`torch.Tensor`, *optional*): What `objective` returned as the training loss.
        last_hidden_state (`torch.Tensor` of shape `[B, Q, D]`): Normed hidden state `h_k` of every slot.
        metrics (`dict`, *optional*): What else `objective` returned.
    """

    loss: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] | None = None


class Drafter(PreTrainedModel):
    """
    A model that drafts for a target from the target's own hidden states, of any kind.

    Load one with `Drafter.from_pretrained`, or with that of its kind where the kind is known. Its `generation_config`
    holds transformers' own knobs for assisted generation: `num_assistant_tokens` (drafts a round) and
    `assistant_confidence_threshold` (a round's drafts end before the first less confident slot).
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # A checkpoint may hold its own copies of these although the drafter was asked to borrow the target's.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\."]

    config: DrafterConfig
    fc: nn.Linear
    layers: nn.ModuleList
    norm: DSparkRMSNorm
    draft_token_ids: torch.Tensor | None

    def _add_embeddings(self) -> None:
        """The last step of a kind's `__init__`: what the drafter speaks through, and initial weights."""
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.has_embed_tokens else None
        self.lm_head = nn.Linear(config.hidden_size, config.logits_size, bias=False) if config.has_lm_head else None
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("draft_token_ids", ids)
        self.generation_config = GenerationConfig(
            num_assistant_tokens=config.num_draft_tokens, assistant_confidence_threshold=0.0
        )
        # What a pass of the target costs, where it was measured; schedulers and back-off reckon with it.
        self.throughput_curve: ThroughputCurve | None = None
        # Kept outside the module tree, so that the target's tensors are not moved, trained or saved as ours.
        self._binding: tuple[weakref.ref[PreTrainedModel], SharedEmbeddings] | None = None
        self.post_init()
        for module in (self.embed_tokens, self.lm_head):
            if module is not None:
                module.requires_grad_(False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkAttention) and module.config.attention_sinks:
            init.zeros_(module.attention_sink_bias)
        if isinstance(module, Drafter) and module.draft_token_ids is not None:
            init.copy_(module.draft_token_ids, torch.arange(len(module.draft_token_ids)))

    # ------------------------------------------------------------------ what kinds answer differently

    # The attention that training takes on an accelerator by default; `None` for that of inference.
    training_attention: ClassVar[str | None] = None

    @property
    def passes_per_round(self) -> int:
        """Passes of the drafter that a whole round of drafts takes: 1 where all slots are computed together."""
        return 1

    def training_inputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        anchor_positions: torch.Tensor,
        keep_anchors: torch.Tensor,
    ) -> dict[str, Any]:
        """
        What `forward` takes of a batch of texts to draft from each anchor, besides `context_features`, `embeddings` and
        `objective`.

        Args:
            input_ids: `[B, T]`, padded on the right.
            attention_mask: False at padding, `[B, T]`.
            anchor_positions: Index of each anchor in its row, ascending, `[B, A]`; 0 for fillers.
            keep_anchors: False for the fillers of rows that have fewer anchors than others, `[B, A]`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what it is trained on.")

    # ------------------------------------------------------------------ embeddings

    def get_input_embeddings(self) -> nn.Module | None:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    def bind(self, target: PreTrainedModel | None = None) -> SharedEmbeddings:
        """
        The embedding and LM head to draft with: the drafter's own where it has them, otherwise the target's.

        `generate` and the trainer do this themselves; call it to use the drafter alone.

        Args:
            target: The target to borrow from. It is referred to, not copied. `None` uses the last one bound.

        Raises:
            ValueError: when there is nothing to borrow from, or the target's shapes do not fit the drafter.
        """
        binding = self._binding  # Read once: another thread may bind meanwhile.
        if target is None and binding is not None:
            target = binding[0]()
            if target is None:  # The target is gone, but not what was borrowed from it.
                return binding[1]
        embed_tokens, lm_head = self.embed_tokens, self.lm_head
        if target is not None:
            check_target(self.config, target)
            theirs = target_embeddings(target)
            embed_tokens, lm_head = embed_tokens or theirs[0], lm_head or theirs[1]
        if embed_tokens is None or lm_head is None:
            raise ValueError(
                "This drafter has no embedding or LM head of its own: call drafter.bind(target) first. "
                f"It was made for {self.config.target_name_or_path or 'a target its configuration does not name'}."
            )
        known = binding[1] if binding is not None and binding[0]() is target else None
        if known is not None and known.serves(embed_tokens, lm_head, self.draft_token_ids):
            return known
        embeddings = SharedEmbeddings(
            embed_tokens,
            lm_head,
            embedding_scale=self.config.embedding_scale,
            draft_token_ids=self.draft_token_ids,
            head_is_reduced=self.lm_head is not None,
            raw_embeddings=self.config.raw_embeddings,
        )
        if target is not None:
            self._binding = (weakref.ref(target), embeddings)
        return embeddings

    def unbind(self) -> None:
        """Forgets the target."""
        self._binding = None

    @property
    def bound_target(self) -> PreTrainedModel | None:
        """The target that the drafter was last bound to; `None` without one, and when it is gone."""
        return None if self._binding is None else self._binding[0]()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles leave the target out: bind them to theirs."""
        return self.__dict__ | {"_binding": None}

    def base_logits(self, hidden_states: torch.Tensor, embeddings: SharedEmbeddings) -> torch.Tensor:
        """`U_k` `[..., V_draft]` in float32 from normed hidden states, scaled and soft-capped where configured."""
        logits = embeddings.logits(hidden_states).float()
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    # ------------------------------------------------------------------ files

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *model_args: Any,
        config: DrafterConfig | None = None,
        borrow_embeddings: bool = False,
        **kwargs: Any,
    ) -> Drafter:
        """
        Loads a drafter from a folder or a Hub repository, in any format of `dspark_hf.checkpoints`.

        Args:
            pretrained_model_name_or_path: Folder or repository name.
            config (`DrafterConfig`, *optional*): Used instead of the checkpoint's configuration.
            borrow_embeddings (`bool`): Leave the checkpoint's own embedding and LM head unread and use the target's.
            kwargs: As in [`~transformers.PreTrainedModel.from_pretrained`] (`dtype`, `device_map`, `revision`, ...).

        Raises:
            ValueError: when the checkpoint is not a drafter of this class's kind, or its tensors do not fit its
                configuration; one message lists every missing, unexpected and wrongly shaped tensor.
            OSError: when there is no such folder, repository or safetensors file. Pickle files are not read.
        """
        checkpoint = read_checkpoint(pretrained_model_name_or_path, config, kwargs)
        config = checkpoint.config
        cls = cls._class_for(pretrained_model_name_or_path, config)
        config.has_embed_tokens &= not borrow_embeddings
        config.has_lm_head &= not borrow_embeddings or bool(config.draft_vocab_size)
        with torch.device("meta"):
            expected = {name: tuple(t.shape) for name, t in cls(config).state_dict().items()}
        checkpoint.check_tensors(expected)
        for name in ("use_safetensors", "gguf_file"):
            kwargs.pop(name, None)
        if checkpoint.loads_by_name:
            loaded = super().from_pretrained(
                pretrained_model_name_or_path, *model_args, config=config, use_safetensors=True, **kwargs
            )
        else:
            tensors = checkpoint.read_tensors(set(expected))
            loaded = super().from_pretrained(None, *model_args, config=config, state_dict=tensors, **kwargs)
        drafter = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info=True
        drafter.check_values(pretrained_model_name_or_path)
        # transformers reads these only for models that generate by themselves.
        # `update` leaves out names that are not transformers' own.
        for name, value in checkpoint.generation_settings.items():
            setattr(drafter.generation_config, name, value)
        if checkpoint.throughput_curve is not None:
            drafter.throughput_curve = ThroughputCurve.from_dict(checkpoint.throughput_curve)
        return loaded

    @classmethod
    def _class_for(cls, path: Any, config: DrafterConfig) -> type[Drafter]:
        """This class where it is of a kind, otherwise that of the checkpoint's; `ValueError` when they differ."""
        kind = drafter_class(config)
        if cls is Drafter:
            return kind
        if not issubclass(cls, kind):
            raise ValueError(f"{path} is of another kind of drafter: load it with {kind.__name__} or Drafter.")
        return cls

    def check_values(self, path: Any) -> None:
        """
        Looks at the weights themselves.

        Args:
            path: Where they came from, for the message.

        Raises:
            ValueError: for weights that are not finite, and for a draft vocabulary with ids that repeat or do not exist.
        """
        named = [*self.named_parameters(), *self.named_buffers()]
        values = {name: tensor for name, tensor in named if tensor.is_floating_point() and not tensor.is_meta}
        if broken := [name for name, tensor in values.items() if not torch.isfinite(tensor).all()]:
            raise ValueError(f"The weights of {path} are damaged: {', '.join(broken)} hold NaN or infinite values.")
        if (ids := self.draft_token_ids) is None or ids.is_meta:
            return
        vocab_size = self.config.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or len(ids.unique()) < len(ids):
            raise ValueError(
                f"The draft vocabulary of {path} is damaged: its {len(ids)} tokens have to be different ids below "
                f"{vocab_size}, but they go from {int(ids.min())} to {int(ids.max())} and {len(ids.unique())} are different."
            )

    def enable_adapters(self) -> None:
        """As in transformers, and with the heads that an adapter brings (PEFT's `modules_to_save`)."""
        super().enable_adapters()
        from peft.utils import ModulesToSaveWrapper

        for module in self.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.enable_adapters(enabled=True)

    def save_pretrained(
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
        Writes the drafter's own tensors, its configuration and its generation settings.

        Args:
            save_directory: Folder to write to.
            is_main_process, state_dict: As in [`~transformers.PreTrainedModel.save_pretrained`].
            push_to_hub (`bool`):
                Push it as well, with the files about it in `save_directory`. The arguments of [`~Drafter.push_to_hub`]
                may follow; `repo_id` is the folder's name by default.
            include_embeddings (`bool`): Also write the borrowed embedding and LM head, which makes the file usable
                without the target at the cost of its size.
            format (`str`, *optional*):
                A format for other software instead, see [`~dspark_hf.checkpoints.export`], whose result is returned.
            custom_generate (`bool`):
                Also write the code by which `generate(custom_generate=save_directory, drafter=save_directory)` uses the drafter
                without an import. On the Hub it knows its repository: there `generate(custom_generate=repo_id)` is enough.
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
            hub = {"repo_id": Path(save_directory).name, "beside": save_directory} | hub
            self.push_to_hub(state_dict=state_dict, **hub, **kwargs)
        return written

    def _write_files(
        self, folder: Any, is_main_process: bool, state_dict: dict[str, torch.Tensor] | None, **kwargs: Any
    ) -> None:
        """Weights, configuration, generation settings and cost curve, in place of those of an earlier save."""
        if not is_main_process:  # It has a part in gathering distributed weights, and writes nothing.
            super().save_pretrained(folder, is_main_process, state_dict, **kwargs)
            return
        with whole_files(folder) as part:
            super().save_pretrained(part, is_main_process, state_dict, **kwargs)
            self.generation_config.save_pretrained(part)
            if self.throughput_curve is not None:
                self.throughput_curve.save(part / THROUGHPUT_CURVE_NAME)
            written = {file.name for file in part.iterdir()}
        if any(map(WEIGHT_FILES.fullmatch, written)):
            # One file would be read in place of new shards, and the index of old shards in place of one file.
            for file in Path(folder).iterdir():
                if WEIGHT_FILES.fullmatch(file.name) and file.name not in written:
                    file.unlink()

    def push_to_hub(
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
        beside: Any = None,
        **kwargs: Any,
    ) -> CommitInfo:
        """
        Pushes the drafter to the Hub in one commit, with a model card made from what is known of it.

        `training.json`, `results.json` (of `dspark-hf bench`) and `throughput_curve.json` beside the weights go with it and
        into the card; calibration temperatures are in the configuration. A card that somebody wrote or changed, in that
        folder or on the Hub, is left as it is.

        Args:
            repo_id (`str`): Repository, `name` or `owner/name`. It is made when there is none.
            commit_message, commit_description, private, token, revision, create_pr:
                As in [`~transformers.PreTrainedModel.push_to_hub`].
            tags (`list[str]`, *optional*): Further tags of the card.
            base_model (`str`, *optional*):
                The target's name on the Hub, under which the drafter is listed; the configuration's
                `target_name_or_path` by default.
            license (`str`, *optional*): The drafter's licence; by default the target's.
            beside: A folder with files about these weights; by default the one they were loaded from.
            kwargs: As in [`~Drafter.save_pretrained`]: `format`, `include_embeddings`, `max_shard_size`, and
                `custom_generate=True` for the code that `generate(custom_generate=repo_id)` runs.

        Returns:
            `huggingface_hub.CommitInfo`.
        """

        def write(folder: Path) -> dict[str, str]:
            written = self.save_pretrained(folder, **kwargs)
            return {} if written is None else {e: launch_command(e, self.config, repo_id) for e in written.launch}

        commit = Commit(repo_id, private, token, revision, create_pr, commit_message, commit_description)
        return push(self, commit, write, beside, tags=tags or (), base_model=base_model, license=license)

    def owning_embeddings(self) -> Drafter:
        """
        A shallow twin with copies of the embedding and LM head that this drafter borrows.

        Raises:
            ValueError: when it is bound to nothing, or the target's are quantized or offloaded.
        """
        embeddings = self.bind()
        twin = copy.copy(self)
        twin._modules, twin._binding = dict(self._modules), self._binding
        twin.config = copy.deepcopy(self.config)
        twin.config.has_embed_tokens = twin.config.has_lm_head = True
        head_weight = embeddings.head_weight()
        twin.embed_tokens = nn.Embedding.from_pretrained(embeddings.embed_tokens.weight.detach().clone())
        twin.lm_head = nn.Linear(head_weight.shape[1], head_weight.shape[0], bias=False, device="meta")
        twin.lm_head.weight = nn.Parameter(head_weight.detach().clone(), requires_grad=False)
        return twin


# The arguments of a push among those of `save_pretrained`.
PUSH_ARGUMENTS = tuple(
    name
    for name, parameter in inspect.signature(Drafter.push_to_hub).parameters.items()
    if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
)


def check_target(config: DrafterConfig, target: PreTrainedModel) -> None:
    """
    Refuses a target the drafter was not made for.

    Raises:
        ValueError: naming what differs (vocabulary, hidden size, tapped layers, encoder-decoder) and the target to load.
    """
    name = type(target).__name__
    made_for = config.target_name_or_path
    advice = (
        f"It was trained for {made_for!r}: load that target, or" if made_for else "Load the target it was made for, or"
    )
    advice += " train a drafter for this one (DSparkConfig.for_target)."
    if target.config.is_encoder_decoder:
        raise ValueError(f"DSpark drafts for decoder-only targets; {name} is an encoder-decoder. {advice}")
    text = target.config.get_text_config(decoder=True)
    if text.vocab_size != config.vocab_size:
        raise ValueError(
            f"The drafter's vocabulary has {config.vocab_size} tokens, that of {name} has {text.vocab_size}. {advice}"
        )
    if text.hidden_size != config.target_hidden_size:
        raise ValueError(
            f"The drafter reads hidden states of width {config.target_hidden_size}, "
            f"{name} has width {text.hidden_size}. {advice}"
        )
    deepest = max(config.target_layer_ids)
    if deepest >= text.num_hidden_layers:
        raise ValueError(
            f"The drafter taps target layer {deepest}, but the target has {text.num_hidden_layers} layers ({name}). {advice}"
        )
