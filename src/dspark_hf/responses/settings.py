"""The settings of generating responses, and their defaults from the target's generation config."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from transformers import AutoConfig, GenerationConfig

from .token_sampling import Sampling

DEFAULT_MAX_NEW_TOKENS = 512


@dataclass
class RegenerationSettings:
    """Settings of generation. Sampling fields that are None come from the target's generation config, or `generate`'s defaults.

    Args:
        max_new_tokens: limit of a response; 512 if neither this nor the generation config sets it.
        do_sample: False for greedy. A given positive temperature implies True, a temperature of 0 implies False.
        temperature: divides the logits.
        top_k: keep this many tokens; 0 keeps all. `generate`'s default is 50.
        top_p: keep the most likely tokens that together reach this probability; 1.0 keeps all.
        enable_thinking: the chat template's thinking switch; None leaves it to the template.
        seed: together with a prompt's id, it determines the random numbers for that prompt.
        slots: rows of a decoding pass.
        save_token_ids: write `response_ids`, the tokens as drawn (including the end-of-sequence token), which training then
            uses. Tokenizing the text of a response may give other tokens, and special tokens inside it would be missing.
    """

    max_new_tokens: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    enable_thinking: bool | None = None
    seed: int = 0
    slots: int = 128
    save_token_ids: bool = True

    def response_limit(self, generation_config: Any) -> int:
        """Most tokens of a response."""
        return int(first_set(self.max_new_tokens, generation_config.max_new_tokens, DEFAULT_MAX_NEW_TOKENS))


def request_seed(run_seed: int, id: int, turn: int) -> int:
    """A 63-bit seed for one response, the same on every machine and in every batch."""
    digest = hashlib.sha256(f"{run_seed}:{id}:{turn}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def first_set(*values: Any) -> Any:
    """The first value that is not None."""
    return next((value for value in values if value is not None), None)


def resolve_sampling(settings: RegenerationSettings, generation_config: Any) -> Sampling:
    """The value of each setting: as given, else from the generation config, else `generate`'s default."""
    implied = None if settings.temperature is None else settings.temperature > 0
    if not first_set(settings.do_sample, implied, generation_config.do_sample, False):
        return Sampling(do_sample=False)
    return Sampling(
        do_sample=True,
        temperature=first_set(settings.temperature, generation_config.temperature, 1.0),
        top_k=first_set(settings.top_k, generation_config.top_k, 50),
        top_p=first_set(settings.top_p, generation_config.top_p, 1.0),
    )


def origin_of(settings: RegenerationSettings, target: str, dtype: str, generation_config: Any) -> dict[str, Any]:
    """
    What the responses depend on, for the note next to the file of responses.

    Args:
        target, dtype: The target's name and its dtype, such as `"bfloat16"`.
        generation_config: The target's generation config.
    """
    return {
        "target": target,
        "dtype": dtype,
        "max_new_tokens": settings.response_limit(generation_config),
        "enable_thinking": settings.enable_thinking,
        "seed": settings.seed,
        **asdict(resolve_sampling(settings, generation_config)),
    }


def origin_before_loading(settings: RegenerationSettings, target: str, dtype: str = "auto") -> dict[str, Any]:
    """
    The part of [`origin_of`] that the target's small files tell, so that other settings are found before its weights are
    loaded. Empty if the files cannot be read: loading the target then gives the error.

    Args:
        target: A folder, or a name on the Hub.
        dtype: The dtype to load the target in; `"auto"` for that of the checkpoint.
    """
    try:
        config = AutoConfig.from_pretrained(target)
    except (OSError, ValueError):
        return {}
    try:
        generation_config = GenerationConfig.from_pretrained(target)
    except OSError:
        generation_config = GenerationConfig.from_model_config(config)
    own = config.dtype if dtype == "auto" else dtype
    origin = origin_of(settings, target, str(own).removeprefix("torch."), generation_config)
    return origin if own is not None else {name: value for name, value in origin.items() if name != "dtype"}
