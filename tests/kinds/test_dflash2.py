"""DFlash2 drafters: convolutions and selector against the formulas, drafting, training, and their files."""

import pytest
import spellings
import torch
from replicas import dflash2 as zlab
from replicas import dflash2_speculators as speculators
from training.runs import trained

import tiny
from dspark_hf import DFlash2Config, DFlash2Drafter, Drafter
from dspark_hf.checkpoints import inspect_checkpoint
from dspark_hf.generation.dflash2_candidate_generator import CandidateSelectorLogitsProcessor

pytestmark = pytest.mark.integration

SIZES = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}


def drafter_for(target, **fields):
    own = SIZES | {"num_hidden_layers": 2, "mask_token_id": tiny.MASK_ID, "initializer_range": 0.4, "block_size": 5}
    config = DFlash2Config.for_target(target.config, **(own | fields))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        drafter = DFlash2Drafter(config)
        with torch.no_grad():
            for name, parameter in drafter.named_parameters():
                if name.endswith("base_kernel"):
                    parameter.normal_(std=0.5)
    return drafter.eval()


@pytest.fixture(scope="module")
def target():
    return tiny.qwen3()


@pytest.fixture
def drafter(target):
    return drafter_for(target)


def write(folder, config, drafter):
    return spellings.write(folder, config, dict(drafter.state_dict()))


# ------------------------------------------------------------------ the formulas


def convolved(states, base, kernels, group):
    """`y[t, c] = sum_k (base[k, c] + kernel[t, k, c // group]) x[t - k, c]` within one block, number by number."""
    length, size = states.shape
    result = torch.zeros_like(states)
    for t in range(length):
        for c in range(size):
            for k in range(base.shape[0]):
                if t - k >= 0:
                    result[t, c] += (base[k, c] + kernels[t, k, c // group]) * states[t - k, c]
    return result


@torch.no_grad()
def test_convolutions_stay_within_their_block(drafter):
    conv, group = drafter.layers[0].attention_conv, SIZES["conv_group_size"]
    states = torch.randn(2, 10, 32)  # two rows of two blocks
    mixed, kernels = conv.before(states)
    finished = conv.after(mixed, kernels)
    coefficients = (states @ conv.kernel_projection.weight.T).view(2, 10, 2, 2, 32 // group)
    for row in range(2):
        for start in (0, 5):
            block = slice(start, start + 5)
            wanted = convolved(states[row, block], conv.base_kernel[0], coefficients[row, block, 0], group)
            assert torch.allclose(mixed[row, block], wanted, atol=1e-4)
            wanted = convolved(mixed[row, block], conv.base_kernel[1], coefficients[row, block, 1], group)
            assert torch.allclose(finished[row, block], wanted, atol=1e-4)


@torch.no_grad()
def test_a_layer_is_a_dspark_layer_between_identity_convolutions(target):
    """With kernels that let each slot pass, the drafter is a DFlash drafter."""
    drafter = drafter_for(target)
    plain = tiny.random_drafter(
        target, markov_rank=0, enable_confidence_head=False, sample_from_anchor=False, block_size=5
    )
    plain.load_state_dict(drafter.state_dict(), strict=False)
    for layer in drafter.layers:
        for conv in (layer.attention_conv, layer.mlp_conv):
            conv.kernel_projection.weight.zero_()
            conv.base_kernel.zero_()
            conv.base_kernel[:, 0] = 1.0
    ids = torch.randint(1, 100, (1, 5))
    positions, features = (
        torch.arange(6, 11)[None],
        torch.randn(1, 6, 4 * 0 + len(drafter.config.target_layer_ids) * 32),
    )
    states = [d(ids, positions, features, embeddings=d.bind(target)).last_hidden_state for d in (drafter, plain)]
    assert torch.allclose(*states, atol=1e-4)


@torch.no_grad()
def test_the_selector_scores_its_candidates(drafter):
    selector, hidden, logits = drafter.candidate_selector, torch.randn(2, 3, 32), torch.randn(2, 128)
    processor = CandidateSelectorLogitsProcessor(selector)
    processor.begin_block(hidden)
    processor(torch.tensor([[3], [4]]), logits)
    scores = processor(torch.tensor([[9, 7], [9, 8]]), logits)  # the second slot, after tokens 7 and 8
    for row, previous in enumerate((7, 8)):
        kept = logits[row].topk(SIZES["selector_top_k"]).indices
        assert set(scores[row].isfinite().nonzero().flatten().tolist()) == set(kept.tolist())
        for token in kept.tolist():
            edge = selector.predecessor_codebook[previous] * (selector.hidden_projection.weight @ hidden[row, 1])
            wanted = logits[row, token] + edge @ selector.successor_codebook[token]
            assert torch.allclose(scores[row, token], wanted, atol=1e-4)


# ------------------------------------------------------------------ drafting and training


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("window", [None, 8], ids=["full attention", "windows"])
def test_greedy_output_is_the_targets(target, rows, window):
    fields = (
        {} if window is None else {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8, "is_causal": False}
    )
    drafter = drafter_for(target, **fields)
    inputs, settings = tiny.prompt(num_rows=rows), {"max_new_tokens": 20, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=drafter), plain)


def test_sampling_works_and_draws_candidates_alone(target, drafter):
    torch.manual_seed(0)
    output = target.generate(**tiny.prompt(), max_new_tokens=12, do_sample=True, assistant_model=drafter)
    assert output.shape[1] == 9 + 12


def test_it_drafts_what_its_formulas_say(target, drafter):
    """The drafts of a block, by the drafter's pass and the selector's path written out."""
    from dspark_hf.generation.generators import generator_of

    generator = generator_of(drafter)(drafter, target)
    ids, indices = tiny.prompt()["input_ids"], drafter.config.hidden_state_indices
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
        features = torch.cat([states[i] for i in indices], dim=-1)
        generator.context.add_prompt(features[:, :-1], None)
        drafted = generator.draft([ids], [4]).ids[0].tolist()
        block = torch.tensor([[ids[0, -1], *[tiny.MASK_ID] * 4]])
        positions = torch.arange(8, 13)[None]
        hidden = drafter(block, positions, features[:, :-1], embeddings=drafter.bind(target)).last_hidden_state[0, 1:]
        logits, previous, path = drafter.base_logits(hidden, drafter.bind(target)), int(ids[0, -1]), []
        selector = drafter.candidate_selector
        for slot in range(4):
            kept = logits[slot].topk(SIZES["selector_top_k"])
            edge = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden[slot])
            previous = int(kept.indices[(kept.values + selector.successor_codebook[kept.indices] @ edge).argmax()])
            path.append(previous)
    assert drafted == path


def test_it_trains_and_is_saved(target, tmp_path):
    drafter = drafter_for(target)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    again = trained(target, drafter, tmp_path)
    assert type(again) is DFlash2Drafter
    moved = [name for name, tensor in again.state_dict().items() if not torch.equal(before[name], tensor)]
    assert len(moved) == len(before)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize("spell", [zlab, speculators])
def test_public_files_give_the_drafter(target, spell, tmp_path):
    made = drafter_for(target, layer_types=["sliding_attention"] * 2, sliding_window=8, is_causal=False)
    folder = write(tmp_path, spell(made), made)
    loaded = Drafter.from_pretrained(folder).eval()
    assert type(loaded) is DFlash2Drafter
    for name, tensor in made.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert loaded.config.is_causal is False and loaded.config.sliding_window == 8
    assert loaded.config.num_draft_tokens == 4
    inputs, settings = tiny.prompt(), {"max_new_tokens": 8, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    assert torch.equal(target.generate(**inputs, **settings, assistant_model=loaded), plain)
    found = inspect_checkpoint(folder)
    assert found.format == "DFlash2" and "selector of rank 6 among the 4 most likely" in str(found)


def test_muse_scales_and_caps_its_logits(target, tmp_path):
    made = drafter_for(target)
    extra = {"output_multiplier": 0.196, "final_logit_softcapping": 20.0, "input_embedding_scale": 2.0}
    loaded = Drafter.from_pretrained(write(tmp_path, zlab(made, **extra), made))
    shown = loaded.config
    assert (shown.logit_scale, shown.final_logit_softcapping, shown.embedding_scale) == (0.196, 20.0, 2.0)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"selector_rank": None}, "lacks selector_rank"),
        ({"conv_group_size": 7}, "conv_group_size=7 does not divide hidden_size=32"),
        ({"selector_top_k": 1000}, "selector_top_k=1000 is more than the vocabulary of 128"),
        ({"conv_kernel_size": 3}, "wrong shape: layers.0.attention_conv.base_kernel"),
        ({"selector_rank": 5}, "wrong shape: candidate_selector.predecessor_codebook"),
        ({"selector_rank": "6"}, "Not sizes a drafter can have: selector_rank='6'"),
        ({"conv_kernel_size": 0}, "Not sizes a drafter can have: conv_kernel_size=0"),
        ({"target_layer_ids": [1, 9]}, "taps layer 9, but the target has 4 layers"),
    ],
)
def test_malformed_files_are_refused(target, drafter, changed, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Drafter.from_pretrained(write(tmp_path, zlab(drafter, **changed), drafter))


def test_what_a_dflash2_drafter_does_not_have(target):
    with pytest.raises(ValueError, match="no sequential head and no confidence head"):
        drafter_for(target, markov_rank=4)
    with pytest.raises(ValueError, match="has the full vocabulary"):
        drafter_for(target, draft_vocab_size=40)
