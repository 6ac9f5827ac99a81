"""Ways to give a prompt: padded, as embeddings, with positions or token types of its own."""

import pytest
import torch
import transformers
from generation import rig

import tiny


def test_left_padding():
    padded = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    row = {name: value[1:] for name, value in padded.items()}
    assert row["attention_mask"].tolist() == [[0] * 5 + [1] * 4]
    for family in ("qwen3", "gemma3"):
        outcome = rig.compare(rig.target(family), row)
        alone = rig.compare(rig.target(family), tiny.prompt(4, seed=1))
        assert rig.ids_of(outcome.plain)[5:] == rig.ids_of(alone.plain)


def test_a_hole_in_the_mask():
    inputs = tiny.prompt(9)
    inputs["attention_mask"][:, 3:5] = 0
    rig.compare(rig.target(), inputs)


def test_padding_is_found_where_no_mask_is_given():
    target = rig.target()
    ids = torch.cat([torch.full((1, 3), tiny.PAD_ID), tiny.prompt(6)["input_ids"]], dim=1)
    plain = target.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    for kind in rig.KINDS:
        drafter = rig.drafter_of(kind, target, rig.ids_of(plain)[3:])
        drafted = target.generate(input_ids=ids, max_new_tokens=12, do_sample=False, assistant_model=drafter)
        assert torch.equal(drafted, plain)


def test_no_mask():
    rig.compare(rig.target(), {"input_ids": tiny.prompt()["input_ids"]})


def test_ids_by_position():
    target, ids = rig.target(), tiny.prompt()["input_ids"]
    drafter = tiny.random_drafter(target, num_hidden_layers=1)
    plain = target.generate(ids, max_new_tokens=6, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=6, do_sample=False, assistant_model=drafter), plain)
    positional = (ids, transformers.GenerationConfig(max_new_tokens=6), None, None, None, None, drafter)
    assert torch.equal(target.generate(*positional), plain)


def test_nothing_but_the_first_token():
    target = tiny.qwen3(num_hidden_layers=2)
    target.generation_config.bos_token_id = 3
    outcome = rig.compare(target, {})
    assert rig.ids_of(outcome.plain)[0] == 3


@pytest.mark.parametrize("length", [1, 9], ids=lambda n: f"{n} embeddings")
def test_embeddings_only(length):
    target = rig.target()
    inputs = tiny.prompt(length)
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    for mask in ({}, {"attention_mask": inputs["attention_mask"]}):
        outcome = rig.compare(target, {"inputs_embeds": embeds} | mask, num_hidden=length)
        assert len(rig.ids_of(outcome.plain)) == rig.NEW_TOKENS


def test_embeddings_of_no_token():
    target = rig.target()
    rig.compare(target, {"inputs_embeds": 0.5 * torch.randn(1, 7, tiny.HIDDEN_SIZE)}, num_hidden=7)


def test_embeddings_beside_ids():
    target = rig.target()
    ids = tiny.prompt()["input_ids"]
    embeds = target.get_input_embeddings()(tiny.prompt(seed=8)["input_ids"])
    outcome = rig.compare(target, {"input_ids": ids, "inputs_embeds": embeds, "attention_mask": torch.ones_like(ids)})
    assert rig.ids_of(outcome.plain)[:9] == ids[0].tolist()


def test_embeddings_with_padding_and_outputs():
    target = rig.target()
    padded = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    embeds = target.get_input_embeddings()(padded["input_ids"][1:])
    inputs = {"inputs_embeds": embeds, "attention_mask": padded["attention_mask"][1:]}
    rig.compare(target, inputs, num_hidden=4, return_dict_in_generate=True, output_scores=True)


def test_embeddings_in_chunks_are_refused():
    embeds = torch.randn(1, 7, tiny.HIDDEN_SIZE)
    assert "inputs_embeds" in rig.refusing(rig.target(), inputs_embeds=embeds, prefill_chunk_size=3)


def test_positions_of_the_user():
    inputs = tiny.prompt()
    inputs["position_ids"] = torch.arange(9)[None] + 5
    target = rig.target()
    outcome = rig.compare(target, inputs, num_hidden=0)
    assert outcome.plain.shape[1] == 9 + rig.NEW_TOKENS


@pytest.mark.parametrize("types", [[5, 5, 5, 5, 5, 7], [7], [1, 2, 3]], ids=["the last differs", "one", "all differ"])
def test_token_types(types):
    """Every new token has the type of the last one, also where several are fed at once."""
    config = tiny.target_config("GPT2", n_embd=32, n_layer=2, n_head=4)
    target = tiny.build_target(config)
    inputs = tiny.prompt(len(types)) | {"token_type_ids": torch.tensor([types])}
    outcome = rig.compare(target, inputs)
    other = inputs | {"token_type_ids": torch.zeros(1, len(types), dtype=torch.long)}
    assert rig.ids_of(outcome.plain) != rig.ids_of(target.generate(**other, max_new_tokens=16, do_sample=False))
