"""DeepSeek-V4 drafts for itself: a tiny target with the drafter that its checkpoint embeds."""

import functools
from pathlib import Path

import pytest
import tiny_deepseek_v4 as v4
import torch
from transformers import PreTrainedModel

import tiny
from dspark_hf import DeepseekV4Drafter, DeepseekV4DrafterConfig, Drafter, record_speculation
from dspark_hf.embeddings import SharedEmbeddings
from dspark_hf.generation.candidate_generator import DrafterCandidateGenerator
from dspark_hf.hub import build_card
from dspark_hf.kinds.dspark.configuration_dspark import DSparkConfig
from dspark_hf.scheduling import ThroughputCurve
from dspark_hf.transformers_names import CACHE_KEY

pytestmark = pytest.mark.integration

GREEDY = {"max_new_tokens": 32, "do_sample": False}


@functools.cache
def target() -> PreTrainedModel:
    return v4.target()


@functools.cache
def plain(length: int) -> torch.Tensor:
    return target().generate(**tiny.prompt(length), **GREEDY)


def drafter_of(seed: int = 0, **fields) -> DeepseekV4Drafter:
    config = DeepseekV4DrafterConfig.for_target(
        target().config, **({"mask_token_id": tiny.MASK_ID, "initializer_range": 0.2, "markov_rank": 8} | fields)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        drafter = DeepseekV4Drafter(config)
    return drafter.eval().requires_grad_(False)


def drafter_that_knows(answer: torch.Tensor) -> DeepseekV4Drafter:
    """Its sequential head says after each token what came after it last in the answer; what the layers compute is small."""
    drafter = drafter_of(markov_rank=tiny.VOCAB_SIZE)
    drafter.norm.weight.fill_(0.01)
    drafter.markov_head.markov_w1.weight.copy_(torch.eye(tiny.VOCAB_SIZE))
    drafter.markov_head.markov_w2.weight.zero_()
    for token, following in zip(answer[0, :-1].tolist(), answer[0, 1:].tolist(), strict=True):
        drafter.markov_head.markov_w2.weight[:, token] = 0
        drafter.markov_head.markov_w2.weight[following, token] = 10
    return drafter


@pytest.fixture
def embedded(tmp_path: Path) -> Drafter:
    """The drafter of a quantized checkpoint."""
    return Drafter.from_pretrained(v4.write(tmp_path / "target"), dtype=torch.float32).eval()


def speculated(drafter: Drafter, **kwargs):
    with record_speculation() as stats:
        output = target().generate(assistant_model=drafter, **({"drafting_backoff": False} | kwargs))
    return output, stats


# ---------------------------------------------------------------------- the same output


@pytest.mark.parametrize("length", [1, 9, 30])
def test_greedy_output_is_that_of_plain_generate(length: int, embedded: Drafter):
    answer = plain(length)
    for drafter, least in ((embedded, 1.0), (drafter_that_knows(answer), 1.3)):
        output, stats = speculated(drafter, **tiny.prompt(length), **GREEDY)
        assert torch.equal(output, answer)
        assert stats.acceptance_length >= least and sum(r.drafted for r in stats.rounds) > 24


@pytest.fixture
def drafted(monkeypatch) -> list[tuple[torch.Tensor, list[int]]]:
    """The tokens before each round, and its drafts."""
    rounds, draft = [], DrafterCandidateGenerator.draft

    def spy(self, input_ids, max_drafts):
        made = draft(self, input_ids, max_drafts)
        rounds.append((input_ids[0].clone(), made.ids[0].tolist()))
        return made

    monkeypatch.setattr(DrafterCandidateGenerator, "draft", spy)
    return rounds


def drafted_from_nothing(drafter: Drafter, ids: torch.Tensor, num_drafts: int) -> list[int]:
    """The drafts after `ids`, of which the last is the anchor: without caches, from what the target's layers really gave."""
    outputs: dict[int, torch.Tensor] = {}
    taps = drafter.config.target_layer_ids
    hooks = [
        target().model.layers[i].register_forward_hook(lambda m, _, output, i=i: outputs.update({i: output}))
        for i in taps
    ]
    target()(input_ids=ids[:, :-1], use_cache=False)
    for hook in hooks:
        hook.remove()
    features = torch.cat([outputs[i].mean(dim=2) for i in taps], dim=-1)  # Streams are averaged: [1, T, m * D].
    embeddings: SharedEmbeddings = drafter.bind(target())
    size, length = drafter.config.block_size, ids.shape[1] - 1
    block = torch.tensor([[ids[0, -1].item()] + [drafter.config.mask_token_id] * (size - 1)])
    positions = length + torch.arange(size)[None]
    hidden = drafter(block, positions, features, embeddings=embeddings).last_hidden_state
    drafts, previous = [], ids[:, -1]
    for slot in range(num_drafts):
        state = hidden[:, slot]
        logits = drafter.draft_logits(state, drafter.sequential_features(previous, state), embeddings)
        previous = logits.argmax(-1)
        drafts.append(previous.item())
    return drafts


def test_every_round_drafts_from_the_last_tokens(drafted):
    """Each round's drafts are those that a drafter without any memory would make at this point of the answer."""
    answer = plain(9)
    drafter = drafter_that_knows(answer)
    drafter.norm.weight.fill_(0.5)  # So that the layers have a say as well.
    _, stats = speculated(drafter, **tiny.prompt(9), **GREEDY)
    assert len({r.accepted for r in stats.rounds}) > 2 and len(drafted) > 5
    for ids, drafts in drafted:
        assert drafts == drafted_from_nothing(drafter, ids, len(drafts)), ids.shape


def test_a_second_turn_continues_from_its_context(drafted):
    drafter = drafter_that_knows(plain(9))
    first, _ = speculated(drafter, **tiny.prompt(9), **GREEDY, return_dict_in_generate=True)
    prompt = torch.cat([first.sequences, tiny.prompt(3)["input_ids"]], dim=1)
    drafted.clear()
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), CACHE_KEY: first[CACHE_KEY]}
    second, _ = speculated(drafter, **inputs, **GREEDY)
    del inputs[CACHE_KEY]
    assert torch.equal(second, target().generate(**inputs, **GREEDY))
    for ids, drafts in drafted:
        assert drafts == drafted_from_nothing(drafter, ids, len(drafts)), ids.shape


def test_several_rows(embedded: Drafter):
    """Of one length; each has its own rounds."""
    inputs = tiny.prompt(9, num_rows=3)
    answer = target().generate(**inputs, **GREEDY)
    knowing = drafter_that_knows(torch.cat([answer[1:2], answer[0:1]], dim=1))  # The last row stays unknown.
    for drafter in (embedded, knowing):
        output, stats = speculated(drafter, **inputs, **GREEDY)
        assert torch.equal(output, answer)
        assert {r.row for r in stats.rounds} == {0, 1, 2}
    accepted = [sum(r.accepted for r in stats.rounds if r.row == row) for row in range(3)]
    assert min(accepted[:2]) > 10


# ---------------------------------------------------------------------- confidences, schedulers, sampling


def test_confidences_decide_how_much_is_verified(embedded: Drafter):
    answer = plain(9)
    counts = []
    for threshold in (0.0, 0.5, 0.9, 1.0):
        output, stats = speculated(embedded, **tiny.prompt(9), **GREEDY, assistant_confidence_threshold=threshold)
        assert torch.equal(output, answer)
        counts.append(sum(r.verified for r in stats.rounds) / len(stats.rounds))
    assert counts[0] > 4 and counts == sorted(counts, reverse=True) and counts[-1] < 1


@pytest.mark.parametrize("scheduler", ["throughput", "async_throughput"])
def test_schedulers(scheduler: str):
    answer = plain(9)
    drafter = drafter_that_knows(answer)
    drafter.throughput_curve = ThroughputCurve([1, 8], [0.01, 0.012], drafting={1: 0.001})
    output, stats = speculated(drafter, **tiny.prompt(9), **GREEDY, verify_scheduler=scheduler)
    assert torch.equal(output, answer) and stats.rounds


def test_calibration_temperatures_are_applied(embedded: Drafter):
    embedded.confidence_head.proj.weight.data.mul_(0.005)  # So that none is 0 or 1 in float32.
    found = []
    for embedded.config.confidence_temperatures in (None, [2.0] * 5):
        _, stats = speculated(embedded, **tiny.prompt(9), **GREEDY, assistant_confidence_threshold=1e-9)
        found.append(torch.tensor(stats.rounds[0].confidence))
    assert len(found[0]) == 5
    torch.testing.assert_close(found[1], (found[0].logit() / 2).sigmoid(), atol=1e-5, rtol=0)


def test_sampling_from_a_sharp_distribution_is_greedy():
    answer = plain(9)
    output, stats = speculated(
        drafter_that_knows(answer), **tiny.prompt(9), max_new_tokens=32, do_sample=True, temperature=1e-4, top_k=0
    )
    assert torch.equal(output, answer) and stats.acceptance_length > 1.3


def test_half_precision(embedded: Drafter):
    """The target's own dtype is float32 here; the drafter's need not be."""
    output, stats = speculated(embedded.to(torch.bfloat16), **tiny.prompt(9), **GREEDY)
    assert torch.equal(output, plain(9)) and stats.rounds


def test_a_stage_that_is_offloaded(embedded: Drafter, tmp_path: Path):
    pytest.importorskip("accelerate")
    places = {name: "cpu" for name, _ in embedded.named_children() if name != "layers"}
    places |= {"layers.0": "cpu", "layers.1": "disk", "layers.2": "cpu"}
    spread = Drafter.from_pretrained(
        tmp_path / "target", dtype=torch.float32, device_map=places, offload_folder=tmp_path / "offloaded"
    ).eval()
    assert spread.layers[1].mlp.experts.down_proj.is_meta
    rounds = []
    for drafter in (embedded, spread):
        output, stats = speculated(drafter, **tiny.prompt(9), **GREEDY, assistant_confidence_threshold=1e-9)
        assert torch.equal(output, plain(9))
        rounds.append(stats.rounds)
    for one, other in zip(*rounds, strict=True):
        assert one.accepted == other.accepted and one.confidence == pytest.approx(other.confidence, abs=1e-5)


# ---------------------------------------------------------------------- around it


def test_the_mask_token_of_the_family_is_known():
    assert DSparkConfig.for_target(_full_vocabulary()).mask_token_id == 128799
    config = DeepseekV4DrafterConfig.for_target(_full_vocabulary())
    assert (config.mask_token_id, config.target_layer_ids) == (128799, [1, 2, 3])
    assert (config.head_dim, config.qk_rope_head_dim, config.hc_mult) == (v4.HEAD_DIM, v4.ROTATED, v4.NUM_STREAMS)


def _full_vocabulary():
    config = target().config.to_dict() | {"vocab_size": 129280}
    return type(target().config).from_dict(config)


def test_a_target_of_another_size_is_refused(embedded: Drafter):
    with pytest.raises(ValueError, match="reads hidden states of width 64"):
        tiny.qwen3().generate(**tiny.prompt(), max_new_tokens=2, assistant_model=embedded)


def test_its_card(embedded: Drafter, tmp_path: Path):
    card = str(build_card(embedded, tmp_path))
    assert "DeepseekV4Drafter.from_pretrained" in card and "3 (DeepSeek-V4)" in card


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's call, not ours.
def test_a_drafter_with_lora_drafts_through_its_adapter():
    peft = pytest.importorskip("peft")
    base = drafter_that_knows(plain(9))
    before, _ = speculated(base, **tiny.prompt(9), **GREEDY)
    config = peft.LoraConfig(target_modules=["q_a_proj", "kv_proj", "down_proj"], r=4, init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config).eval()
    output, stats = speculated(wrapped, **tiny.prompt(9), **GREEDY)
    assert torch.equal(output, before) and stats.rounds
