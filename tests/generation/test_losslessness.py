"""
Sampling with a drafter follows the same distribution as sampling without one, for every drafter, warper and threshold.

There are two experiments with small vocabularies. One compares the first tokens after a prompt with their exact joint
distribution, computed by feeding every prefix to the target and multiplying the probabilities. The other compares the
transitions of one long run, of a target that sees only its last one or two tokens, with their exact probabilities. Wrong
samplers must fail both.
"""

import functools
import itertools

import pytest
import torch
from generation import rig
from scipy import stats
from transformers import GenerationConfig

import tiny
from dspark_hf import DSparkDrafter, record_speculation, sampling
from dspark_hf.generation import draft_sampler, token_choice
from dspark_hf.generation.candidate_generator import DrafterCandidateGenerator

pytestmark = pytest.mark.statistical

VOCAB_SIZE = 6
PROMPT = torch.tensor([[1, 3, 2]])
SMALL = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
FAIL, PASS = 1e-5, 1e-3


@functools.cache
def full_target():
    """Sees all tokens before."""
    return tiny.qwen3(num_hidden_layers=1, initializer_range=0.25, **SMALL)


@functools.cache
def short_target():
    """Sees its last two tokens, so a long run is a chain of order two."""
    return tiny.mistral(num_hidden_layers=1, sliding_window=2, initializer_range=0.3, **SMALL)


@functools.cache
def bigram_target():
    """Sees its last token, of four: what is wrong shows soon."""
    return tiny.bigram(num_hidden_layers=1, initializer_range=0.25, **(SMALL | {"vocab_size": 4}))


def drafter_fields(target):
    return {
        "mask_token_id": target.config.vocab_size - 1,
        "num_hidden_layers": 1,
        "block_size": 3,
        "target_layer_ids": [-1],
    }


def random_drafter(target, **fields):
    return tiny.random_drafter(target, **(drafter_fields(target) | fields))


def sure_drafter(target):
    """Always drafts the same token."""
    return rig.scripted(target, [2] * 7000, **drafter_fields(target))


class SequentialHeadOnly(DSparkDrafter):
    """The backbone says nothing."""

    def base_logits(self, hidden_states, embeddings):
        return torch.zeros(*hidden_states.shape[:-1], self.config.vocab_size)


def bent_drafter(target, scale=0.5):
    """Drafts from the target's distribution given the token before, flattened by `scale`; a scale of 1 is perfect."""
    vocab_size = target.config.vocab_size
    template = random_drafter(target, markov_rank=vocab_size)
    drafter = SequentialHeadOnly(template.config).eval()
    drafter.load_state_dict(template.state_dict())
    with torch.no_grad():
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(vocab_size))
        last_logits = target(torch.arange(vocab_size)[:, None]).logits[:, -1]
        drafter.markov_head.markov_w2.weight.copy_(scale * last_logits.T)
    return drafter


def eagle3_drafter(target, scale=0.5):
    """The same token by token; 1 is perfect."""
    drafter = tiny.perfect_eagle3_drafter(target, block_size=3, target_layer_ids=[-1])
    with torch.no_grad():
        drafter.norm.weight.mul_(scale)
    return drafter


DRAFTERS = {
    "a random drafter": random_drafter,
    "a nearly right drafter": bent_drafter,
    "a drafter that is sure of itself": sure_drafter,
    "a drafter of three tokens": functools.partial(random_drafter, draft_vocab_size=3),
}


def processors_of(target, settings):
    """The processors that `generate` makes of its settings."""
    config = GenerationConfig(**({"top_k": 0} | settings), do_sample=True, num_beams=1, num_return_sequences=1)
    config.update(**GenerationConfig._get_default_generation_params(), defaults_only=True)
    return target._get_logits_processor(config, input_ids_seq_length=PROMPT.shape[1])


# ---------------------------------------------------------------------- the joint distribution of the first tokens


def joint_distribution(target, settings, num_tokens=3):
    """The exact distribution of the next `num_tokens` tokens after the prompt, `[V ** num_tokens]`."""
    processors = processors_of(target, settings)
    distribution = torch.ones(1, dtype=torch.double)
    for length in range(num_tokens):
        continuations = torch.tensor(list(itertools.product(range(VOCAB_SIZE), repeat=length)), dtype=torch.long)
        continuations = continuations.view(VOCAB_SIZE**length, length)
        ids = torch.cat([PROMPT.expand(len(continuations), -1), continuations], dim=1)
        scores = processors(ids, target(ids).logits[:, -1].float())
        distribution = (distribution[:, None] * scores.double().softmax(-1)).flatten()
    return distribution


def first_tokens(target, drafter, settings, num_samples, num_tokens=3):
    call = {
        "input_ids": PROMPT,
        "attention_mask": torch.ones_like(PROMPT),
        "max_new_tokens": num_tokens,
        "do_sample": True,
    }
    call |= {"top_k": 0, "assistant_model": drafter} | settings
    weights = VOCAB_SIZE ** torch.arange(num_tokens - 1, -1, -1)
    # The call's own first token comes from the prompt's pass; the others from drafting and verification.
    return [int((target.generate(**call)[0, PROMPT.shape[1] :] * weights).sum()) for _ in range(num_samples)]


def p_value(cells, distribution):
    """Of a chi-squared test; cells that are hardly ever expected are put together. 0 where the impossible occurred."""
    counts = torch.bincount(torch.tensor(cells), minlength=len(distribution)).double()
    if counts[distribution == 0].sum():
        return 0.0
    expected = distribution * len(cells)
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    num_large = int((expected >= 5).sum())
    groups = (
        [counts[:num_large], counts[num_large:].sum()[None]],
        [expected[:num_large], expected[num_large:].sum()[None]],
    )
    observed, predicted = (torch.cat(group) for group in groups)
    if predicted[-1] < 5:  # Too few for a cell of their own.
        observed, predicted = (torch.cat([x[:-2], x[-2:].sum()[None]]) for x in (observed, predicted))
    return stats.chisquare(observed.numpy(), predicted.numpy() * (observed.sum() / predicted.sum()).item()).pvalue


def name_of(value):
    if isinstance(value, str):
        return value
    return ", ".join(k if k == "stopping_criteria" else f"{k} {v}" for k, v in value.items()) or "unwarped"


def check_joint_distribution(drafter, settings, num_samples):
    target = full_target()
    warpers = {k: v for k, v in settings.items() if k != "assistant_confidence_threshold"}
    cells = first_tokens(target, DRAFTERS[drafter](target), settings, num_samples)
    assert p_value(cells, joint_distribution(target, warpers)) > PASS


JOINT = [
    ("a nearly right drafter", {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.6}),
    ("a random drafter", {"top_p": 0.8, "assistant_confidence_threshold": 0.5}),
]
MORE_JOINT = [
    ("a random drafter", {}),
    ("a nearly right drafter", {"temperature": 0.6, "top_k": 4}),
    ("a nearly right drafter", {"repetition_penalty": 1.6}),
    ("a drafter that is sure of itself", {"temperature": 1.7}),
    ("a drafter of three tokens", {"min_p": 0.1, "repetition_penalty": 1.3, "assistant_confidence_threshold": 0.5}),
]


@pytest.mark.parametrize(("drafter", "settings"), JOINT, ids=name_of)
def test_joint_distribution_of_the_first_three_tokens(drafter, settings):
    check_joint_distribution(drafter, settings, num_samples=300)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "settings"), JOINT + MORE_JOINT, ids=name_of)
def test_joint_distribution_with_many_samples(drafter, settings):
    check_joint_distribution(drafter, settings, num_samples=3000)


def test_the_exact_distribution_is_that_of_plain_sampling():
    """The reference itself: plain `generate`, many rows at once."""
    target, settings = full_target(), {"temperature": 0.7, "top_k": 4, "repetition_penalty": 1.4}
    output = target.generate(
        input_ids=PROMPT.expand(4000, -1),
        attention_mask=torch.ones(4000, 3, dtype=torch.long),
        max_new_tokens=3,
        do_sample=True,
        **settings,
    )
    cells = (output[:, 3:] * torch.tensor([36, 6, 1])).sum(1).tolist()
    assert p_value(cells, joint_distribution(target, settings)) > PASS
    assert p_value(cells, joint_distribution(target, settings | {"temperature": 0.6})) < FAIL


# ---------------------------------------------------------------------- a long run


def transition_distribution(target, settings, order):
    """The exact distribution of the next token after each `order` tokens, `[V, ..., V]`."""
    vocab_size = target.config.vocab_size
    contexts = torch.tensor(list(itertools.product(range(vocab_size), repeat=order)))
    scores = processors_of(target, settings)(contexts, target(contexts).logits[:, -1].float())
    return scores.double().softmax(-1).view([vocab_size] * (order + 1))


def chain_p_value(token_ids, distribution):
    """
    Of a chi-squared test of a chain's transitions: the distribution of the next token after each context that occurs often.
    Given how often each occurs, the sum is asymptotically chi-squared; each context has one degree of freedom fewer than
    possible tokens.
    """
    counts = torch.zeros_like(distribution)
    for window in zip(*(token_ids[i:] for i in range(distribution.dim())), strict=False):
        counts[window] += 1
    if counts[distribution == 0].sum():
        return 0.0
    statistic, freedom = 0.0, 0
    for seen, probs in zip(counts.flatten(0, -2), distribution.flatten(0, -2), strict=True):
        expected = probs * seen.sum()
        large = expected >= 5
        if not large.any():
            continue
        statistic += float(((seen - expected) ** 2 / expected)[large].sum())
        freedom += int(large.sum()) - 1
        rest_seen, rest = seen[~large].sum(), expected[~large].sum()
        if rest >= 5:
            statistic += float((rest_seen - rest) ** 2 / rest)
        freedom += int(rest > 0)  # Where the rest is too small to count, the test only grows more careful.
    assert freedom >= 8, "too little was seen to tell"
    return stats.chi2.sf(statistic, freedom)


def long_run(target, drafter, settings, num_tokens):
    with record_speculation() as stats_:
        output = target.generate(
            input_ids=PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            max_new_tokens=num_tokens,
            do_sample=True,
            assistant_model=drafter,
            drafting_backoff=False,
            **({"top_k": 0} | settings),
        )
    return output[0, 1:].tolist(), stats_


def test_a_target_that_sees_two_tokens():
    target = short_target()
    a, b = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[5, 5, 3, 4]])
    torch.testing.assert_close(target(a).logits[:, -1], target(b).logits[:, -1])
    assert not torch.allclose(target(a).logits[:, -1], target(torch.tensor([[1, 2, 5, 4]])).logits[:, -1])


def never(input_ids, scores, **kwargs):
    """A criterion of the user's: with one, tokens are chosen one by one, by other code."""
    return torch.zeros(1, dtype=torch.bool)


def check_long_run(drafter, settings, num_tokens):
    target = short_target()
    warpers = {k: v for k, v in settings.items() if k not in ("assistant_confidence_threshold", "stopping_criteria")}
    token_ids, seen = long_run(target, DRAFTERS[drafter](target), settings, num_tokens)
    assert chain_p_value(token_ids, transition_distribution(target, warpers, order=2)) > PASS
    if drafter == "a nearly right drafter":
        assert {r.accepted for r in seen.rounds} == {0, 1, 2, 3}  # Every path was taken.
    if "assistant_confidence_threshold" in settings:
        assert len({r.verified for r in seen.rounds}) > 1


LONG = [
    ("a nearly right drafter", {"temperature": 0.5}),
    ("a nearly right drafter", {"top_p": 0.8, "temperature": 1.3}),
    ("a nearly right drafter", {"stopping_criteria": [never], "top_k": 4}),
    ("a random drafter", {"assistant_confidence_threshold": 0.5}),
    ("a drafter that is sure of itself", {}),
    ("a drafter of three tokens", {"min_p": 0.1}),
]
MORE_LONG = [
    ("a nearly right drafter", {}),
    ("a nearly right drafter", {"min_p": 0.15}),
    ("a nearly right drafter", {"temperature": 1.7, "top_k": 4}),
    ("a random drafter", {"temperature": 0.5}),
    ("a random drafter", {"assistant_confidence_threshold": 0.4}),
    ("a random drafter", {"assistant_confidence_threshold": 0.6, "stopping_criteria": [never]}),
    ("a drafter that is sure of itself", {"temperature": 0.5}),
    ("a drafter of three tokens", {"temperature": 0.5}),
]


@pytest.mark.parametrize(("drafter", "settings"), LONG, ids=name_of)
def test_distribution_of_a_long_run(drafter, settings):
    check_long_run(drafter, settings, num_tokens=400)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "settings"), LONG + MORE_LONG, ids=name_of)
def test_distribution_of_a_very_long_run(drafter, settings):
    check_long_run(drafter, settings, num_tokens=6000)


def chain_test(make):
    target, settings = bigram_target(), {"temperature": 0.7}
    token_ids, seen = long_run(target, make(target), settings, num_tokens=800)
    return chain_p_value(token_ids, transition_distribution(target, settings, order=1)), seen


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(bent_drafter, scale=1.0),
        bent_drafter,
        random_drafter,
        sure_drafter,
        functools.partial(eagle3_drafter, scale=1.0),
        eagle3_drafter,
    ],
    ids=[
        "a perfect drafter",
        "a flattened drafter",
        "a random drafter",
        "a drafter that is sure of itself",
        "a perfect EAGLE-3 drafter",
        "a flattened EAGLE-3 drafter",
    ],
)
def test_distribution_of_a_chain(make):
    p, seen = chain_test(make)
    assert p > PASS
    # Rounding may make two equal distributions differ in their last bits.
    assert (seen.acceptance_rate > 0.99) == isinstance(make, functools.partial)


# ---------------------------------------------------------------------- wrong samplers


def patch_passes(monkeypatch):
    wrong = lambda ids, q, p: torch.ones_like(ids, dtype=torch.bool)  # noqa: E731
    monkeypatch.setattr(sampling, "passes", wrong)
    monkeypatch.setattr(token_choice, "passes", wrong)


def patch_residual(monkeypatch):
    monkeypatch.setattr(sampling, "residual", lambda p, q: p)
    monkeypatch.setattr(token_choice, "residual", lambda p, q: p)


def patch_distribution(monkeypatch):
    """Drafts are drawn from the warped distribution, but the unwarped one is what verification is told."""
    draft = DrafterCandidateGenerator.draft

    def told_otherwise(self, *args, **kwargs):
        result = draft(self, *args, **kwargs)
        if result.probs is None:
            return result
        unwarped = result.probs.sqrt()
        return result._replace(probs=unwarped / unwarped.sum(-1, keepdim=True))

    monkeypatch.setattr(DrafterCandidateGenerator, "draft", told_otherwise)


def patch_greedy(monkeypatch):
    """The likeliest token is drafted, and called a draw."""
    monkeypatch.setattr(draft_sampler, "draw", lambda probs: probs.argmax(-1))


def patch_cut(monkeypatch):
    """The round is cut by looking at the very token that the cut is about."""
    draft = DrafterCandidateGenerator.draft

    def anticipating(self, *args, **kwargs):
        result = draft(self, *args, **kwargs)
        ids = result.ids[0].tolist()
        length = next((k for k, token in enumerate(ids) if token < 2), len(ids))
        return result._replace(lengths=[length])

    monkeypatch.setattr(DrafterCandidateGenerator, "draft", anticipating)


# Each with the drafter that lays it bare.
WRONG = {
    "every draft passes": (patch_passes, random_drafter),
    "q is not taken away after a rejection": (patch_residual, sure_drafter),
    "another distribution than the drafts were drawn from": (patch_distribution, random_drafter),
    "the likeliest token is called a draw": (patch_greedy, bent_drafter),
    "the cut anticipates": (patch_cut, bent_drafter),
    "every draft of an EAGLE-3 drafter passes": (patch_passes, eagle3_drafter),
}


@pytest.mark.parametrize(("patch", "make"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_sampler_fails_the_test_of_chains(monkeypatch, patch, make):
    patch(monkeypatch)
    p, _ = chain_test(make)
    assert p < FAIL


def test_a_wrong_sampler_fails_the_test_of_the_joint_distribution(monkeypatch):
    patch_passes(monkeypatch)
    target, settings = full_target(), {"temperature": 0.6, "top_k": 4}
    cells = first_tokens(target, random_drafter(target), settings, num_samples=120)
    assert p_value(cells, joint_distribution(target, settings)) < FAIL
