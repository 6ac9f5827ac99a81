"""The embedding and LM head that a drafter uses: those in its checkpoint, or the target's by reference."""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import nn
from transformers import PreTrainedModel

from .transformers_names import has_device_hook, on_its_device

# Weights of other types, such as float8, are only stored in them.
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class SharedEmbeddings:
    """
    An embedding and an LM head, called as modules and never copied.

    Quantized and offloaded targets and those with adapters work because the modules are called, instead of their weights being
    read. There are two exceptions, for plain weights alone: the head's rows for a reduced draft vocabulary are gathered once and
    kept, and raw embedding rows are read.

    Args:
        embed_tokens: Maps ids `[...]` to rows `[..., D]`.
        lm_head: Maps hidden states `[..., D]` to logits `[..., V]`.
        embedding_scale: Factor on the raw embedding rows.
        draft_token_ids: Token ids of the draft vocabulary, `[V_draft]`; `None` for the full one.
        head_is_reduced: Whether `lm_head` already gives the draft vocabulary only.
        raw_embeddings: Read the stored rows, without the norm or scale that the embedding module applies.
        compute_dtype: What a head computes in whose weight does not tell, because it is quantized.

    Raises:
        ValueError: for `raw_embeddings` of an embedding whose stored rows are quantized.
    """

    def __init__(
        self,
        embed_tokens: nn.Module,
        lm_head: nn.Module,
        *,
        embedding_scale: float = 1.0,
        draft_token_ids: torch.Tensor | None = None,
        head_is_reduced: bool = False,
        raw_embeddings: bool = False,
        compute_dtype: torch.dtype | None = None,
    ):
        if raw_embeddings and not is_plain(weight_of(embed_tokens)):
            raise ValueError(
                f"This drafter reads the stored rows of the target's embedding, and those of a {type(embed_tokens).__name__} are "
                "quantized: load the target with an embedding that is not."
            )
        self.embed_tokens = embed_tokens
        self.lm_head = lm_head
        self._compute_dtype = compute_dtype
        # Gemma's embedding module multiplies by a scale. It is divided out, because the drafter's configuration has the scale.
        module_scale = 1.0 if raw_embeddings else float(getattr(embed_tokens, "embed_scale", 1.0))
        self.raw_embeddings = raw_embeddings
        self.scale = embedding_scale / module_scale
        self.draft_token_ids = None if head_is_reduced else draft_token_ids
        # A copy of the head's rows; the stamps tell whether the head or the draft vocabulary has changed since.
        self._gathered_from: tuple[Stamp, Stamp] | None = None
        self._gathered_rows = self._gather_head_rows()

    def serves(self, embed_tokens: nn.Module, lm_head: nn.Module, draft_token_ids: torch.Tensor | None) -> bool:
        """Whether this was made from these modules and draft tokens, and they have not changed since."""
        if self.embed_tokens is not embed_tokens or self.lm_head is not lm_head:
            return False
        if self.draft_token_ids is not None and self.draft_token_ids is not draft_token_ids:
            return False
        if self._gathered_from is None:
            return True
        weight, ids = self._gathered_from
        return weight.is_still(weight_of(lm_head)) and ids.is_still(draft_token_ids)

    def head_weight(self) -> torch.Tensor:
        """
        The head's weight over the draft vocabulary, `[V_draft, D]`; not a copy if that is all the head has.

        Raises:
            ValueError: when the head is more than a plain weight: quantized, offloaded, with an adapter or with a bias.
        """
        if self._gathered_rows is not None:
            return self._gathered_rows
        weight = _weight_to_copy(self.lm_head, "LM head")
        if "bias" in dict(self.lm_head.named_parameters(recurse=False)):
            raise ValueError(
                "The target's LM head has a bias, which the drafter's LM head cannot store, so it cannot be copied."
            )
        return weight if self.draft_token_ids is None else weight[self.draft_token_ids.to(weight.device)]

    def embedding_weight(self) -> torch.Tensor:
        """
        The stored rows of the embedding, `[V, D]`, not a copy.

        Raises:
            ValueError: when it is quantized, offloaded or has an adapter.
        """
        return _weight_to_copy(self.embed_tokens, "embedding")

    def embed(self, token_ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """Rows `[..., D]` of `token_ids` `[...]`, on the device and in the dtype of `like`."""
        token_ids = token_ids.to(device_of(self.embed_tokens, token_ids.device))
        if self.raw_embeddings:
            with on_its_device(self.embed_tokens):
                weight = self.embed_tokens.weight
                assert isinstance(weight, torch.Tensor)
                rows = nn.functional.embedding(token_ids.to(weight.device), weight)
        else:
            rows = self.embed_tokens(token_ids)
        rows = rows.to(device=like.device, dtype=like.dtype)
        return rows if self.scale == 1.0 else rows * self.scale

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Raw logits `[..., V_draft]` of `hidden_states` `[..., D]`, on their device."""
        if (weight := self._gathered_rows) is not None:
            return nn.functional.linear(hidden_states.to(weight), weight).to(hidden_states.device)
        logits = self.target_logits(hidden_states)
        if self.draft_token_ids is not None:
            logits = logits[..., self.draft_token_ids.to(logits.device)]
        return logits

    def target_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Raw logits `[..., V]` over the head's whole vocabulary."""
        inputs = hidden_states.to(device_of(self.lm_head, hidden_states.device))
        dtype = _compute_dtype(self.lm_head) or self._compute_dtype
        if dtype is not None and not torch.is_autocast_enabled(inputs.device.type):
            inputs = inputs.to(dtype)
        return self.lm_head(inputs).to(hidden_states.device)

    def _gather_head_rows(self) -> torch.Tensor | None:
        """The head's rows for the draft vocabulary; `None` if it is not a plain linear layer: then logits are selected."""
        head = self.lm_head
        if self.draft_token_ids is None or not is_linear(head) or head.bias is not None or has_device_hook(head):
            return None
        weight = head.weight.detach()
        self._gathered_from = Stamp(head.weight), Stamp(self.draft_token_ids)
        # A tensor made in inference mode could not take part in training later.
        with torch.inference_mode(False), torch.no_grad():
            return weight.index_select(0, self.draft_token_ids.to(weight.device))


class Stamp:
    """Detects whether a tensor was replaced, moved, converted or written to since the stamp was made."""

    def __init__(self, tensor: torch.Tensor):
        self._tensor = weakref.ref(tensor)
        self._address = tensor.data_ptr()
        self._version = _write_count(tensor)

    def is_still(self, tensor: torch.Tensor | None) -> bool:
        """`False` also for tensors made in inference mode, for which torch does not count writes."""
        if tensor is None or self._version is None:
            return False
        unchanged = self._address == tensor.data_ptr() and self._version == _write_count(tensor)
        return unchanged and self._tensor() is tensor


def _write_count(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def target_embeddings(target: PreTrainedModel) -> tuple[nn.Module, nn.Module]:
    """
    The target's embedding and LM head modules.

    Raises:
        ValueError: when the target has no LM head (a base model without one).
    """
    embed_tokens, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    if lm_head is None and isinstance(decoder := target.get_decoder(), PreTrainedModel):
        lm_head = decoder.get_output_embeddings()  # Nemotron-H Omni holds a whole language model.
    if embed_tokens is None or lm_head is None:
        raise ValueError(
            f"{type(target).__name__} has no {'embedding' if embed_tokens is None else 'LM head'} to borrow: "
            "load the target with AutoModelForCausalLM."
        )
    return embed_tokens, lm_head


def embedding_width(embed_tokens: nn.Module) -> int | None:
    """Numbers for each token; `None` if the module does not say."""
    width = getattr(embed_tokens, "embedding_dim", None)
    return width if isinstance(width, int) else None


def is_plain(weight: torch.Tensor | None) -> bool:
    """Whether a weight is an ordinary tensor of numbers that models compute in, and not a quantized one."""
    if weight is None or type(weight) not in (torch.Tensor, nn.Parameter) or type(weight.data) is not torch.Tensor:
        return False
    return weight.dtype in COMPUTE_DTYPES


def is_linear(module: nn.Module) -> bool:
    """Whether a module is its weight and bias and nothing else: not quantized, and without an adapter or wrapped `forward`."""
    has_own_forward = "forward" in vars(module) and not has_device_hook(module)
    return type(module) is nn.Linear and is_plain(module.weight) and not has_own_forward


def weight_of(module: nn.Module | None) -> torch.Tensor | None:
    """The weight of a module, if it has one that is a tensor."""
    weight = getattr(module, "weight", None)
    return weight if isinstance(weight, torch.Tensor) else None


def _weight_to_copy(module: nn.Module, name: str) -> torch.Tensor:
    """The weight of an embedding or LM head, if it is all that the module computes with."""
    weight = weight_of(module)
    has_adapter = any("." in parameter for parameter, _ in module.named_parameters())  # It wraps the module.
    if weight is None or not is_plain(weight) or weight.is_meta or has_adapter:
        raise ValueError(
            f"The target's {name} ({type(module).__name__}) is quantized or offloaded, or has an adapter, so its weight cannot "
            "be copied: bind the drafter to an unquantized target in memory, with its adapters merged."
        )
    return weight


def device_of(module: nn.Module, default: torch.device) -> torch.device:
    """The device a module expects its input on; `default` if hooks move its inputs, or it has no tensors."""
    held = next(itertools.chain(module.parameters(), module.buffers()), None)
    return default if has_device_hook(module) or held is None or held.is_meta else held.device


def _compute_dtype(module: nn.Module) -> torch.dtype | None:
    """The type that a module computes in; `None` if its weight does not tell."""
    weight = weight_of(module)
    return weight.dtype if weight is not None and weight.dtype in COMPUTE_DTYPES else None
