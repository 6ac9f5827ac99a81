"""`DrafterModel`: what all drafters share (embeddings, binding to a target), and the methods that each kind defines."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers import initialization as init
from transformers.utils import ModelOutput

from .configuration_drafter import DrafterConfig
from .context_projection import ContextProjection
from .draft_cache import DraftCache
from .embeddings import SharedEmbeddings, embedding_width, target_embeddings
from .layers import DSparkAttention
from .scheduling import ThroughputCurve
from .target_config import num_decoder_layers

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class DrafterOutput(ModelOutput):
    """
    The output of one pass of the backbone.

    Args:
        loss (`torch.Tensor`, *optional*): What `objective` returned as the training loss.
        last_hidden_state (`torch.Tensor` of shape `[B, Q, D]`): Normed hidden state `h_k` of every slot.
        metrics (`dict`, *optional*): What else `objective` returned.
    """

    loss: torch.Tensor | None = None
    last_hidden_state: torch.Tensor | None = None
    metrics: dict[str, torch.Tensor] | None = None


class DrafterModel(PreTrainedModel):
    """
    A drafter without loading and saving, which [`Drafter`] adds.

    A kind of drafter defines `__init__` (which ends with `post_init()`, as in all models of transformers), `forward`,
    `training_inputs`, and those of the methods under "what each kind defines" that differ from the defaults here. What
    can be known without weights belongs in its [`~dspark_hf.configuration_drafter.DrafterConfig`].
    """

    config_class = DrafterConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    # A checkpoint may contain these although the drafter was asked to borrow the target's.
    _keys_to_ignore_on_load_unexpected = [r"^embed_tokens\.", r"^lm_head\."]

    config: DrafterConfig
    layers: Sequence[nn.Module]
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    extend_cache: Callable[..., None]  # Adds final tokens to a cache; its arguments depend on the kind.
    draft_token_ids: torch.Tensor | None

    def __init__(self, config: DrafterConfig):
        super().__init__(config)
        config.check()

    def post_init(self) -> None:
        """The last step of a kind's `__init__`: adds embedding and LM head if the checkpoint has them, initialises weights."""
        config = self.config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.has_embed_tokens else None
        self.lm_head = nn.Linear(config.hidden_size, config.logits_size, bias=False) if config.has_lm_head else None
        ids = torch.arange(config.draft_vocab_size) if config.draft_vocab_size else None
        self.register_buffer("draft_token_ids", ids)
        self.generation_config = GenerationConfig(
            num_assistant_tokens=config.num_draft_tokens, assistant_confidence_threshold=0.0
        )
        # The measured cost of a target pass, if known; used by schedulers and back-off.
        self.throughput_curve: ThroughputCurve | None = None
        # Kept outside the module tree, so that the target's tensors are not moved, trained or saved with the drafter's.
        self._binding: tuple[weakref.ref[PreTrainedModel], SharedEmbeddings] | None = None
        super().post_init()
        for module in (self.embed_tokens, self.lm_head):
            if module is not None:
                module.requires_grad_(False)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DSparkAttention) and module.config.attention_sinks:
            init.zeros_(module.attention_sink_bias)
        if module is self and self.draft_token_ids is not None:
            init.copy_(self.draft_token_ids, torch.arange(len(self.draft_token_ids)))

    if TYPE_CHECKING:  # transformers decorates `to` in a way that makes type checkers lose its `self`.

        def to(self, *args: Any, **kwargs: Any) -> Self: ...  # type: ignore[override]

    # ------------------------------------------------------------------ what each kind defines

    # The default attention implementation for training on an accelerator; `None` keeps the one the drafter was loaded with.
    training_attention: ClassVar[str | None] = None

    @property
    def passes_per_round(self) -> int:
        """Passes of the drafter per round: 1 if all slots are computed together."""
        return 1

    @property
    def heads(self) -> dict[str, nn.Module]:
        """Small modules on top of the backbone, by attribute name; LoRA training can train them in full."""
        return {}

    def new_cache(self, num_rows: int = 1) -> DraftCache:
        """An empty cache for the context of `num_rows` rows."""
        return DraftCache(len(self.layers), num_rows)

    def context_projection(self) -> ContextProjection | None:
        """
        The layers' projections of context as one, with their weights as they are now; `None` where `extend_cache` takes none.
        """
        return None

    def training_inputs(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        anchor_positions: torch.Tensor,
        keep_anchors: torch.Tensor,
    ) -> dict[str, Any]:
        """
        The arguments of `forward` to draft from each anchor of a batch of texts, besides `context_features`, `embeddings` and
        `objective`. With them, `forward` returns `S` hidden states per anchor, `[B, A * S, D]`; the last `num_draft_tokens`
        of these are the ones that drafts are predicted from.

        Args:
            input_ids: `[B, T]`, padded on the right.
            attention_mask: False at padding, `[B, T]`.
            anchor_positions: Index of each anchor in its row, ascending, `[B, A]`; 0 for fillers.
            keep_anchors: False for the fillers in rows that have fewer anchors than others, `[B, A]`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define training_inputs.")

    def sequential_features(self, previous_ids: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """
        What the logits of each draft depend on besides its hidden state, when all tokens are known (training, scoring drafts).

        Args:
            previous_ids: The token before each draft, `[..., G]`.
            hidden_states: What `forward` gave for each draft, `[..., G, D]`.

        Returns:
            Features `[..., G, r]`; `None` for drafters whose logits depend on the hidden states alone.
        """
        return None

    def sequential_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that `draft_logits` applies to the features of `sequential_features`."""
        return ()

    def draft_logits(
        self, hidden_states: torch.Tensor, features: torch.Tensor | None, embeddings: SharedEmbeddings
    ) -> torch.Tensor:
        """Logits `[..., V_draft]` in float32, from hidden states `[..., D]` and the features of `sequential_features`."""
        return self.base_logits(hidden_states, embeddings)

    def confidence_logits(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor:
        """
        Confidence before the sigmoid `[...]`, from hidden states `[..., D]` and the tokens before the drafts `[...]`. Only called
        if `config.gives_confidence`.
        """
        raise NotImplementedError(f"{type(self).__name__} gives no confidence.")

    def start_neutral(self, new: set[str]) -> None:
        """
        Initialises tensors that were added to a trained drafter, so that it still drafts the same tokens.

        Args:
            new: Their names in the state dict.
        """

    def beyond_dflash(self, heads_elsewhere: bool = False) -> list[str]:
        """
        The features of this drafter that transformers' DFlash generator does not support; empty if that can draft with it.

        Args:
            heads_elsewhere: Whether the caller computes the logits, so that heads of the drafter do not count.
        """
        return [f"another way of drafting ({self.config.method})"]

    # ------------------------------------------------------------------ embeddings

    def get_input_embeddings(self) -> nn.Module | None:  # type: ignore[override]  # None in transformers, too, at times.
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module | None:
        return self.lm_head

    def bind(self, target: PreTrainedModel | None = None) -> SharedEmbeddings:
        """
        The embedding and LM head to draft with: those of the drafter's checkpoint, otherwise the target's.

        `generate` and the trainer call this; call it yourself only to run the drafter alone.

        Args:
            target: The target to borrow from, by reference. `None` uses the last one bound.

        Raises:
            ValueError: when there is nothing to borrow from, or the target's shapes do not fit the drafter.
        """
        binding = self._binding  # Read once: another thread may bind meanwhile.
        if target is None and binding is not None:
            target = binding[0]()
            if target is None:  # The target was deleted, but the borrowed modules still exist.
                return binding[1]
        embed_tokens: nn.Module | None = self.embed_tokens
        lm_head: nn.Module | None = self.lm_head
        if target is not None:
            check_target(self.config, target)
            self.config.settle_taps(num_decoder_layers(target.config.get_text_config(decoder=True)))
            theirs = target_embeddings(target)
            if embed_tokens is None:
                check_embedding(self.config, target, theirs[0])
            embed_tokens, lm_head = embed_tokens or theirs[0], lm_head or theirs[1]
        if embed_tokens is None or lm_head is None:
            raise ValueError(
                "This drafter borrows the target's embedding and LM head: call drafter.bind(target) first. "
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
            compute_dtype=None if target is None else target.dtype,
        )
        if target is not None:
            self._binding = (weakref.ref(target), embeddings)
        return embeddings

    def unbind(self) -> None:
        """Forgets the target."""
        self._binding = None

    @property
    def bound_target(self) -> PreTrainedModel | None:
        """The target that the drafter was last bound to; `None` if there was none or it has been deleted."""
        return None if self._binding is None else self._binding[0]()

    def __getstate__(self) -> dict[str, Any]:
        """Copies and pickles do not contain the target: bind them again."""
        return self.__dict__ | {"_binding": None}

    def owning_embeddings(self) -> Any:
        """
        A shallow copy of this drafter that contains copies of the embedding and LM head that this one borrows.

        Raises:
            ValueError: when the drafter is not bound, or the target's modules are quantized or offloaded, or have an adapter.
        """
        embeddings = self.bind()
        twin = copy.copy(self)
        twin._modules, twin._binding = dict(self._modules), self._binding
        twin.config = copy.deepcopy(self.config)
        twin.config.has_embed_tokens = twin.config.has_lm_head = True
        head_weight = embeddings.head_weight()
        twin.embed_tokens = nn.Embedding.from_pretrained(embeddings.embedding_weight().detach().clone())
        twin.lm_head = nn.Linear(head_weight.shape[1], head_weight.shape[0], bias=False, device="meta")
        twin.lm_head.weight = nn.Parameter(head_weight.detach().clone(), requires_grad=False)
        return twin

    def base_logits(self, hidden_states: torch.Tensor, embeddings: SharedEmbeddings) -> torch.Tensor:
        """`U_k` `[..., V_draft]` in float32 from normed hidden states, scaled and soft-capped where configured."""
        logits = embeddings.logits(hidden_states).float()
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if (cap := self.config.final_logit_softcapping) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits

    # ------------------------------------------------------------------ weights

    def check_values(self, path: Any) -> None:
        """
        Checks the values of the weights.

        Args:
            path: Where they came from, for the message.

        Raises:
            ValueError: for weights that are not finite, and for a draft vocabulary with ids that repeat or do not exist.
        """
        named = [*self.named_parameters(), *self.named_buffers()]
        values = {name: tensor for name, tensor in named if tensor.is_floating_point() and not tensor.is_meta}
        if broken := [name for name, tensor in values.items() if not _is_finite(tensor)]:
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
        """As in transformers, but also enables the heads that were trained with the adapter (PEFT's `modules_to_save`)."""
        super().enable_adapters()
        from peft.utils import ModulesToSaveWrapper

        for module in self.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.enable_adapters(enabled=True)


def _is_finite(tensor: torch.Tensor) -> bool:
    """In parts: torch takes two and a half times the memory of what it looks at, and experts are tensors of many gigabytes."""
    return all(bool(torch.isfinite(part).all()) for part in tensor.detach().flatten().split(2**24))


def check_target(config: DrafterConfig, target: PreTrainedModel) -> None:
    """
    Refuses a target that the drafter does not fit.

    Raises:
        ValueError: naming what differs (vocabulary, hidden size, tapped layers, encoder-decoder) and the target to load.
    """
    name = type(target).__name__
    made_for = config.target_name_or_path
    advice = (
        f"It was trained for {made_for!r}: load that target, or" if made_for else "Load the target it was made for, or"
    )
    advice += f" train a drafter for this one ({type(config).__name__}.for_target)."
    if target.config.is_encoder_decoder:
        raise ValueError(f"Drafters are for decoder-only targets; {name} is an encoder-decoder. {advice}")
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
    num_layers = num_decoder_layers(text)
    taps = config.taps_for(num_layers)
    if max(taps) >= num_layers:
        raise ValueError(
            f"The drafter taps target layer {max(taps)}, but the target has {num_layers} layers ({name}). {advice}"
        )


def check_embedding(config: DrafterConfig, target: PreTrainedModel, embed_tokens: nn.Module) -> None:
    """Raises `ValueError` when the target's embedding is narrower or wider than the drafter's layers."""
    width = embedding_width(embed_tokens)
    if width not in (None, config.hidden_size):
        raise ValueError(
            f"The embedding of {type(target).__name__} has width {width}, the drafter's layers have {config.hidden_size}: a "
            "drafter for this target needs its own embedding (has_embed_tokens=True)."
        )
