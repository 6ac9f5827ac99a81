"""A conversation goes on from exactly the tokens that were generated."""

import pytest
import tiny_folders
import torch

from dspark_hf.conversations import Chat


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_folders.tokenizer()


def answered(conversation, prompt_ids, answer_ids):
    return conversation.add_answer(torch.cat([prompt_ids[0], torch.tensor(answer_ids)]))


@pytest.mark.parametrize("ends", [True, False], ids=["finished", "cut short"])
def test_the_second_turn_is_the_first_and_what_the_template_adds(tokenizer, ends):
    conversation = Chat(tokenizer, "Be brief.")
    first = conversation.ask("Hi")
    answer = tokenizer("Yes", add_special_tokens=False)["input_ids"]
    assert answered(conversation, first, answer + [tokenizer.eos_token_id] * ends) == "Yes"
    second = conversation.ask("Why?")
    text = "<system>Be brief.<end><user>Hi<end><assistant>Yes<end><user>Why?<end><assistant>"
    assert tokenizer.decode(second[0]) == text
    assert second[0, : first.shape[1]].tolist() == first[0].tolist()


def test_an_answer_is_never_tokenized_again(tokenizer):
    """Ids that no text gives back, such as a letter after padding, stay as they are."""
    conversation = Chat(tokenizer)
    first = conversation.ask("Hi")
    strange = [tokenizer.pad_token_id, tokenizer.convert_tokens_to_ids("a")]
    answered(conversation, first, strange)
    second = conversation.ask("Why?")
    assert second[0, first.shape[1] : first.shape[1] + 2].tolist() == strange


def test_without_a_template_turns_are_plain_text_and_a_warning_says_so(caplog):
    bare = tiny_folders.tokenizer()
    bare.chat_template, bare.name_or_path = None, "a/base-model-to-chat-with"
    conversation = Chat(bare)
    first = conversation.ask("Hi")
    answered(conversation, first, bare("Yes")["input_ids"])
    assert bare.decode(conversation.ask("Why?")[0]) == "HiYes\n\nWhy?"
    assert caplog.text.count("'a/base-model-to-chat-with' has no chat template, so prompts are plain text") == 1
