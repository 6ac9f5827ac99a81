"""Compiled drafters: one whole graph, whatever is accepted, and what capturing it on a GPU needs."""

import pytest
import torch
from generation import rig
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.cache_utils import StaticLayer

import tiny
from dspark_hf.generation.candidate_generator import DrafterCandidateGenerator
from dspark_hf.generation.dspark_candidate_generator import DSparkCandidateGenerator

SETTINGS = {"do_sample": False, "drafting_backoff": False}
DRAFTER = {"num_hidden_layers": 1, "block_size": rig.BLOCK_SIZE, "markov_rank": 8, "enable_confidence_head": True}


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_drafter_is_one_graph(fresh_dynamo):
    """For contexts, acceptance and draft lengths of any kind, and when the buffers of its cache grow."""
    target = tiny.bigram(num_hidden_layers=2)
    for drafter in (tiny.random_drafter(target, **DRAFTER), tiny.perfect_drafter(target)):
        graphs = CompileCounterWithBackend("eager")
        drafter.compile(backend=graphs, dynamic=True, fullgraph=True)
        counts = []
        for prompt, num_new in ((9, 24), (9, 24), (230, 120)):
            settings = tiny.prompt(prompt) | {"max_new_tokens": num_new}
            drafted = target.generate(**settings, **SETTINGS, assistant_model=drafter)
            assert torch.equal(drafted, target.generate(**settings, do_sample=False))
            counts.append(graphs.frame_count)
        assert counts == [1, 1, 1]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_draft_stage_is_one_graph(kind, fresh_dynamo, monkeypatch):
    """Backbone, LM head, sequential stage and confidence read nothing from the device and depend on no value."""
    monkeypatch.setattr(DrafterCandidateGenerator, "ends_early", False)
    target = tiny.bigram(num_hidden_layers=2)
    drafter = tiny.random_drafter(target, **DRAFTER, markov_head_type=kind)
    generator = DSparkCandidateGenerator(drafter, target, do_sample=False, want_confidence=True)
    states = torch.randn(1, 8, tiny.HIDDEN_SIZE * len(drafter.config.target_layer_ids))
    generator.context.add(states, [8])
    generator.context.project()
    ids, most = [torch.full((1, 9), 3)], [rig.BLOCK_SIZE]

    def draft_stage():
        hidden_states, base_logits = generator.backbone_pass(ids, rig.BLOCK_SIZE)
        draft = generator.sequential_stage(ids, hidden_states, base_logits, most)
        return draft.ids, draft.confidence

    with torch.no_grad():
        expected = draft_stage()
        graphs = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(draft_stage, backend=graphs, fullgraph=True)
        for actual, wanted in zip(compiled(), expected, strict=True):
            torch.testing.assert_close(actual, wanted)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("cache", [None, "static"])
def test_the_buffers_of_a_draft_stay_where_they_are(cache):
    """A graph captured on a GPU needs that: the drafter's cache moves only when it grows, between two rounds."""
    if cache == "static" and not StaticLayer.is_croppable:
        pytest.skip("this transformers cannot crop static caches")
    target = tiny.bigram(num_hidden_layers=1)
    drafter = tiny.random_drafter(target, **DRAFTER)
    addresses, forward = [], drafter.forward

    def watched(*args, draft_cache, **kwargs):
        before = draft_cache._buffer.data_ptr()
        output = forward(*args, draft_cache=draft_cache, **kwargs)
        addresses.append((before, draft_cache._buffer.data_ptr()))
        return output

    drafter.forward = watched
    target.generate(**tiny.prompt(), **SETTINGS, max_new_tokens=60, cache_implementation=cache, assistant_model=drafter)
    assert len(addresses) > 10
    assert len(set(addresses)) == 1
    assert addresses[0][0] == addresses[0][1]


@pytest.mark.gpu
def test_a_cuda_graph_of_the_backbone():
    target = tiny.bigram(num_hidden_layers=2).cuda()
    drafter = tiny.random_drafter(target, **DRAFTER).cuda()
    embeddings = drafter.bind(target)
    cache = drafter.new_cache()
    features = torch.randn(1, 8, tiny.HIDDEN_SIZE * len(drafter.config.target_layer_ids), device="cuda")
    positions = torch.arange(8, 8 + rig.BLOCK_SIZE, device="cuda")[None]
    block_ids = torch.full((1, rig.BLOCK_SIZE), drafter.config.mask_token_id, device="cuda")

    def backbone():
        return drafter(block_ids, positions, draft_cache=cache, embeddings=embeddings).last_hidden_state

    with torch.no_grad():
        drafter.extend_cache(cache, features, torch.arange(8, device="cuda")[None])
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # Warm-up, as capturing needs it.
            backbone()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = backbone()
        for token in (3, 4):
            block_ids[:, 0] = token
            graph.replay()
            torch.testing.assert_close(captured, backbone())
