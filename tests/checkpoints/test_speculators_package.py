"""The speculators package itself: it loads what is written here and what it writes loads here, with the same numbers."""

from pathlib import Path

import pytest
import torch

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import export

pytestmark = pytest.mark.slow
speculators = pytest.importorskip("speculators")

LENGTH, ANCHOR = 24, 13

KINDS = {
    "vanilla head": {},
    "gated head": {"markov_head_type": "gated"},
    "rnn head": {"markov_head_type": "rnn"},
    "fill-in": {"sample_from_anchor": False},
    "fill-in DFlash": {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
    "no Markov embedding in the confidence head": {"confidence_head_with_markov": False},
    "reduced vocabulary": {"draft_vocab_size": 20},
    "sliding and causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64},
    "sliding both ways": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "is_causal": False},
    "mixed layers": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64},
    "embedding tapped": {"target_layer_ids": [-1, 0, 2]},
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny.qwen3().save_pretrained(folder)
    return folder


@pytest.fixture
def target(target_folder: Path):
    target = tiny.qwen3()
    target.config.name_or_path = str(target_folder)
    return target


def inputs(config) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and context features of one sequence."""
    generator = torch.Generator().manual_seed(1)
    width = len(config.target_layer_ids) * config.target_hidden_size
    tokens = torch.randint(1, tiny.VOCAB_SIZE - 1, (1, LENGTH), generator=generator)
    return tokens, torch.randn(1, LENGTH, width, generator=generator)


@torch.no_grad()
def ours(drafter: DSparkDrafter, target) -> dict[str, torch.Tensor]:
    """The block at ANCHOR, each slot given the true token before it."""
    config = drafter.config
    tokens, features = inputs(config)
    block_ids = torch.full((1, config.block_size), config.mask_token_id)
    block_ids[0, 0] = tokens[0, ANCHOR]
    embeddings = drafter.bind(target)
    from dspark_hf.draft_cache import DraftCache

    cache = DraftCache(len(drafter.layers))
    drafter.extend_cache(cache, features[:, :ANCHOR], torch.arange(ANCHOR)[None])
    positions = ANCHOR + torch.arange(config.block_size)[None]
    hidden = drafter(block_ids, positions, draft_cache=cache, embeddings=embeddings).last_hidden_state
    previous = tokens[:, ANCHOR : ANCHOR + config.block_size]
    if not config.sample_from_anchor:
        previous = torch.cat([previous[:, :1], previous[:, :-1]], dim=1)
    logits = drafter.base_logits(hidden, embeddings)
    found = {"hidden": hidden}
    if drafter.markov_head is not None:
        logits = logits + drafter.markov_head(previous, hidden)
    if drafter.confidence_head is not None:
        found["confidence"] = drafter.confidence_head(hidden, drafter.markov_head.markov_w1(previous))
    return found | {"logits": logits}


@torch.no_grad()
def theirs(model) -> dict[str, torch.Tensor]:
    """The same through the package's own forward pass."""
    config = model.config
    size, layers = config.block_size, config.transformer_layer_config
    # Their taps by our count, only for the width of the features.
    width = type(
        "Width", (), {"target_layer_ids": config.aux_hidden_state_layer_ids, "target_hidden_size": layers.hidden_size}
    )
    tokens, features = inputs(width)
    loss_mask = torch.zeros(1, LENGTH)
    loss_mask[0, ANCHOR] = 1
    hidden, logits, *_ = model._backbone_forward(
        features,
        tokens,
        loss_mask,
        torch.zeros(1, LENGTH, layers.hidden_size),
        torch.zeros(1, LENGTH, dtype=torch.long),
        max_anchors=1,
    )
    found = {"hidden": hidden}
    if getattr(model, "markov_head", None) is not None:
        previous = tokens[:, ANCHOR : ANCHOR + size]
        if not config.sample_from_anchor:
            previous = torch.cat([previous[:, :1], previous[:, :-1]], dim=1)
        logits = logits + model.markov_head.block_bias(prev_token_ids=previous, hidden_states=hidden)
        if model.confidence_head is not None:
            read = [hidden]
            if config.confidence_head_with_markov:
                read.append(model.markov_head.prev_embeddings(previous))
            found["confidence"] = model.confidence_head(torch.cat(read, dim=-1))
    return found | {"logits": logits}


def load_theirs(folder: Path):
    config = speculators.SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return speculators.SpeculatorModel.from_pretrained(folder, config=config).eval()


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor, atol=2e-5, rtol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def drafter_of(target, fields) -> DSparkDrafter:
    drafter = tiny.random_drafter(target, **fields)
    if drafter.draft_token_ids is not None:
        drafter.draft_token_ids.copy_(torch.arange(20) * 5 + torch.arange(20) % 2)
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_the_package_loads_what_is_written_here(target, fields, tmp_path: Path):
    drafter = drafter_of(target, fields)
    if drafter.config.markov_head_type == "rnn" and not drafter.config.sample_from_anchor:
        pytest.skip("not written")
    export(drafter, tmp_path / "out", "speculators")
    assert_same(ours(drafter, target), theirs(load_theirs(tmp_path / "out")))


@pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS)
def test_what_the_package_writes_loads_here(target, fields, tmp_path: Path):
    drafter = drafter_of(target, fields)
    export(drafter, tmp_path / "ours", "speculators")
    model = load_theirs(tmp_path / "ours")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(parameter.numel()))
    model.save_pretrained(tmp_path / "theirs")
    loaded = DSparkDrafter.from_pretrained(tmp_path / "theirs").eval()
    assert loaded.config.target_layer_ids == drafter.config.target_layer_ids
    assert_same(theirs(model), ours(loaded, target))
