"""The drafter against the reference implementation, and what must hold for every configuration of it."""

import copy
import functools
import pickle
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.draft_cache import DraftCache
from dspark_hf.layers import DSparkRotaryEmbedding
from dspark_hf.masks import anchor_mask

pytestmark = pytest.mark.integration

TOLERANCE = 1e-4  # of the largest value


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < tolerance, f"relative error {error:.2e}"


# ---------------------------------------------------------------------- parity with the reference

PARITY_CASES = {
    "shipped": "a_qwen3_vanilla_confmarkov",
    "vanilla head": "a_qwen3_vanilla_confmarkov",
    "rnn head": "c_qwen3_rnn_confmarkov",
    "no heads": "d_qwen3_dflash",
    "Gemma 4 layers": "f_gemma4_vanilla_confmarkov",
}


@dataclass
class Round:
    """One round of the reference, and what our drafter computes from the same inputs."""

    expected: dict[str, torch.Tensor]
    projected: torch.Tensor
    embedded: torch.Tensor
    layer_outputs: list[torch.Tensor]
    hidden_states: torch.Tensor
    base_logits: torch.Tensor
    corrected_logits: torch.Tensor
    confidence_logits: torch.Tensor | None
    draft_ids: torch.Tensor
    cached_keys: list[torch.Tensor]
    cached_values: list[torch.Tensor]


@dataclass
class ParityCase:
    folder: Path
    drafter: DSparkDrafter
    vectors: dict[str, torch.Tensor]
    rounds: list[Round]


@pytest.fixture(params=PARITY_CASES, ids=lambda name: name.replace(" ", "_"))
def case(request: pytest.FixtureRequest) -> ParityCase:
    root = request.getfixturevalue("data" if request.param == "shipped" else "shared")
    return load_case(root / "parity" / PARITY_CASES[request.param])


@lru_cache
@torch.no_grad()
def load_case(folder: Path) -> ParityCase:
    drafter = DSparkDrafter.from_pretrained(folder / "drafter").eval()
    vectors = load_file(folder / "inference.safetensors")
    cache = DraftCache(len(drafter.layers))
    rounds = [run_round(drafter, cache, vectors, number) for number in (1, 2)]
    return ParityCase(folder, drafter, vectors, rounds)


def run_round(drafter: DSparkDrafter, cache: DraftCache, vectors: dict[str, torch.Tensor], number: int) -> Round:
    prefix = f"round{number}."
    expected = {name.removeprefix(prefix): value for name, value in vectors.items() if name.startswith(prefix)}
    features, block_ids = expected["context_feature"], expected["draft_input_ids"]
    positions = expected["draft_position_ids"]  # those of the new context, then those of the block
    num_new, block_size = features.shape[1], block_ids.shape[1]

    drafter.extend_cache(cache, features, positions[:, :num_new])
    layer_outputs: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda *args: layer_outputs.append(args[-1])) for layer in drafter.layers]
    embeddings = drafter.bind()
    hidden_states = drafter(block_ids, positions[:, -block_size:], draft_cache=cache).last_hidden_state
    for hook in hooks:
        hook.remove()

    base_logits = drafter.base_logits(hidden_states, embeddings)
    draft_ids = draft_greedily(drafter, hidden_states, base_logits, block_ids[:, 0])
    previous_ids = torch.cat([block_ids[:, :1], expected["sampled_tokens"][:, :-1]], dim=1)
    corrected_logits, confidence_logits = base_logits, None
    if drafter.markov_head is not None:
        corrected_logits = base_logits + drafter.markov_head(previous_ids, hidden_states)
    if drafter.confidence_head is not None:
        confidence_logits = drafter.confidence_head(hidden_states, drafter.markov_head.markov_w1(previous_ids))
    held = cache.lengths[0]
    return Round(
        expected=expected,
        projected=drafter.project_context(features),
        embedded=embeddings.embed(block_ids, like=drafter.norm.weight),
        layer_outputs=layer_outputs,
        hidden_states=hidden_states,
        base_logits=base_logits,
        corrected_logits=corrected_logits,
        confidence_logits=confidence_logits,
        draft_ids=draft_ids,
        cached_keys=[keys[:, :, :held].clone() for keys in cache._keys],
        cached_values=[values[:, :, :held].clone() for values in cache._values],
    )


def draft_greedily(
    drafter: DSparkDrafter, hidden_states: torch.Tensor, base_logits: torch.Tensor, anchor_ids: torch.Tensor
) -> torch.Tensor:
    """Slot after slot, each seeing the token drafted before it: `[B, G]`."""
    previous_ids, state, drafts = anchor_ids, None, []
    for slot in range(hidden_states.shape[1]):
        logits = base_logits[:, slot]
        if drafter.markov_head is not None:
            features, state = drafter.markov_head.step(previous_ids, hidden_states[:, slot], state)
            logits = logits + drafter.markov_head.markov_w2(features)
        previous_ids = logits.argmax(dim=-1)
        drafts.append(previous_ids)
    return torch.stack(drafts, dim=1)


class TestParityWithTheReference:
    def test_projected_context(self, case: ParityCase):
        for r in case.rounds:
            assert_close(r.projected, r.expected["context_projected"])

    def test_block_embeddings(self, case: ParityCase):
        for r in case.rounds:
            assert_close(r.embedded, r.expected["noise_embedding"])

    def test_every_layer(self, case: ParityCase):
        for r in case.rounds:
            assert len(r.layer_outputs) == case.drafter.config.num_hidden_layers
            for i, output in enumerate(r.layer_outputs):
                assert_close(output, r.expected[f"layer_{i}_output"])

    def test_hidden_states(self, case: ParityCase):
        for r in case.rounds:
            assert_close(r.hidden_states, r.expected["block_hidden"])

    def test_base_logits(self, case: ParityCase):
        for r in case.rounds:
            assert_close(r.base_logits, r.expected["base_logits"])

    def test_corrected_logits(self, case: ParityCase):
        for r in case.rounds:
            assert_close(r.corrected_logits, r.expected.get("corrected_logits", r.expected["base_logits"]))

    def test_confidence_logits(self, case: ParityCase):
        for r in case.rounds:
            assert (r.confidence_logits is None) == ("confidence_logits" not in r.expected)
            if r.confidence_logits is not None:
                assert_close(r.confidence_logits, r.expected["confidence_logits"])

    def test_greedy_drafts(self, case: ParityCase):
        for r in case.rounds:
            assert torch.equal(r.draft_ids, r.expected["sampled_tokens"])

    def test_the_cache_holds_the_context_and_nothing_of_the_block(self, case: ParityCase):
        for r in case.rounds:
            for i, (keys, values) in enumerate(zip(r.cached_keys, r.cached_values, strict=True)):
                assert_close(keys, r.expected[f"draft_cache_after_crop.layer_{i}.keys"])
                assert_close(values, r.expected[f"draft_cache_after_crop.layer_{i}.values"])

    @torch.no_grad()
    def test_heads_on_given_tokens(self, case: ParityCase):
        given = {name.removeprefix("teacher_forced."): value for name, value in case.vectors.items()}
        if case.drafter.markov_head is None:
            assert "prev_embeddings" not in given
            return
        previous_ids, hidden_states = given["prev_token_ids"], given["hidden_states"]
        bias = case.drafter.markov_head(previous_ids, hidden_states)
        assert_close(given["base_logits"] + bias, given["corrected_logits"])
        embeddings = case.drafter.markov_head.markov_w1(previous_ids)
        assert_close(embeddings, given["prev_embeddings"])
        assert_close(case.drafter.confidence_head(hidden_states, embeddings), given["confidence_logits"])
        features, _ = case.drafter.markov_head.step(previous_ids, hidden_states, None)
        assert_close(case.drafter.markov_head.markov_w2(features), given["stateless_step_bias"])


@pytest.mark.parametrize(
    "name", [name for name in PARITY_CASES if name != "shipped"], ids=lambda n: n.replace(" ", "_")
)
@torch.no_grad()
def test_tapped_layers_and_borrowed_embeddings_are_those_of_the_reference(shared: Path, name: str):
    case = load_case(shared / "parity" / PARITY_CASES[name])
    target = AutoModelForCausalLM.from_pretrained(case.folder / "target")
    indices = case.drafter.config.hidden_state_indices
    hidden_states = target(case.vectors["prompt_ids"], output_hidden_states=True).hidden_states
    features = torch.cat([hidden_states[i] for i in indices], dim=-1)
    assert_close(features, case.vectors["round1.context_feature"])

    borrower = DSparkDrafter.from_pretrained(case.folder / "drafter", borrow_embeddings=True).eval()
    assert borrower.embed_tokens is None
    assert borrower.lm_head is None
    borrower.bind(target)
    first = run_round(borrower, DraftCache(len(borrower.layers)), case.vectors, 1)
    assert_close(first.embedded, first.expected["noise_embedding"])
    assert_close(first.base_logits, first.expected["base_logits"])


# ---------------------------------------------------------------------- every configuration


def run_block(drafter: DSparkDrafter, target, context_length: int = 12, **kwargs) -> torch.Tensor:
    """Hidden states `[1, G, D]` of one block after random context."""
    config = drafter.config
    generator = torch.Generator().manual_seed(1)
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = torch.randn(1, context_length, width, generator=generator)
    cache = DraftCache(len(drafter.layers))
    drafter.extend_cache(cache, features, torch.arange(context_length)[None])
    block_ids = torch.full((1, config.block_size), config.mask_token_id)
    block_ids[:, 0] = 5
    positions = context_length + torch.arange(config.block_size)[None]
    drafter.bind(target)
    return drafter(block_ids, positions, draft_cache=cache, **kwargs).last_hidden_state


HEADS = [
    pytest.param({"markov_rank": 0, "enable_confidence_head": False}, id="no heads"),
    pytest.param({"markov_rank": 0, "confidence_head_with_markov": False}, id="confidence only"),
] + [
    pytest.param({"markov_rank": 8, "markov_head_type": kind} | confidence, id=f"{kind}, {says}")
    for kind in ("vanilla", "gated", "rnn")
    for says, confidence in {
        "no confidence": {"enable_confidence_head": False},
        "confidence": {"confidence_head_with_markov": False},
        "confidence with Markov": {"confidence_head_with_markov": True},
    }.items()
]


@pytest.mark.parametrize("sample_from_anchor", [True, False], ids=["anchor predicts", "anchor predicts nothing"])
@pytest.mark.parametrize("heads", HEADS)
def test_every_combination_of_heads_drafts_and_comes_back_from_disk(heads, sample_from_anchor, tmp_path):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, sample_from_anchor=sample_from_anchor, **heads)
    drafter.save_pretrained(tmp_path)
    loaded = DSparkDrafter.from_pretrained(tmp_path).eval()
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    torch.testing.assert_close(every_output(loaded, target), every_output(drafter, target), rtol=1e-5, atol=1e-5)
    drafts = drafter.config.num_draft_tokens
    assert drafts == tiny.BLOCK_SIZE - (not sample_from_anchor)
    assert drafter.generation_config.num_assistant_tokens == drafts


@torch.no_grad()
def every_output(drafter: DSparkDrafter, target) -> dict[str, torch.Tensor]:
    hidden_states = run_block(drafter, target)
    previous_ids = torch.arange(tiny.BLOCK_SIZE)[None]
    outputs = {"hidden_states": hidden_states, "base_logits": drafter.base_logits(hidden_states, drafter.bind())}
    embeddings = None
    if drafter.markov_head is not None:
        outputs["transition_bias"] = drafter.markov_head(previous_ids, hidden_states)
        embeddings = drafter.markov_head.markov_w1(previous_ids)
    if drafter.confidence_head is not None:
        outputs["confidence"] = drafter.confidence_head(hidden_states, embeddings)
    assert all(value.isfinite().all() for value in outputs.values())
    return outputs


@pytest.mark.parametrize("name", tiny.TARGETS)
@torch.no_grad()
def test_a_drafter_can_be_made_for_every_target(name: str):
    target = tiny.TARGETS[name]()
    outputs = every_output(tiny.random_drafter(target), target)
    assert outputs["base_logits"].shape == (1, tiny.BLOCK_SIZE, tiny.VOCAB_SIZE)


LAYERS = {
    "full": {},
    "full and causal": {"is_causal": True},
    "sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6},
    "sliding and bidirectional": {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 6,
        "is_causal": False,
    },
    "mixed": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3},
    "Gemma 4": {
        "v_norm": True,
        "sandwich_norms": True,
        "layer_scalar": True,
        "attention_scaling": 1.0,
        "attention_k_eq_v": True,
    },
    "Llama": {"qk_norm": False},
    "with biases": {"attention_bias": True, "mlp_bias": True},
}
each_layer_kind = pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)


@each_layer_kind
@torch.no_grad()
def test_eager_and_sdpa_attention_agree(layers):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, **layers)
    drafter.set_attn_implementation("sdpa")
    expected = run_block(drafter, target)
    drafter.set_attn_implementation("eager")
    assert_close(run_block(drafter, target), expected, 1e-5)


@each_layer_kind
@torch.no_grad()
def test_blocks_side_by_side_equal_blocks_one_by_one(layers):
    """The training layout, where many blocks of one sequence pass at once, computes what drafting computes."""
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, **layers)
    drafter.bind(target)
    config, length, anchors = drafter.config, 12, [3, 7, 11]
    size, width = config.block_size, len(config.target_layer_ids) * config.target_hidden_size
    features, anchor_ids = torch.randn(1, length, width), torch.tensor([[5, 6, 7]])
    blocks = torch.full((1, len(anchors), size), config.mask_token_id)
    blocks[:, :, 0] = anchor_ids
    positions = (torch.tensor(anchors)[:, None] + torch.arange(size)).view(1, -1)
    masks = {
        layer_type: anchor_mask(
            torch.tensor([anchors]),
            torch.ones(1, len(anchors), dtype=torch.bool),
            torch.ones(1, length, dtype=torch.bool),
            size,
            window=config.layer_window(i),
            causal=config.layer_is_causal(i),
        )
        for i, layer_type in enumerate(config.layer_types)
    }
    together = drafter(blocks.view(1, -1), positions, context_features=features, attention_mask=masks)
    together = together.last_hidden_state.view(len(anchors), size, -1)
    for i, anchor in enumerate(anchors):
        cache = DraftCache(len(drafter.layers))
        drafter.extend_cache(cache, features[:, :anchor], torch.arange(anchor)[None])
        alone = drafter(blocks[:, i], anchor + torch.arange(size)[None], draft_cache=cache).last_hidden_state
        assert_close(together[i], alone[0], 1e-5)


@each_layer_kind
@torch.no_grad()
def test_rows_of_different_lengths_do_not_see_each_other(layers):
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, **layers)
    drafter.bind(target)
    config, lengths = drafter.config, [9, 2, 5]
    width = len(config.target_layer_ids) * config.target_hidden_size
    features = torch.randn(len(lengths), max(lengths), width)
    block_ids = torch.full((len(lengths), config.block_size), config.mask_token_id)
    block_ids[:, 0] = torch.tensor([5, 6, 7])
    slots = torch.arange(config.block_size)

    cache = DraftCache(len(drafter.layers), len(lengths))
    positions = torch.arange(max(lengths)).expand(len(lengths), -1)
    # In two parts, so that a row's second part lies where another row's first part ends.
    first = [(n + 1) // 2 for n in lengths]
    drafter.extend_cache(cache, features, positions, first)
    rest = torch.stack([f.roll(-n, 0) for f, n in zip(features, first, strict=True)])
    rest_positions = torch.stack([p.roll(-n) for p, n in zip(positions, first, strict=True)])
    drafter.extend_cache(cache, rest, rest_positions, [n - m for n, m in zip(lengths, first, strict=True)])
    assert cache.lengths == lengths
    block_positions = torch.tensor(lengths)[:, None] + slots
    together = drafter(block_ids, block_positions, draft_cache=cache).last_hidden_state

    cache.select_rows([2, 0])
    fewer = drafter(block_ids[[2, 0]], block_positions[[2, 0]], draft_cache=cache).last_hidden_state
    assert_close(fewer, together[[2, 0]], 1e-5)
    for row, length in enumerate(lengths):
        single = DraftCache(len(drafter.layers))
        drafter.extend_cache(single, features[row : row + 1, :length], torch.arange(length)[None])
        alone = drafter(block_ids[row : row + 1], length + slots[None], draft_cache=single).last_hidden_state
        assert_close(together[row], alone[0], 1e-5)


@torch.no_grad()
def test_a_block_leaves_no_trace_in_the_cache():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    drafter.bind(target)
    width = len(drafter.config.target_layer_ids) * drafter.config.target_hidden_size
    cache = DraftCache(len(drafter.layers))
    held = []
    for start in range(0, 600, 3):  # long enough for the buffers to grow
        drafter.extend_cache(cache, torch.randn(1, 3, width), start + torch.arange(3)[None])
        drafter(torch.full((1, 4), 1), start + 3 + torch.arange(4)[None], draft_cache=cache)
        assert cache.lengths == [start + 3]
        held.append(cache.num_bytes)
    assert held == sorted(held)
    assert len(set(held)) <= 4
    assert torch.equal(cache.positions[0, :600], torch.arange(600))


@torch.no_grad()
def test_causal_slots_do_not_see_later_slots_and_bidirectional_ones_do():
    target = tiny.qwen3()
    for causal in (True, False):
        drafter = tiny.random_drafter(target, is_causal=causal)
        drafter.bind(target)
        features = torch.randn(1, 5, len(drafter.config.target_layer_ids) * 32)
        cache = DraftCache(len(drafter.layers))
        drafter.extend_cache(cache, features, torch.arange(5)[None])
        positions = 5 + torch.arange(4)[None]
        before, after = (
            drafter(torch.tensor([[1, 2, 3, last]]), positions, draft_cache=cache).last_hidden_state for last in (4, 5)
        )
        assert torch.allclose(before[:, :3], after[:, :3], rtol=1e-5, atol=1e-5) == causal


@torch.no_grad()
def test_positions_go_past_max_position_embeddings():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, max_position_embeddings=8)
    inside = run_block(drafter, target, context_length=40)
    drafter = tiny.random_drafter(target, max_position_embeddings=512)
    assert_close(inside, run_block(drafter, target, context_length=40), 1e-6)


# ---------------------------------------------------------------------- embeddings


def test_embeddings_are_borrowed_by_reference():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target)
    embeddings = drafter.bind(target)
    assert embeddings.embed_tokens is target.get_input_embeddings()
    assert embeddings.lm_head is target.get_output_embeddings()
    assert drafter.bind() is embeddings is drafter.bind(target)
    assert not any("embed_tokens" in name or "lm_head" in name for name in drafter.state_dict())


def test_a_drafter_that_is_bound_to_nothing_says_what_to_do():
    drafter = tiny.random_drafter(tiny.qwen3())
    with pytest.raises(ValueError, match=r"drafter\.bind\(target\)"):
        drafter(torch.zeros(1, 4, dtype=torch.long), torch.arange(4)[None])


def test_another_target_replaces_the_one_before():
    first, second = tiny.qwen3(seed=0), tiny.qwen3(seed=1)
    drafter = tiny.random_drafter(first)
    drafter.bind(first)
    assert drafter.bind(second).lm_head is second.lm_head


@pytest.mark.parametrize("name", ["gemma3", "gemma4"])
def test_embeddings_of_gemma_are_scaled_exactly_once(name: str):
    target = tiny.TARGETS[name]()
    drafter = tiny.random_drafter(target)
    ids = torch.arange(tiny.VOCAB_SIZE)[None]
    rows = drafter.bind(target).embed(ids, like=drafter.norm.weight)
    assert_close(rows, target.get_input_embeddings().weight[None] * tiny.HIDDEN_SIZE**0.5, 1e-6)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"vocab_size": 160}, r"vocabulary has 128 tokens.*has 160"),
        ({"hidden_size": 64}, r"width 32.*width 64"),
        ({"num_hidden_layers": 1}, r"taps target layer 1, but the target has 1 layers"),
    ],
    ids=["other vocabulary", "other width", "too few layers"],
)
def test_a_target_the_drafter_was_not_made_for_is_refused(fields, says):
    drafter = tiny.random_drafter(tiny.qwen3(), target_name_or_path="some/target", target_layer_ids=[0, 1])
    with pytest.raises(ValueError, match=says) as raised:
        drafter.bind(tiny.llama(**fields))
    assert "It was trained for 'some/target'" in str(raised.value)


def test_an_encoder_decoder_target_is_refused():
    config = transformers.T5Config(
        vocab_size=128, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="encoder-decoder"):
        tiny.random_drafter(tiny.qwen3()).bind(transformers.T5ForConditionalGeneration(config))


@torch.no_grad()
def test_a_reduced_draft_vocabulary_takes_its_rows_of_the_targets_head():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, draft_vocab_size=20)
    drafter.draft_token_ids.copy_(torch.arange(20) * 5)
    hidden_states = run_block(drafter, target)
    logits = drafter.base_logits(hidden_states, drafter.bind(target))
    assert_close(logits, target.lm_head(hidden_states)[..., drafter.draft_token_ids], 1e-6)


# ---------------------------------------------------------------------- the drafters of these tests


@pytest.mark.parametrize("name", ["qwen3", "llama", "mistral", "gemma3"])
@torch.no_grad()
def test_the_perfect_drafter_has_exactly_the_distribution_of_its_target(name: str):
    target = tiny.bigram(build=tiny.TARGETS[name])
    drafter = tiny.perfect_drafter(target)
    ids = tiny.prompt()["input_ids"]
    assert_close(target(ids).logits, tiny.transition_logits(target)[ids], 1e-6)
    hidden_states = run_block(drafter, target)
    logits = drafter.base_logits(hidden_states, drafter.bind()) + drafter.markov_head(ids[:, :4], hidden_states)
    assert_close(logits, tiny.transition_logits(target)[ids[:, :4]], 1e-6)


# ---------------------------------------------------------------------- rotary embeddings

YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.5, 2.0, 2.5],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 64,
    "factor": 8.0,
}
ROPE = {
    "default": ("Llama", {"rope_type": "default", "rope_theta": 10_000.0}),
    "another base": ("Qwen3", {"rope_type": "default", "rope_theta": 1e6}),
    "linear": ("Llama", {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}),
    "dynamic": ("Llama", {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}),
    "yarn": ("Qwen3", YARN),
    "llama3": ("Llama", LLAMA3),
    "longrope": ("Llama", LONGROPE),
    "partial": ("Glm", {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),
}


@pytest.mark.parametrize("rope", ROPE)
@pytest.mark.parametrize("length", [16, 700], ids=["short", "past max_position_embeddings"])
@torch.no_grad()
def test_rotary_angles_are_those_of_transformers_own_models(rope: str, length: int):
    family, parameters = ROPE[rope]
    theirs = own_rotary_embedding(tiny.build_target(tiny.target_config(family, rope_parameters=dict(parameters))))
    config = tiny.drafter_config(tiny.qwen3(), rope_parameters=dict(parameters), max_position_embeddings=512)
    ours = DSparkRotaryEmbedding(config)
    states, positions = torch.zeros(1, length, 32), torch.arange(length)[None]
    if rope == "partial":  # GLM interleaves its pairs and repeats each frequency
        assert_close(ours.inv_freq, theirs.inv_freq, 1e-7)
        return
    for ours_part, theirs_part in zip(ours(states, positions), theirs(states, positions), strict=True):
        assert_close(ours_part[:, 0], theirs_part, 1e-6)
    assert_close(ours.inv_freq, theirs.inv_freq, 1e-7)


def own_rotary_embedding(target) -> nn.Module:
    return next(module for name, module in target.named_modules() if name.endswith("rotary_emb"))


@torch.no_grad()
def test_proportional_rotary_angles_are_those_of_gemma4():
    parameters = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 10_000.0}
    target = tiny.gemma4(rope_parameters={"full_attention": parameters, "sliding_attention": sliding})
    ours = DSparkRotaryEmbedding(tiny.drafter_config(target, rope_parameters=dict(parameters), head_dim=16))
    states, positions = torch.zeros(1, 20, 32), torch.arange(20)[None]
    theirs = own_rotary_embedding(target)(states, positions, "full_attention")
    for ours_part, theirs_part in zip(ours(states, positions), theirs, strict=True):
        assert_close(ours_part[:, 0], theirs_part, 1e-6)


@torch.no_grad()
def test_a_partial_rotation_leaves_the_other_channels_alone():
    target = tiny.qwen3()
    parameters = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
    attention = tiny.random_drafter(target, rope_parameters=parameters).layers[0].self_attn
    rotary = DSparkRotaryEmbedding(attention.config)
    states = torch.randn(1, 6, 32)
    keys, _ = attention.key_values(states, rotary(states, torch.arange(6)[None]))
    unrotated, _ = attention.key_values(states, rotary(states, torch.zeros(1, 6, dtype=torch.long)))
    torch.testing.assert_close(keys[..., 4:], unrotated[..., 4:])
    assert not torch.allclose(keys[..., 1:, :4], unrotated[..., 1:, :4])


# ---------------------------------------------------------------------- training


def test_only_what_the_drafter_owns_is_trained():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target, has_embed_tokens=True, has_lm_head=True)
    frozen = {name for name, weight in drafter.named_parameters() if not weight.requires_grad}
    assert frozen == {"embed_tokens.weight", "lm_head.weight"}


def test_the_objective_runs_inside_forward_and_reaches_every_weight():
    target = tiny.qwen3()
    drafter = tiny.random_drafter(target).train()
    drafter.bind(target)

    def objective(model: DSparkDrafter, hidden_states: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        previous_ids = torch.arange(4)[None]
        logits = model.base_logits(hidden_states, model.bind()) + model.markov_head(previous_ids, hidden_states)
        confidence = model.confidence_head(hidden_states, model.markov_head.markov_w1(previous_ids))
        return logits.logsumexp(-1).mean() + confidence.mean(), {"confidence": confidence.mean()}

    features = torch.randn(1, 6, len(drafter.config.target_layer_ids) * 32)
    output = drafter(torch.full((1, 4), 3), 6 + torch.arange(4)[None], context_features=features, objective=objective)
    output.loss.backward()
    without = [name for name, weight in drafter.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert without == []
    assert target.lm_head.weight.grad is None
    assert set(output.metrics) == {"confidence"}


def test_gradient_checkpointing_gives_the_same_gradients():
    gradients = []
    target = tiny.qwen3()
    for checkpointing in (False, True):
        drafter = tiny.random_drafter(target).train()
        drafter.bind(target)
        if checkpointing:
            # Renamed in transformers 5.2x; the old name warns there.
            enable = getattr(drafter, "activation_checkpointing_enable", None) or drafter.gradient_checkpointing_enable
            enable()
            assert all(layer.gradient_checkpointing for layer in drafter.layers)
        torch.manual_seed(0)
        features = torch.randn(1, 6, len(drafter.config.target_layer_ids) * 32)
        output = drafter(torch.full((1, 4), 3), 6 + torch.arange(4)[None], context_features=features)
        output.last_hidden_state.pow(2).mean().backward()
        gradients.append([layer.self_attn.q_proj.weight.grad for layer in drafter.layers])
    for plain, checkpointed in zip(*gradients, strict=True):
        assert_close(checkpointed, plain, 1e-5)


# ---------------------------------------------------------------------- what a target lends


def reduced_drafter() -> DSparkDrafter:
    return tiny.random_drafter(tiny.qwen3(), draft_vocab_size=16)


def assert_speaks_through(drafter: DSparkDrafter, target: nn.Module) -> None:
    hidden_states = torch.randn(3, tiny.HIDDEN_SIZE)
    expected = target.lm_head(hidden_states)[:, drafter.draft_token_ids]
    torch.testing.assert_close(drafter.bind(target).logits(hidden_states), expected)


def test_binding_twice_gathers_once() -> None:
    drafter, target = reduced_drafter(), tiny.qwen3()
    assert drafter.bind(target) is drafter.bind(target) is drafter.bind()


def test_binding_follows_the_draft_vocabulary() -> None:
    drafter, target = reduced_drafter(), tiny.qwen3()
    drafter.bind(target)
    drafter.draft_token_ids.copy_(torch.arange(40, 56))
    assert_speaks_through(drafter, target)


def test_binding_follows_a_head_that_was_replaced() -> None:
    drafter, target = reduced_drafter(), tiny.qwen3()
    drafter.bind(target)
    target.lm_head = nn.Linear(tiny.HIDDEN_SIZE, tiny.VOCAB_SIZE, bias=False)
    assert_speaks_through(drafter, target)


def moved_to_other_memory(head: nn.Linear) -> None:
    head.weight.data = head.weight.data.clone().mul_(2)


def written_to(head: nn.Linear) -> None:
    with torch.no_grad():
        head.weight.mul_(2)


def given_another_weight(head: nn.Linear) -> None:
    head.weight = nn.Parameter(2 * head.weight.detach())


def converted(head: nn.Linear) -> None:
    head.to(torch.float64)


@pytest.mark.parametrize("change", [moved_to_other_memory, written_to, given_another_weight, converted])
def test_binding_follows_the_weight_of_the_head(change) -> None:
    drafter, target = reduced_drafter(), tiny.qwen3()
    drafter.bind(target)
    change(target.lm_head)
    hidden_states = torch.randn(3, tiny.HIDDEN_SIZE, dtype=target.lm_head.weight.dtype)
    expected = target.lm_head(hidden_states)[:, drafter.draft_token_ids]
    torch.testing.assert_close(drafter.bind(target).logits(hidden_states), expected)


@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 16}], ids=["full vocabulary", "reduced vocabulary"])
def test_a_quantized_head_is_used_but_not_copied(fields) -> None:
    class Quantized(nn.Module):
        """Its weight is integers, which only the module itself knows how to apply."""

        def __init__(self, head: nn.Linear):
            super().__init__()
            self.scale = 2 / 127
            self.weight = nn.Parameter((head.weight / self.scale).round().to(torch.int8), requires_grad=False)

        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states @ (self.weight.float() * self.scale).T

    target = tiny.qwen3()
    target.lm_head = Quantized(target.lm_head)
    drafter = tiny.random_drafter(target, **fields)
    states = torch.randn(3, tiny.HIDDEN_SIZE)
    ids = slice(None) if drafter.draft_token_ids is None else drafter.draft_token_ids
    torch.testing.assert_close(drafter.bind(target).logits(states), target.lm_head(states)[:, ids])
    with pytest.raises(ValueError, match=r"Quantized\) is quantized or offloaded"):
        drafter.owning_embeddings()


def test_a_head_with_a_bias_is_used_but_not_copied() -> None:
    drafter, target = reduced_drafter(), tiny.qwen3()
    target.lm_head = nn.Linear(tiny.HIDDEN_SIZE, tiny.VOCAB_SIZE)
    assert_speaks_through(drafter, target)
    with pytest.raises(ValueError, match="has a bias"):
        drafter.owning_embeddings()


def copied(drafter: nn.Module, folder: Path) -> nn.Module:
    return copy.deepcopy(drafter)


def pickled(drafter: nn.Module, folder: Path) -> nn.Module:
    return pickle.loads(pickle.dumps(drafter))


def saved_by_torch(drafter: nn.Module, folder: Path) -> nn.Module:
    torch.save(drafter, folder / "drafter.pt")
    return torch.load(folder / "drafter.pt", weights_only=False)


@pytest.mark.parametrize("again", [copied, pickled, saved_by_torch])
@pytest.mark.parametrize(
    "build",
    [tiny.random_drafter, functools.partial(tiny.random_drafter, draft_vocab_size=16), tiny.eagle3_drafter],
    ids=["DSpark", "reduced vocabulary", "EAGLE-3"],
)
def test_a_drafter_that_has_drafted_is_copied_without_its_target(build, again, tmp_path: Path) -> None:
    target = tiny.qwen3()
    drafter = build(target)
    inputs, settings = tiny.prompt(), {"max_new_tokens": 8, "do_sample": False}
    drafted = target.generate(**inputs, **settings, assistant_model=drafter)
    assert drafter.bound_target is target
    copy_of_it = again(drafter, tmp_path)
    assert copy_of_it.bound_target is None and drafter.bound_target is target
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(copy_of_it.state_dict()[name], tensor), name
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=copy_of_it), drafted)
    held = sum(p.numel() for p in drafter.parameters())
    assert len(pickle.dumps(copy_of_it)) < 4 * held + 100_000  # Nothing of the target's came along.


def test_what_inference_mode_gathered_can_be_trained_through() -> None:
    drafter, target = reduced_drafter(), tiny.qwen3()
    with torch.inference_mode():
        drafter.bind(target)
    hidden_states = torch.randn(3, tiny.HIDDEN_SIZE, requires_grad=True)
    drafter.bind(target).logits(hidden_states).sum().backward()
    assert hidden_states.grad is not None and hidden_states.grad.any()
