"""Makes a drafter from a trained one: with more heads, or with LoRA adapters."""

from __future__ import annotations

from typing import Any

from transformers.utils import logging

from ..drafter import Drafter

logger = logging.get_logger(__name__)


def warm_start(drafter: Drafter, **changes: Any) -> Drafter:
    """
    A drafter with a changed configuration that keeps every weight whose name and shape are the same.

    For instance, `warm_start(dflash, markov_rank=256)` makes a DSpark drafter from a DFlash drafter. New heads have no effect at
    first: until they are trained, the drafter drafts the same tokens as before.

    Args:
        drafter: The drafter to start from; returned unchanged when there are no changes.
        changes: New values of fields of its configuration.

    The calibration of the confidences is dropped, because it belongs to the old configuration.

    Raises:
        ValueError: when the changed configuration contradicts itself, or the drafter has a separate LM head, which
            another draft vocabulary would leave without weights.
    """
    config = drafter.config
    changes = {name: changes[name] for name, value in config.named(changes).items() if value != changes[name]}
    if not changes:
        return drafter
    if "draft_vocab_size" in changes and config.has_lm_head:
        raise ValueError(
            f"draft_vocab_size={changes['draft_vocab_size']} cannot be given to this drafter: it has a separate LM head "
            f"over {config.draft_vocab_size or config.vocab_size} tokens. Leave the option out, or load the drafter with "
            "borrow_embeddings=True and save it, which makes it use the target's head."
        )
    made = type(drafter)(config.changed(**changes)).to(device=drafter.device, dtype=drafter.dtype)
    shapes = {name: tensor.shape for name, tensor in made.state_dict().items()}
    kept = {name: tensor for name, tensor in drafter.state_dict().items() if shapes.get(name) == tensor.shape}
    made.load_state_dict(kept, strict=False)
    new = shapes.keys() - kept.keys()
    made.start_neutral(new)
    logger.warning(f"{len(kept)} tensors are kept; new tensors: {', '.join(sorted(new)) or 'none'}.")
    return made


def add_lora(
    drafter: Drafter,
    rank: int,
    target_modules: list[str],
    alpha: float | None = None,
    dropout: float = 0.0,
    heads: bool = True,
) -> Any:
    """
    The drafter wrapped by PEFT, with new LoRA matrices and, if wanted, trainable copies of its heads.

    Raises:
        ImportError: without PEFT.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("LoRA needs PEFT: pip install 'dspark-hf[peft]'.") from error
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank if alpha is None else alpha,
        lora_dropout=dropout,
        target_modules=target_modules,
        modules_to_save=list(drafter.heads) if heads else None,
    )
    return get_peft_model(drafter, config)


def load_own_adapter(drafter: Drafter, folder: str) -> None:
    """
    Loads the weights of the active adapter from a checkpoint.

    Raises:
        ValueError: when the checkpoint's adapter has other tensors than the active one.
    """
    from peft import set_peft_model_state_dict
    from peft.utils import load_peft_weights

    (active,) = drafter.active_adapters()
    saved = {name.removeprefix("base_model.model."): tensor for name, tensor in load_peft_weights(folder).items()}
    wrong = set_peft_model_state_dict(drafter, saved, adapter_name=active).unexpected_keys
    if wrong:
        raise ValueError(f"The adapter in '{folder}' has tensors that {active!r} has not: {', '.join(sorted(wrong))}.")
