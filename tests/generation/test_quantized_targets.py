"""Targets as quantization packages load them. `make quantized` runs this with all of them installed; others are skipped."""

from __future__ import annotations

import pytest
import torch
import transformers
from generation import rig
from transformers import AutoModelForCausalLM

import tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

NEW_TOKENS = 16
_FIELDS = {
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "initializer_range": 0.15,
}

# How far the two best logits may be apart where 8-bit activations let greedy output diverge, in standard deviations.
_CLOSE = 0.1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    tiny.qwen3(**_FIELDS).save_pretrained(path)
    return path


@pytest.fixture
def load(folder):
    def from_pretrained(config=None, dtype=torch.float32, **kwargs):
        kwargs = kwargs if config is None else kwargs | {"quantization_config": config}
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **kwargs).eval()

    return from_pretrained


def torchao(name, granularity=None, **fields):
    package = pytest.importorskip("torchao.quantization")
    if granularity is not None:
        fields["granularity"] = getattr(package, granularity)(*([32] if granularity == "PerGroup" else []))
    return transformers.TorchAoConfig(getattr(package, name)(**fields))


def torchao_everywhere():
    package = pytest.importorskip("torchao.quantization")
    config = package.Int8WeightOnlyConfig()
    return transformers.TorchAoConfig(config, modules_to_not_convert=[], include_input_output_embeddings=True)


def quanto(weights):
    pytest.importorskip("optimum.quanto")
    return transformers.QuantoConfig(weights=weights)


def bitsandbytes(**fields):
    pytest.importorskip("bitsandbytes")
    return transformers.BitsAndBytesConfig(**fields)


WEIGHTS_ONLY = {
    "torchao int8": lambda: torchao("Int8WeightOnlyConfig"),
    "torchao int8, embedding and head too": torchao_everywhere,
    "torchao int4": lambda: torchao("IntxWeightOnlyConfig", "PerGroup", weight_dtype=torch.int4),
    "torchao float8": lambda: torchao("Float8WeightOnlyConfig"),
    "quanto int8": lambda: quanto("int8"),
    "quanto float8": lambda: quanto("float8"),
    "bitsandbytes NF4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "bitsandbytes FP4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
}
EACH_TOKEN = {
    "torchao int8": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "bitsandbytes LLM.int8 without outliers": lambda: bitsandbytes(load_in_8bit=True, llm_int8_threshold=0.0),
}
ALL_TOKENS = {
    "torchao int8 per tensor": lambda: torchao("Int8DynamicActivationInt8WeightConfig", "PerTensor"),
    "bitsandbytes LLM.int8": lambda: bitsandbytes(load_in_8bit=True),
}


def on_cpu(config):
    """bitsandbytes has to be told."""
    return {"device_map": "cpu"} if isinstance(config, transformers.BitsAndBytesConfig) else {}


@pytest.mark.parametrize("how", WEIGHTS_ONLY)
def test_quantized_weights(how, load):
    config = WEIGHTS_ONLY[how]()
    assert_exact(load(config, **on_cpu(config)))
    target = load(config, torch.bfloat16, **on_cpu(config))
    for kind in rig.KINDS:
        assert num_new(target, kind) == NEW_TOKENS


@pytest.mark.parametrize("how", EACH_TOKEN)
def test_activations_quantized_per_token(how, load):
    config = EACH_TOKEN[how]()
    for dtype in (torch.float32, torch.bfloat16):
        assert_diverges_only_where_tokens_are_close(load(config, dtype, **on_cpu(config)))


@pytest.mark.parametrize("how", ALL_TOKENS)
def test_activations_quantized_together(how, load):
    config = ALL_TOKENS[how]()
    for dtype in (torch.float32, torch.bfloat16):
        assert "quantize the activations of all tokens together" in rig.refusing(load(config, dtype, **on_cpu(config)))


def test_torch_dynamic_quantization(load):
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("this torch cannot quantize dynamically")
    target = torch.ao.quantization.quantize_dynamic(load(), {torch.nn.Linear}, dtype=torch.qint8)
    assert "quantize the activations of all tokens together" in rig.refusing(target)


def test_quanto_with_calibrated_activations(load):
    package = pytest.importorskip("optimum.quanto")
    target = load()
    package.quantize(target, weights=package.qint8, activations=package.qint8)
    with package.Calibration():
        target(**tiny.prompt())
    package.freeze(target)
    assert_diverges_only_where_tokens_are_close(target)


def test_hqq(load):
    pytest.importorskip("hqq")
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
    from hqq.models.hf.base import AutoHQQHFModel

    settings = BaseQuantizeConfig(nbits=4, group_size=32)
    target = load()
    AutoHQQHFModel.quantize_model(target, quant_config=settings, compute_dtype=torch.float32, device="cpu")
    target.lm_head = HQQLinear(target.lm_head, settings, compute_dtype=torch.float32, device="cpu")
    assert_exact(target)
    drafter = tiny.random_drafter(target).to(torch.bfloat16)
    assert target.generate(**tiny.prompt(), max_new_tokens=4, assistant_model=drafter).shape == (1, 13)


@pytest.mark.parametrize(("scheme", "is_exact"), [("W8A16", True), ("W8A8", False), ("FP8_DYNAMIC", False)])
def test_compressed_tensors(scheme, is_exact, load, tmp_path):
    """Its layers have no weight before the first pass."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    model = load()
    apply_quantization_config(model, QuantizationConfig(config_groups={scheme: ["Linear"]}, ignore=["lm_head"]))
    for layer in model.modules():
        if (quantization := getattr(layer, "quantization_scheme", None)) is not None:
            scale, _ = calculate_qparams(*layer.weight.aminmax(dim=-1, keepdim=True), quantization.weights)
            layer.weight_scale.data.copy_(scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if is_exact:
        assert_exact(target)
    else:
        assert_diverges_only_where_tokens_are_close(target)


def test_a_quantized_cache_is_refused(load):
    pytest.importorskip("optimum.quanto")
    settings = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", "q_group_size": 16}}
    target = load()
    assert target.generate(**tiny.prompt(), max_new_tokens=4, **settings).shape == (1, 13)
    assert "QuantoQuantizedLayer: quantized keys and values" in rig.refusing(target, **settings)


def assert_exact(target):
    for fields in ({}, {"draft_vocab_size": 60}):
        kinds = ("rejecting", "rejecting EAGLE-3") if fields else (*rig.KINDS, *rig.EAGLE3_KINDS)
        rig.compare(target, max_new_tokens=NEW_TOKENS, kinds=kinds, drafter_fields=fields)
    rows = tiny.left_padded(tiny.prompt(9), tiny.prompt(5, seed=1))
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    drafted = target.generate(**rows, **settings, assistant_model=tiny.random_drafter(target))
    assert torch.equal(drafted, target.generate(**rows, **settings))


def num_new(target, kind):
    script = target.generate(**tiny.prompt(), max_new_tokens=NEW_TOKENS, do_sample=False)[0].tolist()
    drafter = rig.drafter_of(kind, target, script).to(target.dtype)
    return target.generate(**tiny.prompt(), max_new_tokens=NEW_TOKENS, assistant_model=drafter).shape[1] - 9


def assert_diverges_only_where_tokens_are_close(target):
    for seed in range(3):
        call = tiny.prompt(9, seed=seed) | {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        plain = target.generate(**call, return_dict_in_generate=True, output_logits=True)
        script = plain.sequences[0].tolist()
        for kind in rig.KINDS:
            drafted = target.generate(**call, assistant_model=rig.drafter_of(kind, target, script))[0].tolist()
            differing = [i for i, pair in enumerate(zip(drafted, script, strict=True)) if len(set(pair)) > 1]
            if differing:
                logits = plain.logits[differing[0] - 9][0].float()
                best, second = logits.topk(2).values
                assert best - second < _CLOSE * logits.std(), f"token {differing[0]} ({kind})"
