"""Several rows at once: each row is what it is alone, and a round feeds the target no more than it has to."""

import numpy as np
import pytest
import scipy.stats
import target_families
import torch
from generation import rig
from ragged import families
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList, TextStreamer

import tiny
from dspark_hf import record_speculation
from dspark_hf.generation import rows_target_pass, single_rows_target_pass
from dspark_hf.ragged import exchange
from dspark_hf.ragged import target as ragged_target
from dspark_hf.scheduling import AsyncThroughputScheduler, ConfidenceThreshold, FixedLength, ThroughputScheduler
from dspark_hf.transformers_names import CACHE_KEY

LENGTHS = (9, 4, 1, 12)
# Both types of layers in two layers.
EVERY_KIND = {
    "Llama4Text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "Cohere2": {"layer_types": tiny.ALTERNATING[:2]},
    "Qwen2Moe": {"max_window_layers": 1},
    "Gemma4Text": {"num_hidden_layers": 4},
}
FAMILIES = [family for family in tiny.TARGETS if family not in tiny.HYBRID_TARGETS]


def prompts():
    return [tiny.prompt(length, seed=length) for length in LENGTHS]


def alone(target, prompt, **settings):
    """What plain `generate` gives for one prompt, without the prompt."""
    return target.generate(**prompt, **settings)[0, prompt["input_ids"].shape[1] :].tolist()


def assert_rows_as_alone(target, packed=True, **settings):
    settings = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": tiny.PAD_ID} | settings
    expected = [alone(target, prompt, **settings) for prompt in prompts()]
    scripts = [p["input_ids"][0].tolist() + new for p, new in zip(prompts(), expected, strict=True)]
    batch = tiny.left_padded(*prompts())
    for kind, drafter in rig.drafters_of_rows(target, scripts).items():
        drafted = target.generate(**batch, assistant_model=drafter, **settings)[:, max(LENGTHS) :].tolist()
        for row, new in enumerate(expected):
            filled = new + [tiny.PAD_ID] * (len(drafted[row]) - len(new))
            assert drafted[row] == filled, f"row {row} with a {kind} drafter"
    return expected


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_row_equals_the_row_decoded_alone(family, packed, monkeypatch):
    if not packed:
        monkeypatch.setattr(ragged_target, "can_exchange_attention", lambda model: False)
    assert_rows_as_alone(rig.target(family))


@pytest.mark.parametrize("family", families.FAMILIES)
def test_rows_of_other_kinds_of_attention(family):
    assert_rows_as_alone(families.target_of(family, **({"num_hidden_layers": 2} | EVERY_KIND.get(family, {}))))


@pytest.mark.parametrize(("family", "reason"), [("bloom", "a trial with two rows"), ("openai-gpt", "has no cache")])
def test_rows_that_cannot_share_a_pass_take_their_own(family, reason, monkeypatch):
    warnings = []
    monkeypatch.setattr(single_rows_target_pass.logger, "warning_once", warnings.append)
    assert_rows_as_alone(target_families.build("causal", family))
    assert warnings and all(reason in text and "passes" in text for text in warnings), warnings


def test_packed_rows_that_influence_each_other_are_padded(monkeypatch):
    """Found by a trial, once for each target."""
    target, warnings, attention = tiny.qwen3(num_hidden_layers=2), [], exchange.ragged_attention
    monkeypatch.setattr(
        exchange, "ragged_attention", lambda *args, **kwargs: (attention(*args, **kwargs)[0] * 1.5, None)
    )
    monkeypatch.setattr(ragged_target.logger, "warning_once", warnings.append)
    assert_rows_as_alone(target)
    assert warnings and "a trial with two packed rows" in warnings[0], warnings


def test_rows_end_at_their_own_time():
    target = rig.target()
    ends = [alone(target, p, max_new_tokens=16, do_sample=False)[3 + i] for i, p in enumerate(prompts()[:2])]
    lengths = {len(new) for new in assert_rows_as_alone(target, eos_token_id=ends)}
    assert len(lengths) > 1, "the case is about rows that end at different times"


@pytest.mark.parametrize("new_tokens", [1, 2, 5, 6], ids=lambda n: f"{n} new tokens")
def test_limits(new_tokens):
    assert_rows_as_alone(rig.target(), max_new_tokens=new_tokens)


@pytest.mark.parametrize(
    "settings",
    [{"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 2}, {"bad_words_ids": [[5], [7, 9]]}, {"min_new_tokens": 6}],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_that_look_at_the_row(settings):
    assert_rows_as_alone(rig.target(), **settings)


def test_prefix_constraints_know_the_row():
    target, batch = rig.target(), tiny.left_padded(*prompts())

    def allowed(row, sent):
        return list(range(1 + row, 100, 2 + row))

    settings = {"max_new_tokens": 8, "do_sample": False, "prefix_allowed_tokens_fn": allowed}
    plain = target.generate(**batch, **settings)
    assert torch.equal(target.generate(**batch, **settings, assistant_model=tiny.random_drafter(target)), plain)


class Alternating(LogitsProcessor):
    """Forbids a token at every other call: right only if each row's calls come once a token, in order."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores.index_fill(1, scores.argmax(-1), float("-inf")) if self.calls % 2 else scores


def test_each_row_has_its_own_copy_of_a_stateful_processor():
    target, batch = rig.target(), tiny.left_padded(*prompts())
    drafted = target.generate(
        **batch,
        max_new_tokens=8,
        do_sample=False,
        assistant_model=tiny.random_drafter(target),
        logits_processor=LogitsProcessorList([Alternating()]),
    )
    for row, prompt in enumerate(prompts()):
        own = LogitsProcessorList([Alternating()])
        expected = target.generate(**prompt, max_new_tokens=8, do_sample=False, logits_processor=own)
        assert drafted[row, -8:].tolist() == expected[0, -8:].tolist()


class LengthOf(StoppingCriteria):
    """Stops a row at a length of its own, told by its first token."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([len(row) >= max(LENGTHS) + 3 + int(row[-1]) % 4 for row in input_ids])


def test_custom_criteria_are_asked_after_every_token():
    target, batch = rig.target(), tiny.left_padded(*prompts())
    settings = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 126, "pad_token_id": tiny.PAD_ID}
    plain = target.generate(**batch, **settings, stopping_criteria=StoppingCriteriaList([LengthOf()]))
    drafted = target.generate(
        **batch,
        **settings,
        stopping_criteria=StoppingCriteriaList([LengthOf()]),
        assistant_model=tiny.random_drafter(target),
    )
    assert torch.equal(drafted, plain)


def test_num_return_sequences():
    target = rig.target()
    settings = {"max_new_tokens": 10, "do_sample": True, "top_k": 1, "num_return_sequences": 3}
    plain = target.generate(**tiny.prompt(), **settings)
    assert torch.equal(target.generate(**tiny.prompt(), **settings, assistant_model=tiny.random_drafter(target)), plain)


def test_a_round_feeds_each_row_its_own_drafts_and_finished_rows_nothing():
    target = tiny.qwen3(num_hidden_layers=2)
    settings = {"max_new_tokens": 16, "do_sample": False}
    scripts = [p["input_ids"][0].tolist() + alone(target, p, **settings) for p in prompts()]
    warm_up = tiny.random_drafter(target, num_hidden_layers=1)
    target.generate(
        **tiny.left_padded(*prompts()), **settings, assistant_model=warm_up
    )  # What is tried once is not counted.
    fed = []
    target.model.layers[0].register_forward_hook(lambda module, args, output: fed.append(args[0][..., 0].numel()))
    with record_speculation() as stats:
        target.generate(
            **tiny.left_padded(*prompts()),
            **settings,
            assistant_model=rig.drafters_of_rows(target, scripts)["patterned"],
            verify_scheduler=FixedLength(3),
        )
    rounds = [[stats.rounds[0]]]
    for record in stats.rounds[1:]:
        if record.row <= rounds[-1][-1].row:
            rounds.append([])
        rounds[-1].append(record)
    assert fed[1:] == [sum(1 + record.verified for record in together) for together in rounds]
    assert len(rounds[0]) == 4 and len(rounds[-1]) < 4, "the case is about rows that end at different times"


def test_scores_states_and_cache_are_those_of_plain_generate():
    target, batch = rig.target(), tiny.left_padded(*prompts())
    settings = {
        "max_new_tokens": 9,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
    }
    plain = target.generate(**batch, **settings)
    drafted = target.generate(**batch, **settings, assistant_model=tiny.random_drafter(target))
    assert torch.equal(drafted.sequences, plain.sequences)
    for name in ("scores", "logits"):
        for ours, theirs in zip(drafted[name], plain[name], strict=True):
            torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=1e-4)
    for ours, theirs in zip(drafted.hidden_states[1:], plain.hidden_states[1:], strict=True):
        for layer, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(layer, expected, atol=2e-4, rtol=1e-4)
    assert drafted[CACHE_KEY].get_seq_length() == plain[CACHE_KEY].get_seq_length()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_a_second_turn_with_the_cache_of_the_first(family):
    target = rig.target(family)
    batch = tiny.left_padded(*prompts())
    settings = {"max_new_tokens": 7, "do_sample": False, "return_dict_in_generate": True}

    def two_turns(**more):
        first = target.generate(**batch, **settings, **more)
        ids = torch.cat([first.sequences, tiny.prompt(3, seed=5, num_rows=4)["input_ids"]], dim=1)
        mask = torch.nn.functional.pad(
            batch["attention_mask"], (0, ids.shape[1] - batch["attention_mask"].shape[1]), value=1
        )
        second = target.generate(ids, attention_mask=mask, **settings, **{CACHE_KEY: first[CACHE_KEY]}, **more)
        return second.sequences

    assert torch.equal(two_turns(assistant_model=tiny.random_drafter(target)), two_turns())


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt_oss"])
def test_a_second_turn_after_rows_of_different_lengths(family):
    """The padding behind a row that ended early is masked in the second turn, in the middle of the row."""
    target, batch = rig.target(family), tiny.left_padded(*prompts())
    lengths = (3, 6, 6, 1)
    ids = torch.cat([batch["input_ids"], tiny.prompt(6, seed=3, num_rows=4)["input_ids"]], dim=1)
    ended = torch.arange(6) < torch.tensor(lengths)[:, None]
    more = tiny.prompt(3, seed=5, num_rows=4)
    inputs = {
        "input_ids": torch.cat([ids, more["input_ids"]], dim=1),
        "attention_mask": torch.cat([batch["attention_mask"], ended.long(), more["attention_mask"]], dim=1),
    }
    settings = {"max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=tiny.random_drafter(target)), plain)


def test_attention_weights_of_several_rows_are_refused():
    message = rig.refusing(
        rig.target(),
        **tiny.left_padded(*prompts()),
        return_dict_in_generate=True,
        output_attentions=True,
    )
    assert "output_attentions" in message


def test_streamers_refuse_rows_as_plain_generate_does():
    with pytest.raises(ValueError, match="batch size 1"):
        rig.target().generate(
            **tiny.left_padded(*prompts()),
            max_new_tokens=4,
            streamer=TextStreamer(None),
            assistant_model=tiny.random_drafter(rig.target()),
        )


def test_rejected_drafts_leave_nothing_in_the_buffers(monkeypatch):
    sizes = []
    monkeypatch.setattr(
        rows_target_pass.RowsTargetPass, "keep_rows", _recording(rows_target_pass.RowsTargetPass.keep_rows, sizes)
    )
    target, batch = rig.target(), tiny.left_padded(*prompts())
    target.generate(**batch, max_new_tokens=200, do_sample=False, assistant_model=tiny.random_drafter(target))
    bytes_a_column = 2 * 2 * 2 * 8 * 4  # layers x (keys, values) x heads x head size x float32
    columns = max(LENGTHS) + 200 + tiny.BLOCK_SIZE
    assert sizes and max(sizes) <= 4 * bytes_a_column * (columns + 2 * 128)


def _recording(keep_rows, sizes):
    def wrapped(self, rows):
        sizes.append(self.cache.num_bytes)
        keep_rows(self, rows)

    return wrapped


class CostTable:
    """Passes a second that fall slowly with the tokens of a pass."""

    def table(self, max_tokens, num_rows):
        return 1.0 / (1.0 + 0.05 * np.arange(max_tokens + 1))


SCHEDULERS = {
    "fixed length": lambda: FixedLength(2),
    "threshold": lambda: ConfidenceThreshold(0.5),
    "throughput": lambda: ThroughputScheduler(CostTable()),
    "asynchronous throughput": lambda: AsyncThroughputScheduler(CostTable()),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_greedy_output_does_not_depend_on_the_schedule(name):
    target, batch = rig.target(), tiny.left_padded(*prompts())
    plain = target.generate(**batch, max_new_tokens=16, do_sample=False)
    drafted = target.generate(
        **batch,
        max_new_tokens=16,
        do_sample=False,
        assistant_model=tiny.random_drafter(target),
        verify_scheduler=SCHEDULERS[name](),
    )
    assert torch.equal(drafted, plain)


@pytest.mark.statistical
@pytest.mark.parametrize("name", SCHEDULERS)
def test_sampling_keeps_the_distribution_of_every_row_under_each_schedule(name):
    target = tiny.bigram(num_hidden_layers=1, vocab_size=12)
    # A drafter that is wrong in its own way: half its weights are those of the perfect one.
    drafter = tiny.random_drafter(target, num_hidden_layers=1, markov_rank=4, mask_token_id=11)
    anchors, copies, tokens = (3, 7), 600, 3
    distribution = tiny_distribution(target)
    batch = {"input_ids": torch.tensor([[0, 0, a] for a in anchors for _ in range(copies)])}
    batch["attention_mask"] = torch.tensor([[0, 1, 1]] * len(batch["input_ids"]))
    torch.manual_seed(1)
    drafted = target.generate(
        **batch,
        max_new_tokens=tokens,
        do_sample=True,
        top_k=0,
        assistant_model=drafter,
        verify_scheduler=SCHEDULERS[name](),
    )[:, -tokens:]
    for index, anchor in enumerate(anchors):
        rows = drafted[index * copies : (index + 1) * copies]
        joint = distribution[anchor][:, None] * distribution  # First two tokens in closed form, [V, V].
        observed = torch.zeros(12, 12).index_put_((rows[:, 0], rows[:, 1]), torch.ones(copies), accumulate=True)
        expected = (joint * copies).flatten()
        likely = expected > 5
        pooled_observed = [*observed.flatten()[likely].tolist(), observed.flatten()[~likely].sum().item()]
        pooled_expected = [*expected[likely].tolist(), expected[~likely].sum().item()]
        scale = sum(pooled_observed) / sum(pooled_expected)
        p_value = scipy.stats.chisquare(pooled_observed, [e * scale for e in pooled_expected]).pvalue
        assert p_value > 1e-3, f"row distribution of anchor {anchor}"


def tiny_distribution(target):
    decoder = target.get_decoder()
    states = decoder.norm(target.get_input_embeddings()(torch.arange(target.config.vocab_size)))
    return target.get_output_embeddings()(states).softmax(-1)
