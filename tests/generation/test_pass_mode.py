"""Passes run in inference mode, and nothing that reaches the caller does: it can all take part in training later."""

import contextlib
import copy

import pytest
import torch
from generation import rig
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import tiny
from dspark_hf.generation import pass_mode
from dspark_hf.transformers_names import CACHE_KEY

SHOWN = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
}
GREEDY = {"do_sample": False, "max_new_tokens": rig.NEW_TOKENS}


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "layers"):
        for layer in value.layers:
            yield from tensors_in(list(vars(layer).values()))


@pytest.fixture
def passes(monkeypatch):
    """Whether each pass of a target's layers was in inference mode."""
    seen = []

    def watched(target):
        attention = target.model.layers[0].self_attn
        forward = attention.forward

        def spy(*args, **kwargs):
            seen.append(torch.is_inference_mode_enabled())
            return forward(*args, **kwargs)

        monkeypatch.setattr(attention, "forward", spy)
        return target

    watched.seen = seen
    return watched


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("shown", [{}, {"return_dict_in_generate": True, "output_scores": True}, SHOWN], ids=str)
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
@pytest.mark.parametrize("make_drafter", [tiny.random_drafter, tiny.eagle3_drafter])
def test_what_generate_returns_is_ordinary(make_drafter, family, shown, num_rows, passes):
    target = passes(tiny.TARGETS[family]())
    inputs = tiny.prompt(9)["input_ids"].repeat(num_rows, 1)
    cache = DynamicCache(config=target.config)
    output = target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        assistant_model=make_drafter(target),
        **{CACHE_KEY: cache},
        **GREEDY,
        **shown,
    )
    found = [*tensors_in(output), *tensors_in(cache)]
    assert len(found) > len(cache.layers)
    assert not any(tensor.is_inference() for tensor in found)
    assert not any(buffer.is_inference() for buffer in target.buffers())
    assert any(passes.seen) != ("output_hidden_states" in shown)


def test_training_continues_from_the_cache_and_the_scores():
    target = tiny.qwen3().requires_grad_(True)
    drafter, cache = tiny.random_drafter(target), DynamicCache(config=target.config)
    inputs = tiny.prompt(9)["input_ids"]
    settings = {"return_dict_in_generate": True, "output_scores": True, CACHE_KEY: cache} | GREEDY
    output = target.generate(inputs, attention_mask=torch.ones_like(inputs), assistant_model=drafter, **settings)
    (torch.stack(output.scores).requires_grad_() * 2).sum().backward()
    last = output.sequences[:, -1:]
    logits = target(last, **{CACHE_KEY: cache}).logits
    whole = target(output.sequences).logits[:, -1:]
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)
    torch.nn.functional.cross_entropy(logits[:, -1], last[:, -1]).backward()
    assert target.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


def test_drafter_and_target_train_after_a_call_and_draft_again():
    target = tiny.qwen3().requires_grad_(True)
    drafter = tiny.random_drafter(target).requires_grad_(True)
    inputs = tiny.prompt(9)
    settings = {"assistant_model": drafter} | GREEDY
    before = target.generate(**inputs, **settings)
    optimizer = torch.optim.SGD([*target.parameters(), *drafter.parameters()], lr=1e-3)
    states = target(before, output_hidden_states=True)
    features = torch.cat([states.hidden_states[i] for i in drafter.config.hidden_state_indices], dim=-1)
    block = torch.full((1, drafter.config.block_size), drafter.config.mask_token_id)
    positions = torch.arange(before.shape[1], before.shape[1] + drafter.config.block_size)[None]
    drafted = drafter(block, positions, context_features=features).last_hidden_state
    (drafted.sum() + states.logits.logsumexp(-1).sum()).backward()
    optimizer.step()
    after = target.generate(**inputs, **settings)
    assert torch.equal(after, target.generate(**inputs, **GREEDY))


def test_an_embedding_that_requires_grad():
    target = tiny.qwen3()
    embeds = target.get_input_embeddings()(tiny.prompt(9)["input_ids"]).detach().requires_grad_()
    plain = target.generate(inputs_embeds=embeds, **GREEDY)
    drafted = target.generate(inputs_embeds=embeds, assistant_model=tiny.random_drafter(target), **GREEDY)
    assert torch.equal(plain, drafted)


class Watching(LogitsProcessor, StoppingCriteria, BaseStreamer):
    """Whatever the caller's own code is shown can take part in training."""

    def __init__(self):
        self.num_seen = 0

    def put(self, value):
        self(value, None)

    def end(self):
        pass

    def __call__(self, input_ids, scores):
        self.num_seen += 1
        assert not torch.is_inference_mode_enabled()
        assert not any(tensor.is_inference() for tensor in tensors_in([input_ids, scores]))
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, watching):
        self.watching = watching

    def __call__(self, input_ids, scores, **kwargs):
        self.watching(input_ids, scores)
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize("num_rows", [1, 2])
@pytest.mark.parametrize("do_sample", [False, True])
def test_the_callers_code_sees_ordinary_tensors(do_sample, num_rows):
    target = tiny.qwen3()
    inputs, watching = tiny.prompt(9)["input_ids"].repeat(num_rows, 1), Watching()
    target.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        assistant_model=tiny.random_drafter(target),
        do_sample=do_sample,
        max_new_tokens=6,
        logits_processor=LogitsProcessorList([watching]),
        stopping_criteria=StoppingCriteriaList([Criterion(watching)]),
        streamer=watching,
    )
    assert watching.num_seen > 6


@pytest.mark.parametrize("where", ["everywhere", "in the target", "in the drafter"])
def test_hooks_see_ordinary_tensors(where):
    target = tiny.qwen3()
    drafter, seen = tiny.random_drafter(target), []

    def hook(module, args, output):
        seen.extend(tensor.is_inference() for tensor in tensors_in(output))

    register = {
        "everywhere": torch.nn.modules.module.register_module_forward_hook,
        "in the target": target.model.layers[0].register_forward_hook,
        "in the drafter": drafter.norm.register_forward_hook,
    }[where]
    handle = register(hook)
    try:
        target.generate(**tiny.prompt(9), assistant_model=drafter, **GREEDY)
    finally:
        handle.remove()
    assert seen
    assert not any(seen)
    assert pass_mode.pass_mode(target) is torch.inference_mode


def test_compiled_and_quantized_models_run_as_before():
    target = tiny.qwen3()
    compiled = copy.deepcopy(target)
    compiled.compile()
    assert pass_mode.pass_mode(target) is torch.inference_mode
    assert pass_mode.pass_mode(compiled) is contextlib.nullcontext

    class Quantized(torch.nn.Parameter):
        pass

    target.lm_head.weight = Quantized(target.lm_head.weight.data, requires_grad=False)
    assert pass_mode.pass_mode(target) is contextlib.nullcontext
