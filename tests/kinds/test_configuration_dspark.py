"""The drafter's configuration: what follows from its fields, what it refuses, and how it is made for a target."""

import re

import pytest
import target_families
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, LlamaConfig, PreTrainedTokenizerFast

import tiny
from dspark_hf import DSparkConfig
from dspark_hf.configuration_drafter import spread_layer_ids

pytestmark = pytest.mark.integration


def config(**fields) -> DSparkConfig:
    own = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "target_layer_ids": [0, 2],
        "mask_token_id": 127,
        "markov_rank": 8,
    }
    return DSparkConfig(**(own | fields))


# ---------------------------------------------------------------------- what follows from the fields


def test_tapped_layers_are_layer_outputs():
    assert config(target_layer_ids=[-1, 0, 3]).hidden_state_indices == [0, 1, 4]


@pytest.mark.parametrize(("sample_from_anchor", "drafts"), [(True, 7), (False, 6)])
def test_number_of_drafts_depends_on_the_block_layout(sample_from_anchor: bool, drafts: int):
    assert config(block_size=7, sample_from_anchor=sample_from_anchor).num_draft_tokens == drafts


def test_a_reduced_vocabulary_narrows_the_logits():
    assert config().logits_size == 128
    assert config(draft_vocab_size=20).logits_size == 20


def test_sliding_layers_are_causal_and_windowed_unless_told_otherwise():
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    c = config(**mixed)
    assert [c.layer_is_causal(0), c.layer_is_causal(1)] == [True, False]
    assert [c.layer_window(0), c.layer_window(1)] == [5, None]
    for is_causal in (True, False):
        c = config(**mixed, is_causal=is_causal)
        assert [c.layer_is_causal(0), c.layer_is_causal(1)] == [is_causal, is_causal]


def test_widths_default_to_one_another():
    c = config(num_key_value_heads=None, head_dim=None, target_hidden_size=None)
    assert (c.num_key_value_heads, c.head_dim, c.target_hidden_size) == (4, 8, 32)
    assert c.layer_types == ["full_attention", "full_attention"]


def test_the_empty_configuration_can_be_built():
    # transformers builds one to find the defaults when it writes a configuration.
    assert DSparkConfig().target_layer_ids == []


# ---------------------------------------------------------------------- what is refused

CONTRADICTIONS = {
    "unsorted taps": ({"target_layer_ids": [2, 0]}, r"strictly increasing, got \[2, 0\]"),
    "repeated taps": ({"target_layer_ids": [1, 1]}, r"strictly increasing, got \[1, 1\]"),
    "taps below the embedding": ({"target_layer_ids": [-2, 1]}, r"starts at -1"),
    "taps above the target": ({"num_target_layers": 2}, r"taps layer 2, but the target has 2 layers"),
    "no draft in a block": ({"block_size": 1, "sample_from_anchor": False}, "drafts nothing"),
    "empty block": ({"block_size": 0}, "drafts nothing"),
    "no mask token": ({"mask_token_id": None}, "mask_token_id is missing"),
    "mask token outside the vocabulary": ({"mask_token_id": 128}, "outside the vocabulary of 128"),
    "negative mask token": ({"mask_token_id": -1}, "outside the vocabulary of 128"),
    "mask token ends the text": ({"eos_token_id": 127}, "also an end-of-sequence token"),
    "mask token is one of those that end it": ({"eos_token_id": [3, 127]}, "also an end-of-sequence token"),
    "negative rank": ({"markov_rank": -1}, "markov_rank must be 0"),
    "unknown head": ({"markov_head_type": "lstm"}, r"one of \('vanilla', 'gated', 'rnn'\), got 'lstm'"),
    "confidence reads a missing head": ({"markov_rank": 0}, "set confidence_head_with_markov=False"),
    "too few layer types": ({"layer_types": ["full_attention"]}, "names 1 layers, num_hidden_layers is 2"),
    "unknown layer type": ({"layer_types": ["full_attention", "linear_attention"]}, r"got \['linear_attention'\]"),
    "sliding without a window": ({"layer_types": ["sliding_attention"] * 2}, "sliding_window is not set"),
    "uneven heads": ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads=3"),
    "draft vocabulary too large": ({"draft_vocab_size": 129}, "does not fit a vocabulary of 128"),
    "draft vocabulary empty": ({"draft_vocab_size": 0}, "does not fit a vocabulary of 128"),
}


@pytest.mark.parametrize(("fields", "says"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions_are_refused(fields, says):
    with pytest.raises(ValueError, match=says):
        config(**fields)


def test_one_error_lists_everything_that_is_wrong():
    with pytest.raises(ValueError, match="cannot work") as raised:
        config(target_layer_ids=[2, 0], markov_head_type="lstm", mask_token_id=500, sliding_window=None)
    assert len(re.findall("^- ", str(raised.value), flags=re.MULTILINE)) == 3


def test_fields_changed_later_are_checked_when_the_drafter_is_built():
    c = config()
    c.mask_token_id = 4000
    with pytest.raises(ValueError, match="outside the vocabulary"):
        tiny.build_drafter(c)


# ---------------------------------------------------------------------- files


def test_saving_and_loading_changes_nothing(tmp_path):
    c = config(
        block_size=9,
        sample_from_anchor=False,
        is_causal=True,
        draft_vocab_size=20,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0},
        final_logit_softcapping=30.0,
    )
    c.save_pretrained(tmp_path / "first")
    again = AutoConfig.from_pretrained(tmp_path / "first")
    assert isinstance(again, DSparkConfig)
    again.save_pretrained(tmp_path / "second")
    assert (tmp_path / "first" / "config.json").read_bytes() == (tmp_path / "second" / "config.json").read_bytes()
    for name in ("block_size", "sample_from_anchor", "is_causal", "draft_vocab_size", "rope_parameters"):
        assert getattr(again, name) == getattr(c, name)


# ---------------------------------------------------------------------- made for a target


@pytest.mark.parametrize("name", tiny.TARGETS)
def test_for_target_takes_the_targets_widths(name: str):
    target = tiny.TARGETS[name]().config
    c = DSparkConfig.for_target(target, mask_token_id=tiny.MASK_ID)
    assert (c.hidden_size, c.target_hidden_size, c.vocab_size) == (32, 32, 128)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (4, 2, 8)
    assert c.num_target_layers == 4
    assert c.target_layer_ids == [1]
    assert (c.block_size, c.num_hidden_layers, c.markov_rank) == (7, 5, 256)
    assert c.embedding_scale == (32**0.5 if "gemma" in name else 1.0)
    assert c.final_logit_softcapping == (30.0 if name == "gemma4" else None)
    assert c.hidden_act == ("gelu_pytorch_tanh" if "gemma" in name else "silu")


@pytest.mark.parametrize(
    ("rope_parameters", "base"),
    [
        ({"rope_type": "default", "rope_theta": 5e5}, 5e5),
        ({"rope_type": "linear", "rope_theta": 7e4, "factor": 2.0}, 7e4),
    ],
    ids=["plain", "scaled"],
)
def test_for_target_takes_the_targets_rotary_base(rope_parameters, base):
    target = tiny.target_config("Qwen3", rope_parameters=rope_parameters)
    c = DSparkConfig.for_target(target, mask_token_id=127)
    assert c.rope_parameters == {"rope_type": "default", "rope_theta": base}


def test_for_target_takes_the_rotary_base_of_full_attention_layers():
    rope = {
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    target = tiny.target_config("Gemma3Text", layer_types=tiny.ALTERNATING, rope_parameters=rope)
    assert DSparkConfig.for_target(target, mask_token_id=127).rope_parameters["rope_theta"] == 1e6


def test_for_target_reads_the_text_part_of_a_multimodal_target():
    text = tiny.target_config("Qwen3_5Text").to_dict()
    target = transformers.Qwen3_5Config(text_config=text)
    c = DSparkConfig.for_target(target, mask_token_id=127)
    assert (c.hidden_size, c.vocab_size, c.num_target_layers) == (32, 128, 4)
    # Positions of the drafter are plain and its rotation is whole, whatever the target's are.
    assert c.rope_parameters.keys() == {"rope_type", "rope_theta"}


@pytest.mark.parametrize("family", ["codegen", "cpmant", "longcat_flash", "mamba2", "roc_bert", "rwkv", "openai-gpt"])
def test_for_target_of_configurations_with_other_fields(family):
    target = target_families.config_of(family)
    c = DSparkConfig.for_target(target, mask_token_id=tiny.MASK_ID)
    assert (c.vocab_size, c.hidden_size, c.num_target_layers) == (tiny.VOCAB_SIZE, tiny.HIDDEN_SIZE, tiny.NUM_LAYERS)
    assert c.num_attention_heads >= 1


def test_for_target_of_a_configuration_without_a_width():
    with pytest.raises(ValueError, match="BltConfig has no hidden_size: there is no drafter for this family"):
        DSparkConfig.for_target(target_families.config_of("blt"))


def test_for_target_lets_every_field_be_given():
    target = tiny.target_config("Qwen3")
    c = DSparkConfig.for_target(
        target, mask_token_id=127, block_size=5, target_layer_ids=[0, 3], qk_norm=False, intermediate_size=48
    )
    assert (c.block_size, c.target_layer_ids, c.qk_norm, c.intermediate_size) == (5, [0, 3], False, 48)


def test_for_target_without_a_rank_has_no_markov_embedding_to_read():
    c = DSparkConfig.for_target(tiny.target_config("Qwen3"), mask_token_id=127, markov_rank=0)
    assert c.enable_confidence_head
    assert not c.confidence_head_with_markov


def test_for_target_knows_the_free_tokens_of_the_released_targets():
    assert DSparkConfig.for_target(tiny.target_config("Qwen3", vocab_size=151936)).mask_token_id == 151669
    assert DSparkConfig.for_target(tiny.target_config("Gemma3Text", vocab_size=262208)).mask_token_id == 4


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_for_target_asks_for_a_mask_token_where_none_is_known(family: str):
    with pytest.raises(ValueError, match=r"mask_token_id=, an id below 128"):
        DSparkConfig.for_target(tiny.target_config(family))


def test_for_target_refuses_encoder_decoders():
    with pytest.raises(ValueError, match="T5Config is an encoder-decoder"):
        DSparkConfig.for_target(transformers.T5Config(), mask_token_id=5)


@pytest.mark.parametrize(
    ("num_layers", "ids"),
    [
        (36, [1, 9, 17, 25, 33]),
        (40, [1, 10, 19, 28, 37]),
        (30, [1, 8, 14, 21, 27]),
        (6, [1, 2, 3]),
        (4, [1]),
        (3, [0]),
        (1, [0]),
    ],
)
def test_taps_are_spread_evenly(num_layers: int, ids: list[int]):
    assert spread_layer_ids(num_layers) == ids


@pytest.mark.parametrize("num_layers", range(1, 100))
def test_taps_are_always_valid(num_layers: int):
    ids = spread_layer_ids(num_layers)
    assert ids == sorted(set(ids))
    assert ids[0] >= 0
    assert ids[-1] < max(num_layers - 1, 1)  # never the last layer, whose hidden state is the normed one


# ------------------------------------------------------------------ the mask token of families without a spare row

VOCABULARIES = {
    # Family: special tokens in their order, with what the tokenizer calls them, and the one that may stand for a mask.
    "Llama 3": (["<|begin|>", "<|end|>", "<|reserved_special_token_0|>", "<|eot|>"], {"bos": 0, "eos": 1}, 2),
    "Llama 2": (["<unk>", "<s>", "</s>", "<0x00>"], {"unk": 0, "bos": 1, "eos": 2}, 0),
    "a mask token": (["<pad>", "<end>", "<mask>"], {"pad": 0, "eos": 1, "mask": 2}, 2),
    "SmolLM2": (["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"], {"unk": 0, "bos": 1, "eos": 2}, 3),
    "Gemma": (["<pad>", "<eos>", "<unused0>"], {"pad": 0, "eos": 1}, 2),
    "GPT-2": (["<|endoftext|>"], {"bos": 0, "eos": 0, "unk": 0}, None),
}


@pytest.mark.parametrize("family", VOCABULARIES)
def test_families_without_a_spare_row_take_an_unused_special_token(family):
    special, roles, expected = VOCABULARIES[family]
    vocabulary = {token: i for i, token in enumerate([*special, "a", "b"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(vocabulary, unk_token="a")),
        chat_template="<|im_start|>{{ messages }}<|im_end|><|eot|>",
        **{f"{role}_token": special[i] for role, i in roles.items()},
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [token for token in special if token != "<0x00>"]})
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 4}
    text = LlamaConfig(vocab_size=len(vocabulary), eos_token_id=roles["eos"], **sizes)
    if expected is None:
        with pytest.raises(ValueError, match="pass mask_token_id="):
            DSparkConfig.for_target(text, tokenizer=tokenizer)
    else:
        assert DSparkConfig.for_target(text, tokenizer=tokenizer).mask_token_id == expected


def test_without_a_tokenizer_the_error_asks_for_it():
    with pytest.raises(ValueError, match="pass tokenizer=, which may have one, or mask_token_id="):
        DSparkConfig.for_target(LlamaConfig(vocab_size=100, hidden_size=8, num_attention_heads=2))
