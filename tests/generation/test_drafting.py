"""The drafter's side: what it is told of the context, how many tokens it drafts, and what is really verified."""

import pytest
import torch
from generation import rig
from torch import nn

import tiny
from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.generation import draft_sampler
from dspark_hf.generation.draft_context import DraftContext
from dspark_hf.generation.dspark_candidate_generator import DSparkCandidateGenerator
from dspark_hf.scheduling import ConfidenceThreshold

GREEDY = {"do_sample": False}


@pytest.fixture
def contexts(monkeypatch):
    """The context of every candidate generator made, with what it was given in `seen` and what it held for drafts in `held`."""
    made, init = [], DSparkCandidateGenerator.__init__
    add, get_ready = DraftContext.add, DraftContext.get_ready

    def spy_init(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.context.seen, self.context.held = [], []
        made.append(self.context)

    def spy_add(self, context_features, counts):
        self.seen.append(context_features[0][None, : counts[0]])
        return add(self, context_features, counts)

    def spy_get_ready(self, input_ids):
        get_ready(self, input_ids)
        self.held.append((self.cache.lengths[0] + self.first_positions[0], input_ids[0].shape[1]))

    monkeypatch.setattr(DSparkCandidateGenerator, "__init__", spy_init)
    monkeypatch.setattr(DraftContext, "add", spy_add)
    monkeypatch.setattr(DraftContext, "get_ready", spy_get_ready)
    return made


def fed_lengths(target):
    """Notes how many tokens each pass of the target is fed."""
    lengths = []
    target.register_forward_pre_hook(
        lambda module, args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return lengths


# ---------------------------------------------------------------------- context


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("chunk_size", [None, 4], ids=["whole prompt", "prompt in chunks"])
def test_the_drafter_gets_the_tapped_states_of_every_committed_token(contexts, family, chunk_size):
    target = tiny.TARGETS[family]()
    outcome = rig.compare(
        target, drafter_fields={"target_layer_ids": [-1, 0, 2]}, prefill_chunk_size=chunk_size, max_new_tokens=24
    )
    states = target(outcome.plain[:, :-1], output_hidden_states=True).hidden_states
    expected = torch.cat([states[i] for i in (0, 1, 3)], dim=-1)
    assert len(contexts) == len(rig.KINDS)
    for context in contexts:
        torch.testing.assert_close(torch.cat(context.seen, dim=1), expected, atol=2e-4, rtol=1e-3)


def test_each_tap_is_the_output_of_its_layer():
    """Every layer adds a constant of its own: what reaches the drafter tells which layers it came from."""
    target = tiny.bigram()
    for i, layer in enumerate(target.model.layers):
        layer.register_forward_hook(lambda m, a, output, i=i: output + 10.0**i)
    embedded = target.get_input_embeddings()(tiny.prompt()["input_ids"])
    received = []
    drafter = tiny.random_drafter(target, target_layer_ids=[-1, 0, 2])
    project = drafter.project_context
    drafter.project_context = lambda features: (received.append(features), project(features))[1]
    target.generate(**tiny.prompt(), max_new_tokens=4, assistant_model=drafter, **GREEDY)
    added = (received[0] - embedded.repeat(1, 1, 3)).unflatten(-1, (3, -1)).mean((0, 1, 3))
    torch.testing.assert_close(added, torch.tensor([0.0, 1.0, 111.0]), atol=1e-3, rtol=1e-3)


def test_the_draft_cache_holds_the_committed_tokens_and_nothing_else(contexts):
    rig.compare(rig.target(), max_new_tokens=40)
    for context in contexts:
        # The anchor, the last token, has no features yet.
        assert all(held == length - 1 for held, length in context.held)
        assert len(context.held) > 2


def test_padding_is_not_context(contexts):
    padded = tiny.left_padded(tiny.prompt(9), tiny.prompt(4, seed=1))
    rig.compare(rig.target(), {name: value[1:] for name, value in padded.items()})
    for context in contexts:
        assert all(held == length - 1 - 5 for held, length in context.held)


@pytest.mark.parametrize("length", [4, 40], ids=["a short prompt", "a prompt beyond the drafter's table"])
def test_positions_go_up_without_a_clamp(length):
    target, blocks = rig.target(), []
    drafter = tiny.random_drafter(target, max_position_embeddings=16)
    forward = drafter.forward

    def spy(block_ids, position_ids, **kwargs):
        blocks.append(
            (position_ids[0].tolist(), kwargs["draft_cache"].positions[0, : kwargs["draft_cache"].max_length].tolist())
        )
        return forward(block_ids, position_ids, **kwargs)

    drafter.forward = spy
    plain = target.generate(**tiny.prompt(length), max_new_tokens=12, **GREEDY)
    assert torch.equal(
        target.generate(**tiny.prompt(length), max_new_tokens=12, assistant_model=drafter, **GREEDY), plain
    )
    assert blocks[0][0][0] == length
    for positions, context in blocks:
        assert context == list(range(positions[0]))
        assert positions == list(range(positions[0], positions[0] + rig.BLOCK_SIZE))


# ---------------------------------------------------------------------- how many drafts


def call_setting(num_drafts, drafter):
    return {"num_assistant_tokens": num_drafts}


def config_setting(num_drafts, drafter):
    from transformers import GenerationConfig

    return {"generation_config": GenerationConfig(num_assistant_tokens=num_drafts, max_new_tokens=12)}


def drafter_setting(num_drafts, drafter):
    drafter.generation_config.num_assistant_tokens = num_drafts
    return {}


@pytest.mark.parametrize("where", [call_setting, config_setting, drafter_setting], ids=["call", "config", "drafter"])
@pytest.mark.parametrize("num_drafts", range(rig.BLOCK_SIZE + 1), ids=lambda n: f"{n} drafts")
def test_number_of_drafts(num_drafts, where):
    target = tiny.qwen3(num_hidden_layers=2)
    plain = target.generate(**tiny.prompt(), max_new_tokens=12, **GREEDY)
    drafter = rig.scripted(target, rig.ids_of(plain))
    settings = where(num_drafts, drafter)
    if "generation_config" not in settings:
        settings |= {"max_new_tokens": 12} | GREEDY
    lengths = fed_lengths(target)
    with record_speculation() as stats:
        drafted = target.generate(**tiny.prompt(), **settings, assistant_model=drafter)
    assert torch.equal(drafted, plain)
    assert lengths[1] == 1 + num_drafts
    assert stats.rounds[0].drafted == num_drafts


@pytest.mark.parametrize("num_drafts", [rig.BLOCK_SIZE + 1, 99, -1])
def test_more_drafts_than_a_block_gives_are_refused(num_drafts):
    message = rig.refusing(rig.target(), num_assistant_tokens=num_drafts)
    assert f"num_assistant_tokens={num_drafts}" in message and f"at most {rig.BLOCK_SIZE}" in message


def test_an_anchor_slot_that_predicts_nothing_counts():
    target = rig.target()
    drafter = tiny.random_drafter(target, sample_from_anchor=False)
    assert f"at most {rig.BLOCK_SIZE - 1}" in rig.refusing(target, drafter=drafter, num_assistant_tokens=rig.BLOCK_SIZE)


def test_the_default_is_a_whole_block_and_no_threshold():
    drafter = tiny.random_drafter(rig.target())
    assert drafter.generation_config.num_assistant_tokens == rig.BLOCK_SIZE
    assert drafter.generation_config.assistant_confidence_threshold == 0.0


# ---------------------------------------------------------------------- confidence


def with_confidence(target, seed=0):
    """Confidences all over the scale."""
    drafter = tiny.random_drafter(target, seed=seed)
    with torch.no_grad():
        drafter.confidence_head.proj.bias.fill_(1.0)
    return drafter


def test_higher_thresholds_verify_fewer_tokens_and_never_change_the_output():
    target = tiny.qwen3(num_hidden_layers=2)
    plain = target.generate(**tiny.prompt(), max_new_tokens=40, **GREEDY)
    lengths = fed_lengths(target)
    totals = []
    for threshold in (0.0, 0.5, 0.9, 1.0):
        lengths.clear()
        with record_speculation() as stats:
            drafted = target.generate(
                **tiny.prompt(),
                max_new_tokens=40,
                assistant_model=with_confidence(target),
                assistant_confidence_threshold=threshold,
                **GREEDY,
            )
        assert torch.equal(drafted, plain)
        # What was verified is what the target was really fed.
        assert lengths[1:] == [1 + r.verified for r in stats.rounds]
        for r in stats.rounds:
            cut = next((k for k, c in enumerate(r.confidence) if c < threshold), r.drafted)
            assert r.verified == min(cut, r.drafted)
        totals.append(sum(r.verified for r in stats.rounds))
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[1] > totals[-1] == 0


def test_recording_changes_nothing():
    """Confidences are computed for the record as well; the round is cut where it is cut without."""
    target = tiny.qwen3(num_hidden_layers=2)
    lengths, both = fed_lengths(target), []
    for recording in (False, True):
        lengths.clear()
        call = tiny.prompt() | GREEDY | {"max_new_tokens": 20, "assistant_model": with_confidence(target)}
        call["assistant_confidence_threshold"] = 0.6
        if recording:
            with record_speculation():
                target.generate(**call)
        else:
            target.generate(**call)
        both.append(lengths.copy())
    assert both[0] == both[1]


@pytest.mark.parametrize("threshold", [-0.1, 1.5])
def test_a_threshold_is_a_probability(threshold):
    assert "not a probability" in rig.refusing(rig.target(), assistant_confidence_threshold=threshold)


def test_a_threshold_without_a_confidence_head_changes_nothing():
    target = rig.target()
    drafter = tiny.random_drafter(target, enable_confidence_head=False)
    counts = []
    for threshold in (0.0, 0.9):
        with record_speculation() as stats:
            target.generate(
                **tiny.prompt(),
                max_new_tokens=12,
                assistant_model=drafter,
                assistant_confidence_threshold=threshold,
                **GREEDY,
            )
        counts.append([r.verified for r in stats.rounds])
    assert counts[0] == counts[1]


@pytest.mark.parametrize("threshold", [0.0, 0.6])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_cut_does_not_look_at_the_token_it_decides_about(monkeypatch, threshold, do_sample):
    """
    Whatever token is drawn at a slot: the confidences up to that slot, and whether the slot is verified, stay the same.
    Later ones do change, else this would show nothing.
    """
    target = rig.target()
    drafter = with_confidence(target)
    states = torch.randn(1, 8, tiny.HIDDEN_SIZE * len(drafter.config.target_layer_ids))
    chosen = []
    monkeypatch.setattr(draft_sampler, "draw", lambda probs: torch.tensor([chosen.pop(0)]))
    argmax = torch.Tensor.argmax

    def chosen_argmax(scores, *args, **kwargs):
        is_draft = scores.shape == (1, tiny.VOCAB_SIZE)
        return torch.tensor([[chosen.pop(0)]]) if is_draft else argmax(scores, *args, **kwargs)

    if not do_sample:
        monkeypatch.setattr(torch.Tensor, "argmax", chosen_argmax)

    def draft(tokens):
        chosen[:] = tokens
        generator = DSparkCandidateGenerator(
            drafter, target, do_sample=do_sample, scheduler=ConfidenceThreshold(threshold), want_confidence=True
        )
        generator.context.add(states, [states.shape[1]])
        made = generator.draft([torch.full((1, 9), 3)], max_drafts=[rig.BLOCK_SIZE])
        return made.confidence[0].tolist(), made.lengths[0]

    changed_later = False
    for slot in range(rig.BLOCK_SIZE):
        tokens = [5, 6, 7, 8]
        confidence, length = draft(tokens)
        for other in (9, 60, 120):
            tokens[slot] = other
            confidence_other, length_other = draft(tokens)
            assert confidence_other[: slot + 1] == pytest.approx(confidence[: slot + 1], abs=1e-6)
            assert (length_other > slot) == (length > slot)
            changed_later |= confidence_other[slot + 1 :] != pytest.approx(confidence[slot + 1 :], abs=1e-3)
    assert changed_later or threshold > 0


# ---------------------------------------------------------------------- reduced vocabularies


def reduced(target, token_ids, **fields):
    drafter = tiny.random_drafter(target, draft_vocab_size=len(token_ids), **fields)
    drafter.draft_token_ids.copy_(torch.tensor(token_ids))
    return drafter


@pytest.mark.parametrize("own_head", [False, True], ids=["the target's head", "a head of its own"])
@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.4}], ids=["no processor", "a processor"])
def test_a_reduced_vocabulary_is_exact(own_head, settings):
    target = rig.target()
    plain = target.generate(**tiny.prompt(), max_new_tokens=20, **GREEDY, **settings)
    said = sorted(set(rig.ids_of(plain)[9:]), reverse=True)
    for token_ids in (said, list(range(0, 120, 3))):
        drafter = reduced(target, token_ids, has_lm_head=own_head)
        drafted = target.generate(**tiny.prompt(), max_new_tokens=20, assistant_model=drafter, **GREEDY, **settings)
        assert torch.equal(drafted, plain)


def test_a_perfect_drafter_of_a_reduced_vocabulary_is_accepted_within_it():
    target = tiny.bigram(num_hidden_layers=2)
    plain = target.generate(**tiny.prompt(), max_new_tokens=25, **GREEDY)
    said = sorted(set(rig.ids_of(plain)[9:]))
    # The ids must be in place before the perfect head is made from them.
    drafter = tiny.perfect_drafter(target)
    config = drafter.config
    config.draft_vocab_size = len(said)
    small = DSparkDrafter(config).eval()
    small.draft_token_ids.copy_(torch.tensor(said))
    state = drafter.state_dict()
    state["markov_head.markov_w2.weight"] = state["markov_head.markov_w2.weight"][said]
    small.load_state_dict(state | {"draft_token_ids": small.draft_token_ids})
    with record_speculation() as stats:
        assert torch.equal(target.generate(**tiny.prompt(), max_new_tokens=25, assistant_model=small, **GREEDY), plain)
    assert stats.acceptance_rate == 1.0


def test_the_drafting_distribution_is_zero_outside_a_reduced_vocabulary():
    target, token_ids = rig.target(), [7, 3, 90]
    generator = DSparkCandidateGenerator(reduced(target, token_ids), target, do_sample=True)
    generator.context.add(torch.randn(1, 5, tiny.HIDDEN_SIZE), [5])
    draft = generator.draft([torch.full((1, 6), 3)], max_drafts=[rig.BLOCK_SIZE])
    assert set(draft.ids[0].tolist()) <= set(token_ids)
    assert draft.probs.shape == (1, rig.BLOCK_SIZE, tiny.VOCAB_SIZE)
    torch.testing.assert_close(draft.probs[..., token_ids].sum(-1), torch.ones(1, rig.BLOCK_SIZE))


@pytest.mark.parametrize(
    "settings",
    [
        {"prefix_allowed_tokens_fn": lambda batch, sent: [100, 101]},
        {"suppress_tokens": [3, 7, 90]},
        {"exponential_decay_length_penalty": (0, 1.5), "eos_token_id": 50, "pad_token_id": 0},
        {"top_h": 0.5},
        {"top_k": 2, "repetition_penalty": 1.5},
        {"min_p": 0.2, "renormalize_logits": True, "suppress_tokens": [3, 7, 90]},
    ],
    ids=[
        "none is allowed",
        "all are suppressed",
        "a missing end grows likelier",
        "top h",
        "top k",
        "renormalised nothing",
    ],
)
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_processors_that_leave_a_reduced_vocabulary_nothing(do_sample, settings):
    if not do_sample:
        settings = {k: v for k, v in settings.items() if k not in ("top_h", "top_k", "min_p")}
    target = rig.target()
    call = tiny.prompt() | {"max_new_tokens": 10, "do_sample": do_sample} | settings
    output = target.generate(**call, assistant_model=reduced(target, [7, 3, 90]))
    if not do_sample:
        assert torch.equal(output, target.generate(**call))
    new = set(rig.ids_of(output)[9:])
    if "prefix_allowed_tokens_fn" in settings:
        assert new <= {100, 101}
    assert not new & set(settings.get("suppress_tokens", ()))


# ---------------------------------------------------------------------- embeddings and heads


class OnlyForward(nn.Module):
    """A quantised layer as it may be: no `weight` to read."""

    def __init__(self, inner):
        super().__init__()
        self.call = [inner]

    def forward(self, inputs):
        return self.call[0](inputs)


class Int8Linear(nn.Linear):
    """A linear layer whose weight is not what it computes with."""

    def __init__(self, linear):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.scale = linear.weight.abs().amax(1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, inputs):
        return nn.functional.linear(inputs, self.weight * self.scale)


@pytest.mark.parametrize("reduced_vocabulary", [False, True], ids=["all tokens", "a reduced vocabulary"])
@pytest.mark.parametrize("what", ["head without a weight", "embedding without a weight", "int8 head"])
def test_quantised_heads_and_embeddings(what, reduced_vocabulary):
    target = tiny.bigram(num_hidden_layers=2)
    if what == "head without a weight":
        target.lm_head = OnlyForward(target.lm_head)
    elif what == "embedding without a weight":
        target.model.embed_tokens = OnlyForward(target.model.embed_tokens)
    else:
        target.lm_head = Int8Linear(target.lm_head)
    plain = target.generate(**tiny.prompt(), max_new_tokens=16, **GREEDY)
    drafter = reduced(target, list(range(0, 128, 2))) if reduced_vocabulary else tiny.random_drafter(target)
    assert torch.equal(target.generate(**tiny.prompt(), max_new_tokens=16, assistant_model=drafter, **GREEDY), plain)


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_target_and_drafter_of_different_precision(dtypes):
    target = tiny.qwen3(num_hidden_layers=2).to(dtypes[0])
    drafter = tiny.random_drafter(target).to(dtypes[1])
    plain = target.generate(**tiny.prompt(), max_new_tokens=12, **GREEDY)
    for reduced_vocabulary in (False, True):
        if reduced_vocabulary:
            drafter = reduced(target, list(range(0, 128, 2))).to(dtypes[1])
        drafted = target.generate(**tiny.prompt(), max_new_tokens=12, assistant_model=drafter, **GREEDY)
        assert drafted.shape == plain.shape
        if dtypes[0] == torch.float32:
            assert torch.equal(drafted, plain)


def test_a_drafter_that_owns_its_embedding_and_head():
    target = rig.target()
    drafter = tiny.random_drafter(target, has_embed_tokens=True, has_lm_head=True)
    plain = target.generate(**tiny.prompt(), max_new_tokens=12, **GREEDY)
    assert torch.equal(target.generate(**tiny.prompt(), max_new_tokens=12, assistant_model=drafter, **GREEDY), plain)


def test_one_drafter_for_two_targets_in_turn():
    drafter = tiny.random_drafter(rig.target())
    for seed in (0, 1, 0):
        target = rig.target("qwen3", seed=seed)
        plain = target.generate(**tiny.prompt(), max_new_tokens=8, **GREEDY)
        assert torch.equal(target.generate(**tiny.prompt(), max_new_tokens=8, assistant_model=drafter, **GREEDY), plain)


# ---------------------------------------------------------------------- the interface of transformers


@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
def test_the_candidate_generator_interface(do_sample):
    target = rig.target()
    generator = DSparkCandidateGenerator(tiny.random_drafter(target), target, do_sample=do_sample)
    ids = tiny.prompt()["input_ids"]
    states = target(ids[:, :-1], output_hidden_states=True).hidden_states
    generator.context.add(states[1], [states[1].shape[1]])
    candidates, log_probs = generator.get_candidates(ids)
    assert candidates.shape == (1, 9 + rig.BLOCK_SIZE) and torch.equal(candidates[:, :9], ids)
    if do_sample:
        torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(1, rig.BLOCK_SIZE))
    else:
        assert log_probs is None
    generator.update_candidate_strategy(candidates, torch.zeros(1, 5, 128), 2)
