"""What of a conversation is learned: the assistant's words and the end of each turn, and nothing of the template."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf.training.chat import encode_row, encode_rows

CHATML = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ' ' + m['content'] + '<e> \\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ '<s>assistant ' }}"
    "{% generation %}{{ m['content'] + '<e>' }}{% endgeneration %}{{ ' \\n' }}"
    "{% else %}{{ '<s>' + m['role'] + ' ' + m['content'] + '<e> \\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)
# Thoughts of earlier turns are dropped, and a finished last turn is written with an empty thought.
REWRITING = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ' ' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ 'think ' }}{% endif %}{{ m['content'] + '<e> \\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}{% endif %}"
)
WORDS = ["<s>", "<e>", "user", "assistant", "system", "think", *"abcdefgh", "\n"]


@pytest.fixture(params=[CHATML, MARKED], ids=["plain_template", "marked_template"])
def tokenizer(request):
    return make_tokenizer(request.param)


def make_tokenizer(template):
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "[UNK]"])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<e>", unk_token="[UNK]")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>"]})
    tokenizer.chat_template = template
    return tokenizer


def learned(tokenizer, row) -> str:
    """The learned tokens; `|` where one run ends and another begins."""
    parts, before = [], False
    for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True):
        if mask and not before and parts:
            parts.append("|")
        if mask:
            parts.append(tokenizer.convert_ids_to_tokens(token))
        before = bool(mask)
    return " ".join(parts)


def test_a_finished_response_is_learned_with_the_end_of_its_turn_and_no_more(tokenizer):
    row = encode_row({"prompt": "a b", "response": "c d"}, tokenizer)
    assert learned(tokenizer, row) == "c d <e>"
    assert tokenizer.decode(row["input_ids"]).startswith("<s>")


def test_an_unfinished_response_has_no_end(tokenizer):
    row = encode_row({"prompt": "a b", "response": "c d", "finished": False}, tokenizer)
    assert learned(tokenizer, row) == "c d"
    assert row["loss_mask"][-1] == 1


def test_every_assistant_turn_is_learned(tokenizer):
    messages = [
        {"role": "system", "content": "h"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b c"},
        {"role": "user", "content": "d"},
    ]
    assert learned(tokenizer, encode_row({"messages": messages, "response": "e f"}, tokenizer)) == "b c <e> | e f <e>"
    cut = encode_row({"messages": messages, "response": "e f", "finished": False}, tokenizer)
    assert learned(tokenizer, cut) == "b c <e> | e f"


def test_drawn_tokens_are_used_as_they_are(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["g", "h", "<e>"])
    row = encode_row({"prompt": "a", "response": "whatever", "response_ids": ids}, tokenizer)
    assert learned(tokenizer, row) == "g h <e>"
    assert row["input_ids"][-3:] == ids


@pytest.mark.parametrize("max_length", range(1, 22))
def test_cutting_never_leaves_part_of_the_template_at_the_end(max_length, tokenizer):
    messages = [{"role": r, "content": "a b c"} for r in ("user", "assistant", "user", "assistant")]
    row, whole = (encode_row({"messages": messages}, tokenizer, length) for length in (max_length, None))
    assert len(row["input_ids"]) <= max_length
    assert whole["input_ids"][: len(row["input_ids"])] == row["input_ids"]
    if row["input_ids"] and len(row["input_ids"]) < len(whole["input_ids"]):
        assert row["loss_mask"][-1] == 1


def test_a_template_that_rewrites_earlier_turns_is_learned_as_generated():
    tokenizer = make_tokenizer(REWRITING)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    row = encode_row({"messages": messages, "response": "d"}, tokenizer)
    assert learned(tokenizer, row) == "d <e>" or learned(tokenizer, row).endswith("d <e>")
    assert tokenizer.decode(row["input_ids"]).count("b") == 1


def test_without_a_template_prompt_and_response_are_plain_text():
    tokenizer = make_tokenizer(None)
    row = encode_row({"prompt": "a b", "response": "c d"}, tokenizer)
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == ["a", "b", "c", "d", "<e>"]
    assert row["loss_mask"] == [0, 0, 1, 1, 1]


def test_rows_with_nothing_to_learn_are_left_out_and_counted(tokenizer, caplog):
    rows = [{"prompt": "a", "response": "b c"}, {"prompt": "a " * 30, "response": "b"}]
    assert len(encode_rows(rows, tokenizer, max_length=12)) == 1


def test_a_row_without_a_conversation_is_refused(tokenizer):
    with pytest.raises(ValueError, match="give 'messages'"):
        encode_row({"text": "a"}, tokenizer)
