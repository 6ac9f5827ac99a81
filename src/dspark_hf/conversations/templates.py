"""Chat templates: the thinking switch, and the warning when there is no template."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)


def thinking_switch(enable_thinking: bool | None) -> dict[str, bool]:
    """The chat template's argument for switching thinking on or off; `None` leaves it to the template."""
    return {} if enable_thinking is None else {"enable_thinking": enable_thinking}


def has_template(tokenizer: PreTrainedTokenizerBase, otherwise: str) -> bool:
    """
    Whether the tokenizer has a chat template; warns once if not.

    Args:
        otherwise: What happens without one, for the warning.
    """
    if tokenizer.chat_template is not None:
        return True
    logger.warning_once(
        f"The tokenizer of '{tokenizer.name_or_path}' has no chat template, so {otherwise}. That suits a base model; for an "
        "instruct model, set tokenizer.chat_template to the template it was trained with."
    )
    return False


def opening_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """The tokens of a text at the start of a sequence. If there is a chat template, the text has the special tokens already."""
    if tokenizer.chat_template is not None:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    ids = list(tokenizer(text)["input_ids"])
    return ids[:-1] if ids[-1:] == [tokenizer.eos_token_id] else ids  # Some tokenizers append it to every text.
