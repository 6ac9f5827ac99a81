"""DeepSeek-V4's embedded drafter computes what an independent implementation in NumPy computes."""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tiny
from dspark_hf import DeepseekV4Drafter, DeepseekV4DrafterConfig, Drafter
from dspark_hf.embeddings import SharedEmbeddings
from dspark_hf.kinds.deepseek_v4.window_cache import WindowCache

HERE = Path(__file__).parents[1] / "data" / "parity" / "v4_deepseek"
POSITIONS = (3, 8, 9, 20, 21)  # Before, at and after the point where the window of 8 is full.


class Reference(NamedTuple):
    drafter: DeepseekV4Drafter
    embeddings: SharedEmbeddings
    vectors: dict[str, torch.Tensor]
    case: dict[str, Any]

    def expected(self, name: str) -> torch.Tensor:
        return self.vectors[f"{self.case['name']}.{name}"].float()


@functools.cache
def loaded(checkpoint: Path, experts: str) -> DeepseekV4Drafter:
    return Drafter.from_pretrained(checkpoint, experts_implementation=experts).eval().requires_grad_(False)


def reference(checkpoint: Path, folder: Path, position: int, experts: str) -> Reference:
    vectors = load_file(folder / "vectors.safetensors")
    if "embed_tokens" not in vectors:
        target = load_file(folder / "model.safetensors")
        vectors |= {"embed_tokens": target["model.embed_tokens.weight"], "lm_head": target["head.weight"]}
    lm_head = nn.Linear(*reversed(vectors["lm_head"].shape), bias=False)
    lm_head.weight = nn.Parameter(vectors["lm_head"], requires_grad=False)
    embeddings = SharedEmbeddings(nn.Embedding.from_pretrained(vectors["embed_tokens"]), lm_head)
    case = next(c for c in json.loads((folder / "vectors.json").read_text())["cases"] if c["position"] == position)
    return Reference(loaded(checkpoint, experts), embeddings, vectors, case)


@pytest.fixture(params=POSITIONS, ids=lambda position: f"anchor at {position}")
def known(request, experts: str) -> Reference:
    position = request.param
    if position in (9, 20):  # These are in the repository.
        return reference(HERE / "drafter", HERE, position, experts)
    folder = request.getfixturevalue("shared") / "parity" / "v4_deepseek"
    if not folder.is_dir():
        pytest.skip(f"{folder} does not exist")
    return reference(folder, folder, position, experts)


@pytest.fixture(params=["eager", "grouped_mm"])
def experts(request) -> str:
    return request.param


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 2e-5, or where numbers are larger than 10, within the same share of the largest."""
    tolerance = 2e-5 * max(float(expected.abs().max()) / 10, 1.0)
    torch.testing.assert_close(actual, expected.float(), atol=tolerance, rtol=0)


def filled_cache(known: Reference, *pieces: int) -> WindowCache:
    """A cache of the tokens before the anchor, given in pieces of these lengths and then the rest."""
    drafter, position = known.drafter, known.case["position"]
    cache = drafter.new_cache()
    features = known.vectors["features"][None, :position].float()
    for part, positions in zip(
        features.split([*pieces, position - sum(pieces)], dim=1),
        torch.arange(position)[None].split([*pieces, position - sum(pieces)], dim=1),
        strict=True,
    ):
        drafter.extend_cache(cache, part, positions)
    return cache


def block(known: Reference) -> tuple[torch.Tensor, torch.Tensor]:
    config = known.drafter.config
    ids = torch.tensor([[known.case["anchor"]] + [config.mask_token_id] * (config.block_size - 1)])
    return ids, known.case["position"] + torch.arange(config.block_size)[None]


@pytest.mark.parametrize("pieces", [(), (1, 1, 1)], ids=["at once", "in pieces"])
def test_a_block(known: Reference, pieces: tuple[int, ...]):
    drafter, case = known.drafter, known.case
    assert max(pieces, default=0) < case["position"]
    sublayers: list[torch.Tensor] = []
    hooks = [layer.register_forward_hook(lambda m, i, output: sublayers.append(output)) for layer in drafter.layers]
    chosen: list[tuple[torch.Tensor, torch.Tensor]] = []
    routers = [layer.mlp.gate for layer in drafter.layers]
    hooks += [router.register_forward_hook(lambda m, i, output: chosen.append(output)) for router in routers]
    ids, positions = block(known)
    output = drafter(ids, positions, draft_cache=filled_cache(known, *pieces), embeddings=known.embeddings)
    for hook in hooks:
        hook.remove()
    for stage, streams in enumerate(sublayers):
        assert_close(streams[0], known.expected(f"stage{stage}.streams"))
        experts, order = chosen[stage][0].sort(dim=-1)
        theirs, their_order = known.expected(f"stage{stage}.experts").sort(dim=-1)
        assert torch.equal(experts, theirs.long())
        weights = known.expected(f"stage{stage}.expert_weights").gather(-1, their_order)
        assert_close(chosen[stage][1].gather(-1, order), weights)

    hidden = output.last_hidden_state
    assert_close(hidden[0], known.expected("hidden"))
    assert_close(drafter.base_logits(hidden, known.embeddings)[0], known.expected("base_logits"))
    previous = torch.tensor([[case["anchor"], *case["drafts"][:-1]]])
    logits = drafter.draft_logits(hidden, drafter.sequential_features(previous, hidden), known.embeddings)[0]
    assert_close(logits, known.expected("logits"))
    assert logits.argmax(-1).tolist() == case["drafts"]
    assert_close(drafter.confidence_logits(hidden, previous)[0], torch.tensor(case["confidence_logits"]))


def test_the_streams_between_attention_and_experts(known: Reference):
    inputs: list[torch.Tensor] = []
    hooks = [layer.ffn_hc.register_forward_hook(lambda m, i, o: inputs.append(i[0])) for layer in known.drafter.layers]
    ids, positions = block(known)
    known.drafter(ids, positions, draft_cache=filled_cache(known), embeddings=known.embeddings)
    for hook in hooks:
        hook.remove()
    for stage, streams in enumerate(inputs):
        assert_close(streams[0], known.expected(f"stage{stage}.after_attention"))


def test_the_context(known: Reference):
    drafter, position = known.drafter, known.case["position"]
    context = drafter.project_context(known.vectors["features"][None].float())
    assert_close(context[0], known.vectors["main_x"])
    angles = drafter.rotary_emb(context, torch.arange(context.shape[1])[None])
    for stage, layer in enumerate(drafter.layers):
        rows, _ = layer.self_attn.key_values(context, angles)
        assert_close(rows[0, 0], known.vectors[f"context_rows.{stage}"])
    # The cache holds the last 8 of them, and the mask says which.
    cache = filled_cache(known)
    kept = cache.mask(torch.tensor([[position]]))[0, 0, 0, :-1]
    assert sorted(cache.positions[0][kept].tolist()) == list(range(max(position - 8, 0), position))


def test_context_given_beside_the_block(known: Reference):
    """As training gives it, with a mask; what the mask hides changes nothing."""
    drafter, position = known.drafter, known.case["position"]
    ids, positions = block(known)
    features = known.vectors["features"][None].float()
    masks = drafter.training_masks(
        torch.ones(1, features.shape[1], dtype=torch.bool), torch.tensor([[position]]), torch.tensor([[True]])
    )
    output = drafter(ids, positions, features, attention_mask=masks, embeddings=known.embeddings)
    assert_close(output.last_hidden_state[0], known.expected("hidden"))
    features[:, : max(position - 8, 0)] = 7.0
    features[:, position:] = 7.0
    changed = drafter(ids, positions, features, attention_mask=masks, embeddings=known.embeddings)
    assert torch.equal(changed.last_hidden_state, output.last_hidden_state)


def test_rows_of_different_lengths():
    """Two rows in one cache draft what each drafts alone, also after one has left."""
    first, second = (reference(HERE / "drafter", HERE, position, "eager") for position in (9, 20))
    drafter = first.drafter
    cache = drafter.new_cache(2)
    features = first.vectors["features"].float()
    both = torch.stack([nn.functional.pad(features[:9], (0, 0, 0, 11)), features[:20]])
    positions = torch.arange(20).expand(2, -1)
    drafter.extend_cache(cache, both[:, :5], positions[:, :5], [5, 5])
    drafter.extend_cache(cache, both[:, 5:], positions[:, 5:], [4, 15])
    assert cache.lengths == [9, 20]
    blocks = [torch.cat(parts) for parts in zip(block(first), block(second), strict=True)]
    hidden = drafter(*blocks, draft_cache=cache, embeddings=first.embeddings).last_hidden_state
    assert_close(hidden[0], first.expected("hidden"))
    assert_close(hidden[1], second.expected("hidden"))
    cache.select_rows([1])
    alone = drafter(*block(second), draft_cache=cache, embeddings=first.embeddings).last_hidden_state
    assert_close(alone[0], second.expected("hidden"))


def test_a_cache_that_is_taken_back():
    """What a later call may do: the tokens behind are forgotten, those that left the window are gone."""
    known = reference(HERE / "drafter", HERE, 20, "eager")
    cache = filled_cache(known)
    cache.lengths = [18]
    seen = cache.mask(torch.tensor([[18]]))[0, 0, 0, :-1]
    assert sorted(cache.positions[0][seen].tolist()) == list(range(12, 18))
    known.drafter.extend_cache(cache, known.vectors["features"][None, 18:20].float(), torch.tensor([[18, 19]]))
    ids, positions = block(known)
    hidden = known.drafter(ids, positions, draft_cache=cache, embeddings=known.embeddings).last_hidden_state
    assert_close(hidden[0], known.expected("hidden"))


def test_a_long_prompt_is_not_projected():
    known = reference(HERE / "drafter", HERE, 20, "eager")
    lengths: list[int] = []
    hook = known.drafter.fc.register_forward_hook(lambda m, inputs, output: lengths.append(inputs[0].shape[1]))
    cache = filled_cache(known)
    hook.remove()
    assert lengths == [8] and cache.lengths == [20] and cache.num_bytes == 3 * 8 * 16 * 4


def test_the_cache_does_not_grow():
    cache = WindowCache(2, 1, 4)
    for position in range(10):
        rows = torch.full((1, 1, 1, 2), float(position))
        cache.append([(rows, rows)] * 2, torch.tensor([[position]]))
    rows, values = cache.with_block(1, torch.full((1, 1, 2, 2), -1.0), torch.zeros(1, 1, 2, 2))
    assert rows is values and rows[0, 0, :, 0].tolist() == [8.0, 9.0, 6.0, 7.0, -1.0, -1.0]
    assert cache.mask(torch.tensor([[10, 11]])).all()


def test_in_float64_nothing_is_left_of_the_difference():
    """Of the whole file of vectors, which holds them in float64."""
    drafter = Drafter.from_pretrained(HERE / "drafter", dtype=torch.float64, experts_implementation="eager").eval()
    known = reference(HERE / "drafter", HERE, 20, "eager")._replace(drafter=drafter)
    embed, head = (known.vectors[name].double() for name in ("embed_tokens", "lm_head"))
    linear = nn.Linear(*reversed(head.shape), bias=False)
    linear.weight = nn.Parameter(head)
    known = known._replace(embeddings=SharedEmbeddings(nn.Embedding.from_pretrained(embed), linear))
    cache = drafter.new_cache()
    drafter.extend_cache(cache, known.vectors["features"][None, :20].double(), torch.arange(20)[None])
    ids, positions = block(known)
    with torch.no_grad():
        hidden = drafter(ids, positions, draft_cache=cache, embeddings=known.embeddings).last_hidden_state
    expected = known.vectors["p20.hidden"].double()
    torch.testing.assert_close(hidden[0], expected, atol=1e-12, rtol=0)


def test_groups_are_the_default_whatever_was_loaded_before():
    """transformers remembers for derived classes what it found out about DSparkDrafter."""
    tiny.random_drafter(tiny.qwen3())
    drafter = Drafter.from_pretrained(HERE / "drafter")
    assert drafter.get_experts_implementation() == {"": "grouped_mm"}


def test_adding_experts_in_loops_and_groups_is_the_same():
    plain, grouped = (reference(HERE / "drafter", HERE, 20, name) for name in ("eager", "grouped_mm"))
    states = torch.randn(7, 32, generator=torch.Generator().manual_seed(0))
    for one, other in zip(plain.drafter.layers, grouped.drafter.layers, strict=True):
        assert_close(one.mlp(states[None]), other.mlp(states[None]))


# ---------------------------------------------------------------------- the configuration


def test_fields_that_contradict_each_other_are_all_named():
    with pytest.raises(ValueError, match="cannot work") as raised:
        DeepseekV4DrafterConfig(
            target_layer_ids=[1],
            mask_token_id=5,
            qk_rope_head_dim=1024,
            o_groups=7,
            num_experts_per_tok=300,
            hc_eps=0.0,
            markov_head_type="gated",
        )
    for name in ("qk_rope_head_dim", "o_groups", "num_experts_per_tok", "hc_eps", "markov_head_type"):
        assert name in str(raised.value)


def test_it_is_for_targets_of_its_family():
    with pytest.raises(ValueError, match=r"DeepSeek-V4 family.*'qwen3'"):
        DeepseekV4DrafterConfig.for_target(tiny.target_config("Qwen3"), mask_token_id=1)


FLASH = {"target_layer_ids": [40, 41, 42], "num_target_layers": 43}
PRO = {
    "target_layer_ids": [58, 59, 60],
    "num_target_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "o_groups": 16,
    "n_routed_experts": 384,
    "moe_intermediate_size": 3072,
    "markov_rank": 512,
}


@pytest.mark.parametrize(("fields", "billions"), [(FLASH, 19.846), (PRO, 77.498)], ids=["Flash", "Pro"])
def test_the_released_sizes(fields: dict, billions: float):
    """Flash's parameters were counted in its released file; Pro's follow from its sizes."""
    with torch.device("meta"):
        drafter = DeepseekV4Drafter(DeepseekV4DrafterConfig(**({"mask_token_id": 128799} | fields)))
    assert sum(parameter.numel() for parameter in drafter.parameters()) / 1e9 == pytest.approx(billions, abs=5e-4)
    assert drafter.markov_head.markov_w2.weight.shape == (129280, drafter.config.markov_rank)
    assert drafter.confidence_head.proj.bias is None
