"""What of a conversation is learned: the target's words and the end of each turn, in the context that it saw."""

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dspark_hf.conversations import rows as chat
from dspark_hf.conversations.rows import encode_rows
from dspark_hf.responses import RegenerationSettings, Regenerator

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
# Marks more than the target's own, as SmolLM3's does.
HEADER_MARKED = MARKED.replace("{{ '<s>assistant ' }}{% generation %}{{ ", "{% generation %}{{ '<s>assistant ' + ")
# As Qwen3's: earlier turns lose their thoughts, and a finished last turn gets an empty one; a switch closes thoughts.
THINKING = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ' ' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ 'think ' }}{% endif %}"
    "{{ m['content'] if loop.last else m['content'].removeprefix('think ') }}{{ '<e> \\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant ' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ 'think ' }}{% endif %}{% endif %}"
)
CALLING = CHATML.replace(" + m['content']", " + m['content'] + (m.tool_calls[0] if m.tool_calls else '')")
TEMPLATES = {"plain_template": CHATML, "marked_template": MARKED, "marked_header": HEADER_MARKED}
WORDS = ["<s>", "<e>", "user", "assistant", "system", "tool", "think", *"abcdefgh", "\n", "<end>"]
TWO_TURNS = [
    {"role": "system", "content": "h"},
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b c"},
    {"role": "user", "content": "d"},
    {"role": "assistant", "content": "e f"},
]


@pytest.fixture(params=TEMPLATES.values(), ids=TEMPLATES)
def tokenizer(request):
    return make_tokenizer(request.param)


def make_tokenizer(template, eos_token="<e>"):
    """One token a word."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*WORDS, "[UNK]"])}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos_token, unk_token="[UNK]")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<s>", "<e>"]})
    tokenizer.chat_template = template
    return tokenizer


def make_spaced_tokenizer(template):
    """One token a letter, and a space before every text, as Llama 2's tokenizer."""
    letters = ["▁", "\n", "[UNK]", *"abcdefghinorstu:[]/"]
    spaced = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(letters)}, unk_token="[UNK]"))
    spaced.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaced.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    spaced.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spaced, eos_token="<e>", unk_token="[UNK]")
    tokenizer.chat_template = template
    return tokenizer


SPACED = (  # As TinyLlama's and Zephyr's.
    "{% for m in messages %}{{ m['role'] + ':\\n' + m['content'] + '<e>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\\n' }}{% endif %}"
)
SPACE_WRITTEN = (  # As Llama 2's.
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[' + m['content'] + ']' }}"
    "{% else %}{{ ' ' + m['content'] + ' <e>' }}{% endif %}{% endfor %}"
)


def encode(row, tokenizer, **options):
    """The only row of a conversation."""
    (encoded,) = encode_rows([row], tokenizer, **options)
    return encoded


def learned(tokenizer, *rows) -> str:
    """The learned tokens; `|` where one run ends and another begins."""
    runs = [""]
    for row in rows:
        for token, mask in zip(row["input_ids"], row["loss_mask"], strict=True):
            if mask:
                runs[-1] += " " + tokenizer.convert_ids_to_tokens(token)
            elif runs[-1]:
                runs.append("")
    return " |".join(filter(None, runs)).strip()


def prompts(row) -> list[list[int]]:
    """What precedes each learned run."""
    mask = [0, *row["loss_mask"]]
    return [row["input_ids"][:i] for i in range(len(row["input_ids"])) if mask[i + 1] and not mask[i]]


def generation_prompts(tokenizer, messages, **settings) -> list[list[int]]:
    """What regeneration gives the target before each of its turns."""
    generation = Regenerator.__new__(Regenerator)  # Prompts need no target.
    generation.tokenizer, generation.settings = tokenizer, RegenerationSettings(**settings)
    return [generation.encode(messages[:i]) for i, message in enumerate(messages) if message["role"] == "assistant"]


def test_a_finished_response_is_learned_with_the_end_of_its_turn_and_no_more(tokenizer):
    row = encode({"prompt": "a b", "response": "c d"}, tokenizer)
    assert learned(tokenizer, row) == "c d <e>"
    assert tokenizer.decode(row["input_ids"]).startswith("<s>")


def test_an_unfinished_response_has_no_end(tokenizer):
    row = encode({"prompt": "a b", "response": "c d", "finished": False}, tokenizer)
    assert learned(tokenizer, row) == "c d"
    assert row["loss_mask"][-1] == 1


def test_every_assistant_turn_is_learned(tokenizer):
    assert learned(tokenizer, encode({"messages": TWO_TURNS}, tokenizer)) == "b c <e> | e f <e>"
    cut = {"messages": TWO_TURNS[:-1], "response": "e f", "finished": False}
    assert learned(tokenizer, encode(cut, tokenizer)) == "b c <e> | e f"


def test_drawn_tokens_are_used_as_they_are(tokenizer):
    ids = tokenizer.convert_tokens_to_ids(["g", "h", "<e>"])
    row = encode({"prompt": "a", "response": "whatever", "response_ids": ids}, tokenizer)
    assert learned(tokenizer, row) == "g h <e>"
    assert row["input_ids"][-3:] == ids


def test_drawn_tokens_of_an_earlier_turn_stand_in_its_message(tokenizer):
    messages = [dict(message) for message in TWO_TURNS]
    messages[2]["response_ids"] = tokenizer.convert_tokens_to_ids(["b", "c", "<e>"])
    assert learned(tokenizer, encode({"messages": messages}, tokenizer)) == "b c <e> | e f <e>"
    messages[2]["response_ids"] = tokenizer.convert_tokens_to_ids(["g", "<e>"])  # Read differently in the next prompt.
    assert learned(tokenizer, *encode_rows([{"messages": messages}], tokenizer)) == "g <e> | e f <e>"
    del messages[2]["response_ids"]
    messages[2]["finished"] = False
    assert learned(tokenizer, encode({"messages": messages}, tokenizer)) == "b c | e f <e>"


@pytest.mark.parametrize("max_length", range(1, 22))
def test_cutting_never_leaves_part_of_the_template_at_the_end(max_length, tokenizer):
    messages = [{"role": r, "content": "a b c"} for r in ("user", "assistant", "user", "assistant")]
    whole = encode({"messages": messages}, tokenizer)
    for row in encode_rows([{"messages": messages}], tokenizer, max_length):
        assert len(row["input_ids"]) <= max_length
        assert whole["input_ids"][: len(row["input_ids"])] == row["input_ids"]
        assert row["loss_mask"][-1] == 1


@pytest.mark.parametrize(
    "row", [{"response": "c d"}, {"response": "think c d"}], ids=["no_thought", "thought_not_closed"]
)
def test_a_thought_that_the_template_adds_is_not_learned(row):
    tokenizer = make_tokenizer(THINKING)
    assert learned(tokenizer, encode({"prompt": "a", **row}, tokenizer)) == row["response"] + " <e>"
    closed = encode({"prompt": "a", **row}, tokenizer, enable_thinking=False)
    assert learned(tokenizer, closed) == row["response"] + " <e>"
    assert tokenizer.convert_ids_to_tokens(prompts(closed)[0])[-1] == "think"


@pytest.mark.parametrize("thinking", [None, False], ids=["thinking", "not_thinking"])
def test_a_template_that_rewrites_earlier_turns_gives_each_turn_a_row(thinking):
    tokenizer = make_tokenizer(THINKING)
    options = {} if thinking is None else {"enable_thinking": thinking}
    content = "b c" if thinking is False else "think b c"
    messages = [*TWO_TURNS[:2], {"role": "assistant", "content": content}, *TWO_TURNS[3:]]
    rows = encode_rows([{"messages": messages}], tokenizer, **options)
    assert len(rows) == 2
    assert learned(tokenizer, *rows) == f"{content} <e> | e f <e>"
    assert [p for row in rows for p in prompts(row)] == generation_prompts(
        tokenizer, messages, enable_thinking=thinking
    )


def test_the_end_is_the_templates_where_the_tokenizer_names_another_or_none():
    for eos_token in (None, "<end>"):
        tokenizer = make_tokenizer(THINKING, eos_token)
        assert learned(tokenizer, encode({"prompt": "a", "response": "c d"}, tokenizer)) == "c d <e>"
    without_end = make_tokenizer(CHATML.replace("<e>", ""), "<end>")
    assert learned(without_end, encode({"prompt": "a", "response": "c d"}, without_end)) == "c d <end>"
    given = [without_end.convert_tokens_to_ids("<e>")]
    assert learned(without_end, encode({"prompt": "a", "response": "c"}, without_end, eos_token_ids=given)) == "c <e>"


def test_nothing_behind_an_end_of_turn_is_learned(tokenizer):
    ends = [tokenizer.convert_tokens_to_ids("h"), tokenizer.eos_token_id]
    assert learned(tokenizer, encode({"prompt": "a", "response": "c h d"}, tokenizer, eos_token_ids=ends)) == "c h"


@pytest.mark.parametrize("template", [SPACED, SPACE_WRITTEN], ids=["line_end", "written_space"])
def test_prompts_are_those_of_generation_where_the_tokenizer_begins_texts_with_a_space(template):
    tokenizer = make_spaced_tokenizer(template)
    messages = [{"role": r, "content": c} for r, c in zip(["user", "assistant"] * 2, ["a", "b", "c", "d"], strict=True)]
    rows = encode_rows([{"messages": messages}], tokenizer)
    assert [p for row in rows for p in prompts(row)] == generation_prompts(tokenizer, messages)


def test_a_first_words_space_is_learned_only_where_the_target_writes_it():
    spaced, written = make_spaced_tokenizer(SPACED), make_spaced_tokenizer(SPACE_WRITTEN)
    row = {"prompt": "a", "response": "hi"}
    assert learned(spaced, encode(row, spaced)) == "h i <e>"
    assert learned(written, encode(row, written)) == "▁ h i <e>"
    unspaced = make_tokenizer(CHATML.replace("'<s>assistant '", "'<s>assistant'"))  # Here it would be in the text.
    assert learned(unspaced, encode(row | {"response": "c d"}, unspaced)) == "c d <e>"


def test_a_token_that_would_span_the_seam_is_not_learned():
    vocabulary = {token: i for i, token in enumerate(["a", "b", "ab", "c", "<e>"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocabulary, [("a", "b")])), eos_token="<e>"
    )
    assert tokenizer.tokenize("cabc") == ["c", "ab", "c"]
    row = encode({"prompt": "ca", "response": "bc"}, tokenizer)
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == ["c", "a", "b", "c", "<e>"]
    assert row["loss_mask"] == [0, 0, 1, 1, 1]


def test_without_a_template_prompt_and_response_are_plain_text():
    tokenizer = make_tokenizer(None)
    row = encode({"prompt": "a b ", "response": "c d"}, tokenizer)
    assert tokenizer.convert_ids_to_tokens(row["input_ids"]) == ["a", "b", "c", "d", "<e>"]
    assert row["loss_mask"] == [0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match=r"system, user, assistant, .* set tokenizer.chat_template"):
        encode_rows([{"messages": TWO_TURNS}], tokenizer)


def test_what_tools_say_is_context_and_calls_are_learned():
    tokenizer = make_tokenizer(CALLING)
    calls = {"role": "assistant", "content": None, "tool_calls": ["g h"]}
    messages = [TWO_TURNS[1], calls, {"role": "tool", "content": "d"}]
    assert learned(tokenizer, encode({"messages": messages, "response": "e"}, tokenizer)) == "g h <e> | e <e>"
    # A call may end otherwise than words do.
    tokenizer.chat_template = CALLING.replace("'<e> \\n'", "('<s>' if m.tool_calls else '<e> \\n')")
    assert learned(tokenizer, encode({"messages": messages, "response": "e"}, tokenizer)) == "g h <s> | e <e>"


@pytest.mark.parametrize(
    "template",
    [CHATML, CALLING.replace("'<s>' +", "('f ' if m.tool_calls else '') + '<s>' +")],
    ids=["not_shown", "not_behind_the_generation_prompt"],
)
def test_calls_that_the_template_does_not_show_as_written_are_not_learned_and_said(template, caplog):
    chat.logger.warning_once.cache_clear()
    tokenizer = make_tokenizer(template)
    messages = [TWO_TURNS[1], {"role": "assistant", "content": "", "tool_calls": ["g h"]}, TWO_TURNS[3]]
    assert learned(tokenizer, encode({"messages": messages, "response": "e f"}, tokenizer)) == "e f <e>"
    assert "tool calls or reasoning" in caplog.text


def test_contents_of_parts_and_other_names_of_roles_are_read(tokenizer):
    parts = [{"type": "text", "text": "b "}, {"type": "text", "text": "c"}]
    messages = [{"from": "human", "value": "a"}, {"role": "assistant", "content": parts}]
    assert encode({"messages": messages}, tokenizer) == encode({"prompt": "a", "response": "b c"}, tokenizer)
    messages[1]["content"] = [{"type": "image"}]
    with pytest.raises(ValueError, match="holds image"):
        encode_rows([{"messages": messages}], tokenizer)


def test_what_is_said_before_any_question_is_context(tokenizer):
    messages = [{"role": "assistant", "content": "a b"}, {"role": "user", "content": "c"}]
    assert learned(tokenizer, encode({"messages": messages, "response": "d"}, tokenizer)) == "d <e>"


def test_rows_with_nothing_to_learn_are_left_out_and_counted(tokenizer, caplog):
    rows = [
        {"prompt": "a", "response": "b c"},
        {"prompt": "a " * 30, "response": "b"},
        {"prompt": "a", "response": ""},
        {"prompt": "a"},
    ]
    assert len(encode_rows(rows, tokenizer, max_length=12)) == 1
    assert "3 of 4 rows have no two response tokens within 12 tokens" in caplog.text


def test_a_conversation_that_cannot_be_read_is_refused(tokenizer):
    with pytest.raises(ValueError, match="give 'messages'"):
        encode_rows([{"text": "a"}], tokenizer)
    with pytest.raises(ValueError, match="give each message 'role'"):
        encode_rows([{"messages": [{"text": "a"}]}], tokenizer)
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(ValueError, match=r"refuses a conversation of system, user: no system messages\. Change"):
        encode_rows([{"messages": TWO_TURNS}], tokenizer)
    tokenizer.chat_template = CHATML.replace("m['content']", "m['content'][0]['text'] | string")
    with pytest.raises(ValueError, match="without its text"):
        encode_rows([{"messages": TWO_TURNS}], tokenizer)
