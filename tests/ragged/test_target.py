"""A pass over rows of different lengths gives each row what it gets alone, whatever the target's attention is like."""

import random

import pytest
import torch
import transformers
from ragged.families import FAMILIES, PADDED, target_of
from torch import nn

import tiny
from dspark_hf.ragged.cache import RaggedCache
from dspark_hf.ragged.target import RaggedTarget, mask_rules


def prompt(length, seed):
    return tiny.prompt(length, seed=seed)["input_ids"][0]


class Rows:
    """Rows that are fed in pieces. `alone` is what the target gives for each of them in a pass without a cache."""

    def __init__(self, target, num_rows):
        self.target = target
        self.cache = RaggedCache(target.config.get_text_config().num_hidden_layers, num_rows)
        self.feeder = RaggedTarget(target, self.cache)
        self.ids = [torch.empty(0, dtype=torch.long) for _ in range(num_rows)]

    def feed(self, new_ids, rejected=None):
        """The logits of each row's new tokens; the last `rejected[row]` of them are taken back afterwards."""
        counts = [len(ids) for ids in new_ids]
        with torch.no_grad(), self.feeder.attention_in_place():
            logits = self.feeder.feed(torch.cat(new_ids), counts).logits
        assert logits.shape[:2] == (1, sum(counts))
        pieces = logits[0].split(counts)
        for row, (ids, away) in enumerate(zip(new_ids, rejected or [0] * len(counts), strict=True)):
            if len(ids):
                expected = self.alone(torch.cat([self.ids[row], ids]))[len(self.ids[row]) :]
                torch.testing.assert_close(pieces[row], expected, atol=1e-3, rtol=1e-3)
            self.ids[row] = torch.cat([self.ids[row], ids[: len(ids) - away]])
            self.cache.lengths[row] = len(self.ids[row])
        return pieces

    def alone(self, ids):
        with torch.no_grad():
            return self.target(input_ids=ids[None], use_cache=False).logits[0]

    def replace(self, row):
        self.cache.clear(row)
        self.ids[row] = self.ids[row][:0]


def split_over(lengths, seed):
    return [prompt(length, seed + row) for row, length in enumerate(lengths)]


@pytest.mark.parametrize("family", [*FAMILIES, *(f for f in tiny.TARGETS if f not in tiny.HYBRID_TARGETS)])
def test_two_rows_in_a_pass_are_what_each_is_alone(family):
    rows = Rows(target_of(family), 2)
    rows.feed(split_over([19, 6], 0))
    rows.feed(split_over([1, 4], 10), rejected=[0, 2])
    rows.feed(split_over([3, 1], 20), rejected=[2, 0])
    rows.feed(split_over([1, 18], 30))
    assert rows.cache.pads == (family in PADDED)


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "gemma3", "Llama4Text", "StableLm"])
@pytest.mark.parametrize("seed", range(3))
def test_random_lengths_rejections_and_refills(family, seed):
    """Rows that draft, rows that decode, rows that wait, and rows that get a new prompt meanwhile, in every mixture."""
    rng, rows = random.Random(seed), Rows(target_of(family), 5)
    for step in range(10):
        counts = [rng.choice([0, 1, 1, rng.randint(2, 6)]) for _ in range(5)]
        for row in range(5):
            if len(rows.ids[row]) > 40 or rng.random() < 0.15:
                rows.replace(row)
            if len(rows.ids[row]) == 0:
                counts[row] = rng.choice([0, 1, rng.randint(2, 35)])
        counts[rng.randrange(5)] += not any(counts)
        rejected = [rng.randint(0, count - 1) if 1 < count <= 6 else 0 for count in counts]
        rows.feed(split_over(counts, 100 * seed + 7 * step), rejected)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_rows_that_leave_do_not_change_the_others(family):
    rows = Rows(target_of(family), 4)
    rows.feed(split_over([12, 3, 7, 1], 0))
    rows.cache.select([3, 0])
    rows.ids = [rows.ids[3], rows.ids[0]]
    rows.feed(split_over([2, 5], 10))


def test_llama4_counts_positions_from_the_rows_beginning():
    """Its layers without rotary positions scale queries by a position that they count themselves, far from the start."""
    target = target_of("Llama4Text", floor_scale=40)
    rows = Rows(target, 3)
    rows.feed(split_over([14, 6, 9], 0))
    rows.feed(split_over([5, 1, 4], 10))


def test_bfloat16():
    target = tiny.gpt_oss().to(torch.bfloat16)
    together, alone = Rows(target, 2), [Rows(target, 1), Rows(target, 1)]
    for counts in ([9, 4], [1, 3]):
        new_ids = split_over(counts, sum(counts))
        with torch.no_grad(), together.feeder.attention_in_place():
            logits = together.feeder.feed(torch.cat(new_ids), counts).logits[0].split(counts)
            single = [rows.feeder.feed(ids, [len(ids)]).logits[0] for rows, ids in zip(alone, new_ids, strict=True)]
        for ours, expected in zip(logits, single, strict=True):
            assert ours.dtype == torch.bfloat16
            torch.testing.assert_close(ours.float(), expected.float(), atol=0.1 * float(expected.std()), rtol=0)
        for rows, lengths in ((together, counts), (alone[0], counts[:1]), (alone[1], counts[1:])):
            rows.cache.lengths = [n + count for n, count in zip(rows.cache.lengths, lengths, strict=True)]


def test_layers_on_disk(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    target = tiny.qwen3(num_hidden_layers=2)
    names = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
    device_map = {name: "disk" if name == "model.layers.1" else "cpu" for name in names}
    target = accelerate.dispatch_model(target, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    rows = Rows(target, 2)
    rows.feed(split_over([9, 4], 0))
    rows.feed(split_over([1, 3], 10))
    assert not rows.cache.pads


# ---------------------------------------------------------------------- what cannot be packed


class OwnMask(nn.Module):
    """A decoder layer that makes its mask itself, from the number of its tokens."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        size = hidden_states.shape[1]
        mask = torch.zeros(size, size).masked_fill(torch.ones(size, size).triu(1).bool(), float("-inf"))
        return self.layer(hidden_states, attention_mask=mask[None, None], **kwargs)


def test_a_target_that_is_wrong_with_rows_is_refused():
    target = tiny.llama(num_hidden_layers=1)
    target.model.layers[0] = OwnMask(target.model.layers[0])
    feeder = RaggedTarget(target, RaggedCache(1, 2))
    refusal = "Rows of different lengths cannot share a pass of LlamaForCausalLM"
    with torch.no_grad(), feeder.attention_in_place(), pytest.raises(ValueError, match=refusal):
        feeder.feed(torch.tensor([5, 6, 7]), [2, 1])
    with pytest.raises(ValueError, match=refusal):  # Without another trial.
        RaggedTarget(target, RaggedCache(1, 2))


def test_a_pass_that_turns_out_not_to_be_packable_is_fed_again_padded():
    target = target_of("Doge")
    rows = Rows(target, 2)
    assert not rows.cache.pads
    rows.feed(split_over([9, 4], 0))
    assert rows.cache.pads
    assert Rows(target, 2).cache.pads, "the target is remembered"


def test_attention_with_unknown_tensors_is_not_packed():
    target = tiny.llama(num_hidden_layers=1)
    feeder = RaggedTarget(target, RaggedCache(1, 2))
    with torch.no_grad(), feeder.attention_in_place():
        feeder.feed(torch.tensor([5, 6, 7]), [2, 1], cu_seq_lens_q=torch.tensor([0, 2, 3]))
    assert feeder.cache.pads


def test_bidirectional_targets_are_refused():
    config = transformers.BertConfig(
        vocab_size=tiny.VOCAB_SIZE, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, initializer_range=0.4
    )
    feeder = RaggedTarget(transformers.BertLMHeadModel(config).eval(), RaggedCache(1, 2))
    with torch.no_grad(), feeder.attention_in_place(), pytest.raises(ValueError, match="cannot share a pass"):
        feeder.feed(torch.tensor([5, 6, 7]), [2, 1])


def test_unknown_types_of_layers_are_refused():
    target = tiny.qwen3_5()
    with pytest.raises(ValueError, match="layers of the type linear_attention"):
        mask_rules(target)
