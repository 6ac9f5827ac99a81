"""LoRA on a drafter: trained, saved, loaded, merged, and swapped by name between calls of `generate`."""

import copy

import pytest
import torch
import transformers
from packaging.version import Version

import tiny
from dspark_hf import record_speculation
from dspark_hf.training.adaptation import add_lora

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.integration,
    # peft asks transformers for an attribute by its old name.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
]

MODULES = ["q_proj", "v_proj", "fc"]
HEADS = ["markov_head", "confidence_head"]
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(autouse=True)
def _any_peft(monkeypatch):
    """transformers' own methods ask for a PEFT that may be newer than any released one; what they call is there."""
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", "0.18")


def lora_config(**fields):
    return peft.LoraConfig(r=4, target_modules=MODULES, modules_to_save=HEADS, **fields)


def confidences(target, assistant) -> list:
    """A fingerprint of what drafts: the first round's confidences. The output must not depend on it."""
    with record_speculation() as stats:
        output = target.generate(**tiny.prompt(), **GREEDY, assistant_model=assistant)
    assert torch.equal(output, target.generate(**tiny.prompt(), **GREEDY))
    return stats.rounds[0].confidence


@pytest.fixture
def target():
    return tiny.qwen3()


def wrapped(drafter):
    return peft.get_peft_model(drafter, lora_config())


def with_adapter(drafter):
    drafter.add_adapter(lora_config(), "domain")
    return drafter


@pytest.mark.parametrize("adapt", [wrapped, with_adapter], ids=["get_peft_model", "add_adapter"])
def test_adapter_and_heads_are_trained_and_nothing_else(adapt, target, make_trainer):
    drafter = tiny.random_drafter(target)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    model = adapt(drafter)
    trainer = make_trainer(model, target, max_steps=4, learning_rate=1e-2)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or any(head in name for head in HEADS) for name in trainable)
    assert any("lora_" in name for name in trainable) and all(any(head in name for name in trainable) for head in HEADS)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = trainer.train().metrics["train_loss"]
    assert losses > 0
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert moved == trainable
    frozen = {
        name.replace(".base_layer", "").removeprefix("base_model.model."): p for name, p in model.state_dict().items()
    }
    for name in ("fc.weight", "norm.weight", "layers.0.self_attn.q_proj.weight"):
        assert torch.equal(frozen[name], before[name])


def test_training_lowers_the_loss_of_what_is_drafted_with(target, make_trainer, rows):
    drafter = tiny.random_drafter(target)
    model = add_lora(drafter, 4, MODULES)
    trainer = make_trainer(model, target, rows=rows(2), eval_rows=rows(2), max_steps=20, learning_rate=1e-2)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before
    with_it = confidences(target, model)
    with model.disable_adapter():
        assert confidences(target, model) != pytest.approx(with_it, abs=1e-3)


@pytest.mark.parametrize("adapt", [wrapped, with_adapter], ids=["get_peft_model", "add_adapter"])
def test_an_adapter_is_saved_resumed_and_loaded(adapt, target, make_trainer, tmp_path):
    base = tiny.random_drafter(target)
    model = adapt(copy.deepcopy(base))
    trainer = make_trainer(
        model, target, max_steps=2, learning_rate=1e-2, save_strategy="steps", save_steps=1, save_dtype="bfloat16"
    )
    trainer.train()
    trainer.save_model()
    assert (tmp_path / "run" / "adapter_model.safetensors").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()

    if Version(transformers.__version__) >= Version("5.24"):  # Older ones leave modules_to_save out, and report it.
        loaded = copy.deepcopy(base)
        loaded.load_adapter(tmp_path / "run", "domain")
        assert confidences(target, loaded) == pytest.approx(confidences(target, model), rel=1e-4)
    by_peft = peft.PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "run").eval()
    assert confidences(target, by_peft) == pytest.approx(confidences(target, model), rel=1e-4)

    checkpoint = str(tmp_path / "run" / "checkpoint-2")
    again = adapt(copy.deepcopy(base))
    resumed = make_trainer(again, target, max_steps=3, save_strategy="steps", save_steps=1)
    resumed.load_checkpoint(checkpoint)
    for (name, weight), (_, expected) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(weight, expected), name
    resumed.train(resume_from_checkpoint=checkpoint)
    assert resumed.state.global_step == 3


def test_a_merged_adapter_is_a_drafter_like_any_other(target, tmp_path):
    from dspark_hf import DSparkDrafter

    model = peft.get_peft_model(tiny.random_drafter(target), lora_config(init_lora_weights=False)).eval()
    with torch.no_grad():
        model.base_model.model.confidence_head.modules_to_save["default"].proj.bias.add_(1.0)
    expected = confidences(target, model)
    merged = model.merge_and_unload()
    assert isinstance(merged, DSparkDrafter)
    merged.save_pretrained(tmp_path)
    assert confidences(target, DSparkDrafter.from_pretrained(tmp_path).eval()) == pytest.approx(expected, rel=1e-3)


def test_adapters_are_swapped_by_name_between_calls(target, tmp_path):
    drafter = tiny.random_drafter(target)
    plain = confidences(target, drafter)
    for name in ("code", "math"):
        drafter.add_adapter(peft.LoraConfig(r=4, target_modules=MODULES, init_lora_weights=False), name)
    drafter.eval()
    found = {}
    for name in ("code", "math"):
        drafter.set_adapter(name)
        found[name] = confidences(target, drafter)
    drafter.disable_adapters()
    assert confidences(target, drafter) == pytest.approx(plain)
    drafter.enable_adapters()
    drafter.set_adapter("code")
    assert confidences(target, drafter) == pytest.approx(found["code"])
    assert len({round(values[0], 6) for values in (plain, *found.values())}) == 3


def test_a_wrapper_switches_adapters_too(target):
    model = peft.get_peft_model(tiny.random_drafter(target), lora_config(init_lora_weights=False), "code")
    model.add_adapter("math", lora_config(init_lora_weights=False))
    model.eval()
    found = []
    for name in ("code", "math", "code"):
        model.set_adapter(name)
        found.append(confidences(target, model))
    assert found[0] == pytest.approx(found[2], rel=1e-5)
    assert found[0] != pytest.approx(found[1], abs=1e-3)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_every_kind_of_head_is_trained_through_modules_to_save(head, target, make_trainer):
    model = add_lora(tiny.random_drafter(target, markov_head_type=head), 4, MODULES)
    start = {name: p.detach().clone() for name, p in model.named_parameters() if "modules_to_save" in name}
    assert start
    make_trainer(model, target, max_steps=2, learning_rate=1e-2).train()
    parameters = dict(model.named_parameters())
    assert all(not torch.equal(parameters[name], value) for name, value in start.items())


def test_heads_come_back_with_the_adapter_that_brings_them(target):
    drafter = with_adapter(tiny.random_drafter(target))
    with torch.no_grad():
        drafter.confidence_head.modules_to_save["domain"].proj.bias.add_(1.0)
    with_it = confidences(target, drafter.eval())
    drafter.disable_adapters()
    assert confidences(target, drafter) != pytest.approx(with_it, abs=1e-3)
    drafter.enable_adapters()
    assert confidences(target, drafter) == pytest.approx(with_it, rel=1e-5)
