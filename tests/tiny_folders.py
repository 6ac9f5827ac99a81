"""Tiny models with a tokenizer, as folders, for what is given names of folders."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import tiny

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ["<pad>", "<end>", "<user>", "<assistant>", "<system>"]


class Folders(NamedTuple):
    """
    Args:
        target: A `tiny.bigram` target with its tokenizer.
        perfect: A drafter whose every draft passes.
        random: A drafter whose drafts nearly all fail.
        dflash: A drafter without sequential head.
    """

    target: Path
    perfect: Path
    random: Path
    dflash: Path


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a letter, with a chat template; 128 tokens in all, as the tiny targets have."""
    letters = [chr(c) for c in range(32, 127)] + ["\n"]
    letters += [chr(c) for c in range(0xC0, 0xC0 + tiny.VOCAB_SIZE - len(SPECIAL) - len(letters))]
    vocabulary = {token: i for i, token in enumerate(SPECIAL + letters)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=SPECIAL[2:],
        chat_template=CHAT_TEMPLATE,
    )


def save(folder: Path) -> Folders:
    """Writes everything under `folder`."""
    target = tiny.bigram()
    folders = Folders(*(folder / name for name in Folders._fields))
    target.save_pretrained(folders.target)
    tokenizer().save_pretrained(folders.target)
    tiny.perfect_drafter(target).save_pretrained(folders.perfect)
    tiny.random_drafter(target).save_pretrained(folders.random)
    tiny.random_drafter(
        target, markov_rank=0, confidence_head_with_markov=False, sample_from_anchor=False
    ).save_pretrained(folders.dflash)
    return folders
