"""A tiny target and its tokenizer, with a token for each word."""

from __future__ import annotations

import pytest
from responses.words import END_ID, SPECIAL, TEMPLATE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import tiny


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: `<end>` is 0, roles follow, then `w5`, `w6`, ... for every other id."""
    words = SPECIAL + [f"w{i}" for i in range(len(SPECIAL), tiny.VOCAB_SIZE)]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w5"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        eos_token="<end>",
        additional_special_tokens=SPECIAL[1:],
        chat_template=TEMPLATE,
    )


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return tiny.llama(eos_token_id=END_ID)
