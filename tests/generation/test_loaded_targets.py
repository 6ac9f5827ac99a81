"""Targets as people load them: offloaded, quantized, in training mode, with adapters. Each is exact or refused by name."""

from __future__ import annotations

import functools

import pytest
import tokenizers
import torch
import transformers
from generation import rig
from torch import nn
from transformers.cache_utils import StaticLayer

import tiny
from dspark_hf import record_speculation
from dspark_hf.training.features import target_features
from dspark_hf.training.target_logits import logit_rule

GREEDY = {"do_sample": False, "max_new_tokens": 16}


def assert_exact(target, **kwargs):
    """One row and three, with all kinds of drafters, and samples that only have to run."""
    rig.compare(target, max_new_tokens=16, **kwargs)
    rig.compare(target, max_new_tokens=16, kinds=rig.EAGLE3_KINDS, **kwargs)
    for fields in ({"draft_vocab_size": 60}, {"raw_embeddings": True}):
        rig.compare(target, kinds=("rejecting",), drafter_fields=fields, **kwargs)
    assert_rows_exact(target, **kwargs)
    target.generate(
        **tiny.prompt(), do_sample=True, max_new_tokens=8, top_k=20, assistant_model=tiny.random_drafter(target)
    )


def assert_rows_exact(target, **kwargs):
    inputs = tiny.left_padded(tiny.prompt(9), tiny.prompt(5, seed=1), tiny.prompt(7, seed=2))
    plain = target.generate(**inputs, **GREEDY, **kwargs)
    masks = inputs["attention_mask"].bool().tolist()
    scripts = [row[-sum(mask) - 16 :] for row, mask in zip(plain.tolist(), masks, strict=True)]
    for kind, drafter in rig.drafters_of_rows(target, scripts).items():
        assert torch.equal(target.generate(**inputs, **GREEDY, **kwargs, assistant_model=drafter), plain), kind


# ---------------------------------------------------------------------- offloaded


def offloaded(target, where, folder):
    accelerate = pytest.importorskip("accelerate")
    device = torch.device("cpu")
    if where == "cpu":
        return accelerate.cpu_offload(target, execution_device=device)
    return accelerate.disk_offload(target, folder, execution_device=device)


@pytest.mark.parametrize(("family", "where"), [("gemma3", "cpu"), ("qwen3_5", "disk")])
def test_every_weight_is_offloaded(family, where, tmp_path):
    target = offloaded(tiny.TARGETS[family](), where, tmp_path)
    assert target.device.type == "meta"
    assert_exact(target)


def test_training_reads_an_offloaded_target(tmp_path):
    plain = tiny.gemma3()
    target = offloaded(tiny.gemma3(), "disk", tmp_path)
    assert logit_rule(target) == logit_rule(plain)
    drafter, twin = tiny.random_drafter(plain), tiny.random_drafter(plain)
    ids = tiny.prompt()["input_ids"]
    states = [target_features(model, [1, 3], ids).last_hidden_states for model in (target, plain)]
    torch.testing.assert_close(*states)
    logits = [d.bind(t).target_logits(states[0]) for d, t in ((drafter, target), (twin, plain))]
    torch.testing.assert_close(*logits)


def test_what_is_offloaded_is_not_copied(tmp_path):
    drafter = tiny.random_drafter(rig.target())
    drafter.bind(offloaded(tiny.qwen3(), "disk", tmp_path / "weights"))
    with pytest.raises(ValueError, match=r"LM head \(Linear\) is quantized or offloaded"):
        drafter.save_pretrained(tmp_path / "drafter", include_embeddings=True)


# ---------------------------------------------------------------------- quantized heads and embeddings


class Packed(nn.Module):
    """A quantized linear layer whose weight has no name that a plain layer has, and which takes one dtype alone."""

    def __init__(self, linear):
        super().__init__()
        self.in_features, self.dtype = linear.in_features, linear.weight.dtype
        self.register_buffer("scale", linear.weight.abs().amax(dim=1) / 127)
        self.register_buffer("packed", (linear.weight / self.scale[:, None]).round().to(torch.int8))

    def forward(self, states):
        assert states.dtype == self.dtype, "as kernels that take one dtype"
        return states @ (self.packed.to(self.dtype) * self.scale[:, None]).T


def test_a_packed_head_gets_the_dtype_of_the_target():
    target = tiny.qwen3(num_hidden_layers=2)
    target.lm_head = Packed(target.lm_head)
    for drafter_dtype in (torch.float32, torch.bfloat16):
        for fields in ({}, {"draft_vocab_size": 60}):
            drafter = tiny.random_drafter(rig.target(), **fields).to(drafter_dtype)
            drafted = target.generate(**tiny.prompt(), **GREEDY, assistant_model=drafter)
            assert torch.equal(drafted, target.generate(**tiny.prompt(), **GREEDY))
    with pytest.raises(ValueError, match=r"LM head \(Packed\) is quantized"):
        drafter.owning_embeddings()


def test_a_float8_weight_says_nothing_about_the_dtype_of_the_states():
    class Float8Linear(nn.Linear):
        def forward(self, states):
            assert states.dtype == torch.float32
            return states @ self.weight.to(torch.float32).T

    target = tiny.qwen3(num_hidden_layers=2)
    head = Float8Linear(tiny.HIDDEN_SIZE, tiny.VOCAB_SIZE, bias=False)
    head.weight = nn.Parameter(target.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    target.lm_head = head
    rig.compare(target)


def test_stored_rows_of_a_quantized_embedding_are_refused():
    class PackedEmbedding(nn.Embedding):
        """Holds the rows as bytes, somewhere else."""

    target = tiny.qwen3(num_hidden_layers=2)
    embedding = PackedEmbedding.from_pretrained(target.model.embed_tokens.weight.to(torch.float8_e4m3fn))
    embedding.forward = functools.partial(nn.functional.embedding, weight=target.model.embed_tokens.weight)
    target.model.embed_tokens = embedding
    message = rig.refusing(target, drafter=tiny.random_drafter(rig.target(), raw_embeddings=True))
    assert "PackedEmbedding are quantized" in message
    rig.compare(target)


# ---------------------------------------------------------------------- a token alone and beside others


class EightBit(nn.Linear):
    """Quantizes what it is given, as `scales` says for states `[B, T, D]`."""

    scales = staticmethod(lambda states: states.abs().amax(dim=-1, keepdim=True) / 127)

    def forward(self, states):
        scales = self.scales(states)
        return super().forward((states / scales).round().clamp(-127, 127) * scales)


class PerTensor(EightBit):
    scales = staticmethod(lambda states: states.abs().max() / 127)


class Static(EightBit):
    scales = staticmethod(lambda states: torch.tensor(0.05))


class Outliers(EightBit):
    """Columns with an entry above 6 are not quantized, whichever token has it."""

    def forward(self, states):
        is_outlier = (states.abs() > 6).flatten(0, -2).any(dim=0)
        rest = super().forward(states.masked_fill(is_outlier, 0))
        return rest + nn.functional.linear(states * is_outlier, self.weight)


def with_layers(cls, **fields):
    """A target with linear layers of this class in its first decoder layer."""
    target = tiny.qwen3(num_hidden_layers=2, hidden_size=128, **fields)
    for name, module in list(target.model.layers[0].named_modules()):
        if isinstance(module, nn.Linear):
            layer = cls(module.in_features, module.out_features, bias=False)
            layer.weight = module.weight
            target.model.layers[0].set_submodule(name, layer)
    return target


@pytest.mark.parametrize("cls", [EightBit, Static])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantized_activations_of_each_token(cls, dtype):
    target = with_layers(cls).to(dtype)
    drafted = target.generate(**tiny.prompt(), **GREEDY, assistant_model=tiny.random_drafter(target))
    assert drafted.shape == (1, 25)


@pytest.mark.parametrize("cls", [PerTensor, Outliers])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_quantized_together_are_refused(cls, dtype):
    target = with_layers(cls).to(dtype)
    for inputs in (tiny.prompt(), tiny.prompt(num_rows=2)):
        for drafter in (tiny.random_drafter(target), tiny.eagle3_drafter(target)):
            message = rig.refusing(target, drafter=drafter, **inputs)
            assert f"({cls.__name__}) give a token another result when other tokens are in the same pass" in message


def test_a_target_that_is_quantized_after_a_call_is_tried_again():
    target = with_layers(EightBit)
    target.generate(**tiny.prompt(), **GREEDY, assistant_model=tiny.random_drafter(target))
    target.lm_head = PerTensor(128, tiny.VOCAB_SIZE, bias=False)
    assert "(PerTensor)" in rig.refusing(target)


def test_each_quantized_layer_is_tried_once():
    calls = []
    target = with_layers(EightBit)
    layer = target.model.layers[0].mlp.down_proj
    layer.register_forward_hook(lambda module, args, output: calls.append(tuple(output.shape)))
    call = tiny.prompt() | {"do_sample": False, "max_new_tokens": 1, "assistant_model": tiny.random_drafter(target)}
    target.generate(**call)
    assert len(calls) == 4  # A first pass, a token alone, a token beside another, and the prompt.
    target.generate(**call)
    assert len(calls) == 5


def test_a_plain_target_is_not_tried(monkeypatch):
    monkeypatch.setattr("dspark_hf.generation.pass_trial.PromptedTarget", None)
    for target in (rig.target(), rig.target("gemma3")):
        target.generate(**tiny.prompt(), **GREEDY, assistant_model=tiny.random_drafter(target))


def test_a_target_that_computes_nan_is_not_called_quantized_together():
    target = with_layers(EightBit)
    layer = target.model.layers[0].mlp.down_proj
    layer.weight = nn.Parameter(torch.full_like(layer.weight, torch.nan))
    plain = target.generate(**tiny.prompt(), **GREEDY)
    assert torch.equal(target.generate(**tiny.prompt(), **GREEDY, assistant_model=tiny.random_drafter(target)), plain)


# ---------------------------------------------------------------------- training mode


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_training_mode_with_dropout_is_refused(family):
    target = tiny.TARGETS[family](attention_dropout=0.1).train()
    assert "is in training mode, in which its passes differ" in rig.refusing(target)
    rig.compare(target.eval())


# transformers 5.24 calls it activation checkpointing.
with_checkpoints = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")


@with_checkpoints
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_training_mode_with_checkpoints_and_no_dropout(family):
    """Older versions of transformers leave the cache out, so that plain `generate` forgets the prompt."""
    target = tiny.TARGETS[family]()
    plain = target.generate(**tiny.prompt(), **GREEDY)
    target.train()
    target.gradient_checkpointing_enable()
    if torch.equal(target.generate(**tiny.prompt(), **GREEDY), plain):
        rig.compare(target)
    else:
        assert "gradient checkpointing leaves out the cache" in rig.refusing(target)
    rig.compare(target.eval())


@with_checkpoints
@pytest.mark.parametrize("make", [tiny.random_drafter, tiny.eagle3_drafter], ids=["DSpark", "EAGLE-3"])
def test_a_drafter_in_training_mode_with_checkpoints(make):
    drafter = make(rig.target()).train()
    drafter.gradient_checkpointing_enable()
    plain = rig.target().generate(**tiny.prompt(), **GREEDY)
    assert torch.equal(rig.target().generate(**tiny.prompt(), **GREEDY, assistant_model=drafter), plain)
    assert drafter.training


# ---------------------------------------------------------------------- compiled

compiled = {
    "torch.compile(model)": lambda target: torch.compile(target, backend="eager"),
    "its forward": lambda target: setattr(target, "forward", torch.compile(target.forward, backend="eager")) or target,
    "model.compile()": lambda target: target.compile(backend="eager") or target,
    "its layers": lambda target: [layer.compile(backend="eager") for layer in target.model.layers] and target,
}


@pytest.mark.slow
@pytest.mark.parametrize("how", compiled)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_compiled_targets(family, how):
    torch._dynamo.reset()
    target = compiled[how](tiny.TARGETS[family]())
    try:
        rig.compare(target)
        rig.compare(target, kinds=rig.EAGLE3_KINDS)
        assert_rows_exact(target)
    finally:
        torch._dynamo.reset()


# ---------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_part_runs_when_target_and_drafter_differ_in_dtype(family, dtype):
    """Processors, heads, confidence, reduced vocabularies, sampling, one row and two."""
    target = tiny.TARGETS[family]().to(dtype)
    rows = tiny.left_padded(tiny.prompt(9), tiny.prompt(5, seed=1))
    returned = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    sampling = {"do_sample": True, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "repetition_penalty": 1.2}
    for drafter_dtype in (torch.float32, torch.bfloat16, torch.float16):
        for head in ("vanilla", "gated", "rnn"):
            drafter = tiny.random_drafter(target, markov_head_type=head, draft_vocab_size=60).to(drafter_dtype)
            call = {"max_new_tokens": 6, "assistant_model": drafter, "assistant_confidence_threshold": 0.3}
            out = target.generate(**tiny.prompt(), **call, **sampling, **returned)
            assert out.sequences.shape == (1, 15) and {score.dtype for score in out.scores} == {torch.float32}
            assert target.generate(**rows, **call, do_sample=False).shape == (2, 15)
        drafter = tiny.eagle3_drafter(target).to(drafter_dtype)
        assert target.generate(**tiny.prompt(), max_new_tokens=6, assistant_model=drafter).shape == (1, 15)


# ---------------------------------------------------------------------- through a pipeline


def test_a_pipeline_with_a_drafter():
    target = rig.target()
    vocabulary = {f"w{i}": i for i in range(tiny.VOCAB_SIZE)}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w1"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0")
    text, settings = (
        " ".join(f"w{i}" for i in tiny.prompt()["input_ids"][0].tolist()),
        {"return_tensors": True} | GREEDY,
    )
    parts = {"model": target, "tokenizer": tokenizer}
    plain = transformers.pipeline("text-generation", **parts)(text, **settings)
    for kind in rig.KINDS:
        drafter = rig.drafter_of(kind, target, plain[0]["generated_token_ids"])
        with record_speculation() as in_call:
            assert transformers.pipeline("text-generation", **parts)(text, **settings, assistant_model=drafter) == plain
        with record_speculation() as in_pipeline:
            piped = transformers.pipeline("text-generation", **parts, assistant_model=drafter)
            assert piped(text, **settings) == plain
        assert in_call.rounds and in_pipeline.rounds


# ---------------------------------------------------------------------- caches by name


@pytest.mark.skipif(not hasattr(StaticLayer, "crop"), reason="static caches of this transformers cannot be rolled back")
@pytest.mark.parametrize("name", ["static", "sliding_window", "hybrid", "dynamic"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "qwen3_5"])
def test_caches_by_name(family, name):
    target = rig.target(family)
    rig.compare(target, max_new_tokens=16, cache_implementation=name)
    rig.compare(target, kinds=("patterned",), cache_implementation=name, prefill_chunk_size=4)
    assert_rows_exact(target, cache_implementation=name)
