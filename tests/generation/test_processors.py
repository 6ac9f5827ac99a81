"""Logits processors: each sees what it sees in plain `generate`, so all of them give what they give there."""

import threading

import pytest
import torch
from generation import rig
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.generation import logits_process as stock

import tiny
from dspark_hf import record_speculation
from dspark_hf.generation.logits_process import _ROWWISE, _STATEFUL, drafting_processors, is_rowwise

PROMPT = 9
TEXT = rig.ids_of(rig.target().generate(**tiny.prompt(), max_new_tokens=16, do_sample=False))
NEW = TEXT[PROMPT:]

SETTINGS = {
    "repetition penalty": {"repetition_penalty": 1.7},
    "encoder repetition penalty": {"encoder_repetition_penalty": 1.7},
    "no repeated bigrams": {"no_repeat_ngram_size": 2},
    "no repeated tokens": {"no_repeat_ngram_size": 1},
    "no bigrams of the prompt": {"encoder_no_repeat_ngram_size": 1},
    "bad words": {"bad_words_ids": [[NEW[2]], [NEW[4], NEW[5]]]},
    "sequence bias": {"sequence_bias": [[[NEW[1]], -50.0], [[NEW[0], NEW[3]], 50.0]]},
    "minimal length": {"min_length": PROMPT + 6, "eos_token_id": NEW[1], "pad_token_id": 0},
    "minimal new tokens": {"min_new_tokens": 6, "eos_token_id": NEW[1], "pad_token_id": 0},
    "forced end": {"forced_eos_token_id": 5, "eos_token_id": 5, "pad_token_id": 0},
    "decaying length": {"exponential_decay_length_penalty": (3, 1.6), "eos_token_id": 7, "pad_token_id": 0},
    "suppressed tokens": {"suppress_tokens": [NEW[0], NEW[3]]},
    "tokens suppressed at the beginning": {"begin_suppress_tokens": [NEW[0], NEW[3]]},
    "invalid values removed": {"remove_invalid_values": True},
    "renormalised": {"renormalize_logits": True, "suppress_tokens": [NEW[1]]},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash", context_width=2)},
    "SynthID watermark": {"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=3, keys=[3, 5, 8, 13])},
    "guidance": {"guidance_scale": 1.6},
    "guidance with a negative prompt": {
        "guidance_scale": 1.6,
        "negative_prompt_ids": tiny.prompt(4, seed=9)["input_ids"],
    },
    "many at once": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "suppress_tokens": [NEW[2]]},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
def test_every_setting_that_makes_a_processor(settings):
    outcome = rig.compare(rig.target(), max_new_tokens=16, **settings)
    neutral = {"remove_invalid_values"}  # Nothing here is invalid.
    assert rig.ids_of(outcome.plain) != TEXT or neutral & settings.keys(), "changes nothing, so shows nothing"


def test_a_forced_first_token():
    outcome = rig.compare(rig.target(), tiny.prompt(1), forced_bos_token_id=77)
    assert rig.ids_of(outcome.plain)[1] == 77


@pytest.mark.parametrize("new_tokens", [1, 4, 6], ids=lambda n: f"limit of {n}")
def test_an_end_is_forced_at_the_limit(new_tokens):
    outcome = rig.compare(
        rig.target(), forced_eos_token_id=[5], eos_token_id=5, pad_token_id=0, max_new_tokens=new_tokens
    )
    assert rig.ids_of(outcome.plain)[-1] == 5


def automaton(batch_id, sent):
    """Odd and even tokens in turn, and after token 3n only tokens above 64: legal or not depends on all that was sent."""
    odd = len(sent) % 2
    lowest = 64 if int(sent[-1]) % 3 == 0 else 0
    return [t for t in range(1, tiny.VOCAB_SIZE) if t % 2 == odd and t >= lowest]


def test_prefix_allowed_tokens():
    outcome = rig.compare(rig.target(), prefix_allowed_tokens_fn=automaton)
    ids = torch.tensor(rig.ids_of(outcome.plain))
    assert all(ids[i] in automaton(0, ids[:i]) for i in range(PROMPT, len(ids)))
    # The patterned drafter's wrong tokens are of the other parity: only right ones are left to draft.
    assert outcome.stats["patterned"].acceptance_length > 1.5


# ---------------------------------------------------------------------- processors of the user


class Stateful(LogitsProcessor):
    """Each call shifts the favoured token by what was said before: a call too many changes everything after it."""

    def __init__(self):
        self.state = 0

    def __call__(self, input_ids, scores):
        self.state = (31 * self.state + int(input_ids[0, -1])) % tiny.VOCAB_SIZE
        bias = torch.zeros_like(scores)
        bias[:, self.state] = 20.0
        return scores + bias


class StateOutside(Stateful):
    """The state is not in the object, as with a closure or a grammar in another library."""

    states = {}

    def __init__(self, key):
        self.key = key
        self.states[key] = 0

    state = property(lambda self: self.states[self.key], lambda self, value: self.states.__setitem__(self.key, value))


class Uncopyable(Stateful):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


class InPlace(LogitsProcessor):
    """Writes into the scores it is given."""

    def __call__(self, input_ids, scores):
        scores[:, int(input_ids[0, -1])] += 30.0 if input_ids.shape[1] % 3 == 0 else -30.0
        return scores


counter = iter(range(1000))


@pytest.mark.parametrize(
    "make",
    [Stateful, lambda: StateOutside(next(counter)), Uncopyable, InPlace],
    ids=["state inside", "state outside", "cannot be copied", "works in place"],
)
def test_stateful_processors(make):
    rig.compare(rig.target(), None, lambda: {"logits_processor": LogitsProcessorList([make()])})


class Recorder(LogitsProcessor):
    def __init__(self, calls):
        self.calls = calls

    def __call__(self, input_ids, scores):
        self.calls.append(input_ids.tolist())
        return scores


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", rig.KINDS)
def test_one_call_for_each_committed_token_in_order(kind, do_sample):
    calls = []
    drafter = rig.drafter_of(kind, rig.target(), TEXT)
    output = rig.target().generate(
        **tiny.prompt(),
        max_new_tokens=rig.NEW_TOKENS,
        do_sample=do_sample,
        logits_processor=[Recorder(calls)],
        assistant_model=drafter,
    )
    ids = rig.ids_of(output)
    assert calls == [[ids[:n]] for n in range(PROMPT, len(ids))]


class HoldsTheTarget(LogitsProcessor):
    def __init__(self, target):
        self.target = target

    def __call__(self, input_ids, scores):
        return scores

    def __deepcopy__(self, memo):
        raise AssertionError("a processor may hold a whole model")


def test_processors_are_not_copied():
    rig.compare(rig.target(), logits_processor=[HoldsTheTarget(rig.target())], max_new_tokens=8)


def test_the_negative_prompt_runs_beside_the_drafts_not_through_them():
    """The unconditional pass of guidance is made once a committed token, whatever is drafted."""
    target, passes = tiny.qwen3(num_hidden_layers=2), []
    drafter = rig.scripted(target, TEXT)
    target.register_forward_pre_hook(
        lambda module, args, kwargs: passes.append(args[0].shape[1] if args else None), with_kwargs=True
    )
    target.generate(**tiny.prompt(), max_new_tokens=10, do_sample=False, guidance_scale=1.5, assistant_model=drafter)
    assert sum(length is not None for length in passes) == 10  # Guidance passes its ids by position.


# ---------------------------------------------------------------------- the tables


def every_stock_processor():
    return [
        c
        for c in vars(stock).values()
        if isinstance(c, type) and issubclass(c, LogitsProcessor) and c.__module__ == stock.__name__
    ]


def test_rowwise_processors_give_the_same_for_each_row_alone():
    examples = [
        stock.TemperatureLogitsWarper(0.7),
        stock.TopKLogitsWarper(5),
        stock.TopPLogitsWarper(0.8),
        stock.TopHLogitsWarper(0.5),
        stock.MinPLogitsWarper(0.1),
        stock.TypicalLogitsWarper(0.8),
        stock.EpsilonLogitsWarper(0.01),
        stock.EtaLogitsWarper(0.01),
        stock.SuppressTokensLogitsProcessor([3, 5]),
        stock.InfNanRemoveLogitsProcessor(),
        stock.LogitNormalization(),
    ]
    assert {type(e) for e in examples} == set(_ROWWISE)
    scores = 3 * torch.randn(6, 40)
    scores[0, 3] = float("nan")
    for processor in examples:
        rows = scores[1:] if not isinstance(processor, stock.InfNanRemoveLogitsProcessor) else scores
        together = processor(torch.zeros(len(rows), 0, dtype=torch.long), rows.clone())
        alone = [processor(torch.randint(40, (1, 7)), row[None].clone()) for row in rows]
        torch.testing.assert_close(together, torch.cat(alone), msg=type(processor).__name__)


def test_processors_that_look_at_tokens_are_not_called_rowwise():
    assert is_rowwise(LogitsProcessorList([stock.TemperatureLogitsWarper(0.7), stock.LogitNormalization()]))
    assert not is_rowwise(LogitsProcessorList([stock.RepetitionPenaltyLogitsProcessor(1.1)]))

    class Own(stock.TemperatureLogitsWarper):
        """A subclass may do anything."""

    assert not is_rowwise(LogitsProcessorList([Own(0.5)]))


def test_stock_processors_that_keep_a_state_are_known():
    """A call leaves no trace in any stock processor but those that are listed (and those for models of other kinds)."""
    other_kinds = {"WhisperNoSpeechDetection", "AlternatingCodebooksLogitsProcessor"}
    suspects = set()
    for cls in every_stock_processor():
        names = cls.__call__.__code__.co_names
        source_writes = {n for n in ("state", "unconditional_context", "_detect_timestamp_from_logprob") if n in names}
        helper = getattr(cls, "get_unconditional_logits", None)
        if source_writes or helper is not None:
            suspects.add(cls.__name__)
    assert suspects - other_kinds <= {c.__name__ for c in _STATEFUL}


def test_drafts_are_warped_by_stock_processors_without_state():
    class Own(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores

    class OwnTemperature(stock.TemperatureLogitsWarper):
        pass

    temperature = stock.TemperatureLogitsWarper(0.7)
    chosen = drafting_processors(LogitsProcessorList([Own(), temperature, OwnTemperature(0.5)]))
    assert list(chosen) == [temperature]


# ---------------------------------------------------------------------- warpers

WARPERS = {
    "temperature": {"temperature": 0.6},
    "high temperature": {"temperature": 1.8},
    "top k": {"top_k": 4},
    "top p": {"top_p": 0.7},
    "min p": {"min_p": 0.1},
    "top h": {"top_h": 0.5},
    "typical p": {"typical_p": 0.6},
    "epsilon": {"epsilon_cutoff": 0.02},
    "eta": {"eta_cutoff": 0.02},
    "all but none": {"top_k": 1},
    "with a repetition penalty": {"temperature": 0.8, "top_k": 6, "repetition_penalty": 1.4},
    "renormalised": {"top_p": 0.8, "renormalize_logits": True},
    "watermark": {"watermarking_config": SETTINGS["watermark"]["watermarking_config"], "temperature": 0.8},
    "SynthID watermark": {"watermarking_config": SETTINGS["SynthID watermark"]["watermarking_config"]},
    "guidance": {"guidance_scale": 1.6, "top_k": 5},
}


@pytest.mark.parametrize("settings", WARPERS.values(), ids=WARPERS.keys())
@pytest.mark.parametrize("kind", rig.KINDS)
def test_warped_scores_are_those_of_plain_sampling(kind, settings):
    """
    Whatever was sampled, the scores at each token are the processors' of the target's logits after the same tokens: the
    distribution that plain `generate` would have drawn from there.
    """
    target = rig.target()
    drafter = rig.drafter_of(kind, target, TEXT)
    output = target.generate(
        **tiny.prompt(),
        **({"top_k": 0} | settings),
        max_new_tokens=10,
        do_sample=True,
        assistant_model=drafter,
        return_dict_in_generate=True,
        output_scores=True,
    )
    config = GenerationConfig(**({"top_k": 0} | settings), do_sample=True, num_beams=1, num_return_sequences=1)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    processors = target._get_logits_processor(config, input_ids_seq_length=PROMPT)
    assert len(processors)
    logits = target(output.sequences).logits.float()
    for i, scores in enumerate(output.scores):
        expected = processors(output.sequences[:, : PROMPT + i], logits[:, PROMPT + i - 1].clone())
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        assert scores[0, output.sequences[0, PROMPT + i]] > float("-inf")


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7], ids=lambda t: f"temperature {t}")
def test_a_perfect_drafter_is_accepted_at_any_temperature(temperature):
    """Drafts are warped like the target's own tokens, else low temperatures would reject nearly all of them."""
    target = tiny.bigram(num_hidden_layers=2)
    drafter = tiny.perfect_drafter(target)
    for warpers in ({"top_k": 0}, {"top_k": 5}, {"top_k": 0, "top_p": 0.8, "min_p": 0.01}):
        with record_speculation() as stats:
            target.generate(
                **tiny.prompt(),
                max_new_tokens=31,
                do_sample=True,
                temperature=temperature,
                assistant_model=drafter,
                **warpers,
            )
        assert stats.acceptance_rate == 1.0, warpers


def test_settings_of_the_drafter_do_not_decide_how_it_drafts():
    target = tiny.bigram(num_hidden_layers=2)
    drafter = tiny.perfect_drafter(target)
    drafter.generation_config.do_sample = False
    drafter.generation_config.temperature = 0.01
    with record_speculation() as stats:
        target.generate(**tiny.prompt(), max_new_tokens=31, do_sample=True, top_k=0, assistant_model=drafter)
    assert stats.acceptance_rate == 1.0


class Impossible(LogitsProcessor):
    def __init__(self, value):
        self.value = value

    def __call__(self, input_ids, scores):
        return torch.full_like(scores, self.value)


@pytest.mark.parametrize("drafter", [None, tiny.random_drafter], ids=["plain", "drafted"])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_scores_that_leave_no_token_are_an_error_as_in_plain_generate(value, drafter):
    target = rig.target()
    assistant = {} if drafter is None else {"assistant_model": drafter(target)}
    with pytest.raises(RuntimeError, match=r"inf|No token can be drawn"):
        target.generate(
            **tiny.prompt(9),
            max_new_tokens=6,
            do_sample=True,
            logits_processor=LogitsProcessorList([Impossible(value)]),
            **assistant,
        )


def test_a_target_that_computes_nan_is_an_error():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    target.lm_head.weight[3] = float("nan")
    with pytest.raises(RuntimeError, match="No token can be drawn"):
        target.generate(**tiny.prompt(9), max_new_tokens=6, do_sample=True, assistant_model=drafter)
