"""A third kind of drafter, defined in this file alone, does everything that the two kinds of the package do."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from source_tree import SourceTree
from torch import nn
from transformers import AutoModel, LogitsProcessor

import dspark_hf
import tiny
from dspark_hf import Drafter, DrafterOutput, DSparkDrafter, record_speculation, register_kind
from dspark_hf.checkpoints import inspect_checkpoint
from dspark_hf.configuration_drafter import DrafterConfig
from dspark_hf.evaluation.methods import is_dflash
from dspark_hf.evaluation.replay import replay
from dspark_hf.generation.candidate_generator import DrafterCandidateGenerator
from dspark_hf.generation.generators import GENERATORS
from dspark_hf.hub import build_card
from dspark_hf.layers import DSparkRMSNorm
from dspark_hf.registry import presets, unregister_kind
from dspark_hf.training import DSparkTrainer, DSparkTrainingArguments, add_lora, warm_start

pytestmark = pytest.mark.integration


# ---------------------------------------------------------------------- the kind: configuration, model, candidate generator


class BigramConfig(DrafterConfig):
    """Each draft depends on the token before it and on nothing else."""

    model_type = "test_bigram"
    presets: ClassVar[dict[str, dict[str, Any]]] = {"bigram": {}}

    inner_size: int = 16

    @property
    def method(self) -> str:
        return "Bigram"

    def describe(self) -> dict[str, str]:
        return super().describe() | {"layers": f"a map through {self.inner_size} numbers"}


class BigramDrafter(Drafter):
    config_class = BigramConfig

    def __init__(self, config: BigramConfig):
        super().__init__(config)
        size = config.hidden_size
        down, up = nn.Linear(size, config.inner_size, bias=False), nn.Linear(config.inner_size, size, bias=False)
        self.layers = nn.ModuleList([nn.Sequential(down, up)])
        self.norm = DSparkRMSNorm(size, config.rms_norm_eps)
        self.post_init()

    @property
    def passes_per_round(self) -> int:
        return self.config.num_draft_tokens

    def states(self, token_ids: torch.Tensor, embeddings: Any) -> torch.Tensor:
        embedded = embeddings.embed(token_ids, like=self.norm.weight)
        return self.norm(embedded + self.layers[0](embedded))

    def extend_cache(self, cache, context_features, position_ids, counts=None) -> None:
        """It needs nothing of the context but its length."""
        nothing = context_features.new_zeros(len(context_features), 1, position_ids.shape[1], 1)
        cache.append([(nothing, nothing)], position_ids, counts)

    def training_inputs(self, input_ids, attention_mask, anchor_positions, keep_anchors) -> dict[str, Any]:
        return {"input_ids": input_ids, "anchor_positions": anchor_positions}

    def forward(self, input_ids, anchor_positions, context_features=None, embeddings=None, objective=None):
        steps = torch.arange(self.config.num_draft_tokens, device=input_ids.device)
        positions = (anchor_positions[..., None] + steps).flatten(1).clamp_max(input_ids.shape[1] - 1)
        hidden_states = self.states(input_ids.gather(1, positions), embeddings or self.bind())  # [B, A * G, D]
        if objective is None:
            return DrafterOutput(last_hidden_state=hidden_states)
        loss, metrics = objective(self, hidden_states)
        return DrafterOutput(loss=loss, last_hidden_state=hidden_states, metrics=metrics)


class BigramLogitsProcessor(LogitsProcessor):
    def __init__(self, drafter: BigramDrafter, embeddings: Any):
        self.drafter, self.embeddings = drafter, embeddings

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        states = self.drafter.states(input_ids[:, -1], self.embeddings)
        return scores + self.drafter.base_logits(states, self.embeddings)


class BigramCandidateGenerator(DrafterCandidateGenerator):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.head = BigramLogitsProcessor(self.drafter, self.embeddings)

    def backbone_pass(self, input_ids, num_drafts):
        config, weight = self.drafter.config, self.drafter.norm.weight
        return (
            weight.new_zeros(len(input_ids), num_drafts, config.hidden_size),
            weight.new_zeros(len(input_ids), num_drafts, config.logits_size),
        )


# ---------------------------------------------------------------------- what knows the kinds

# Beside the readers and writers of public formats, which are made for a kind.
KNOW_KINDS = {
    "dspark_hf",  # Registers them.
    "dspark_hf.generation.generators",
    "dspark_hf.generation.dspark_candidate_generator",
    "dspark_hf.generation.dflash2_candidate_generator",
    "dspark_hf.generation.eagle3_candidate_generator",
    "dspark_hf_cli.inspect",  # The probe of each kind.
}


def test_few_files_know_the_kinds():
    source = SourceTree(Path(dspark_hf.__file__).parents[1], leave_out=("templates",))
    importing = {
        module
        for module in source.files
        if any(name.startswith("dspark_hf.kinds") for name, *_ in source.imports(module))
    }
    assert {m for m in importing if not m.startswith(("dspark_hf.kinds", "dspark_hf.checkpoints"))} == KNOW_KINDS


# ---------------------------------------------------------------------- what it then does


@pytest.fixture(autouse=True, scope="module")
def registered():
    register_kind(BigramDrafter)
    GENERATORS[BigramDrafter] = BigramCandidateGenerator
    yield
    del GENERATORS[BigramDrafter]
    unregister_kind(BigramDrafter)


@pytest.fixture
def target():
    return tiny.bigram()


def new_drafter(target, **fields) -> BigramDrafter:
    torch.manual_seed(0)
    own = {"block_size": 3, "initializer_range": 0.4} | fields
    return BigramDrafter(BigramConfig.for_target(target.config, **own)).eval()


@pytest.mark.parametrize("num_rows", [1, 3], ids=["one row", "three rows"])
@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 40}], ids=["full vocabulary", "reduced vocabulary"])
def test_greedy_output_is_that_of_plain_generate(target, fields, num_rows):
    inputs = tiny.prompt(num_rows=num_rows)
    settings = {"max_new_tokens": 12, "do_sample": False}
    drafter = new_drafter(target, **fields)
    with record_speculation() as stats:
        drafted = target.generate(**inputs, **settings, assistant_model=drafter, drafting_backoff=False)
    assert torch.equal(drafted, target.generate(**inputs, **settings))
    assert sum(r.drafted for r in stats.rounds) > 0


def test_a_drafter_that_is_always_right_saves_passes(target):
    """Without its layer the kind predicts what a target whose layers add nothing says."""
    drafter = new_drafter(target)
    with torch.no_grad():
        drafter.layers[0][1].weight.zero_()
        drafter.norm.weight.copy_(target.get_decoder().norm.weight)
    with record_speculation() as stats:
        target.generate(**tiny.prompt(), max_new_tokens=17, do_sample=True, top_k=0, assistant_model=drafter)
    assert stats.acceptance_length == 4


def test_it_is_saved_and_loaded_by_every_name(target, tmp_path):
    drafter = new_drafter(target, inner_size=8)
    drafter.save_pretrained(tmp_path)
    for loader in (BigramDrafter, Drafter, AutoModel):
        loaded = loader.from_pretrained(tmp_path)
        assert type(loaded) is BigramDrafter and loaded.config.inner_size == 8
        for name, tensor in drafter.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="load it with BigramDrafter or Drafter"):
        DSparkDrafter.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot hold Bigram drafters"):
        drafter.save_pretrained(tmp_path / "export", format="vllm-sglang")


def test_it_is_inspected(target, tmp_path):
    new_drafter(target).save_pretrained(tmp_path)
    found = inspect_checkpoint(tmp_path)
    assert (found.format, found.refusal, found.engines) == ("dspark-hf", None, {})
    assert "method: Bigram" in str(found) and "a map through 16 numbers" in str(found)
    assert found.to_dict()["description"]["heads"] == "none"


def test_it_has_a_model_card(target, tmp_path):
    card = str(build_card(new_drafter(target), tmp_path))
    assert "# Bigram drafter" in card and "BigramDrafter.from_pretrained" in card and "a map through 16 numbers" in card


def test_it_is_trained(target, tmp_path):
    drafter = new_drafter(target, initializer_range=0.1)
    before = {name: parameter.clone() for name, parameter in drafter.named_parameters()}
    ids = [tiny.prompt(24, seed=seed)["input_ids"][0].tolist() for seed in range(8)]
    rows = [{"input_ids": row, "loss_mask": [0] * 8 + [1] * 16} for row in ids]
    arguments = DSparkTrainingArguments(
        str(tmp_path), max_steps=2, num_anchors=8, learning_rate=1e-2, report_to="none", use_cpu=True
    )
    trainer = DSparkTrainer(drafter, target, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert all(not torch.equal(parameter, before[name]) for name, parameter in drafter.named_parameters())
    metrics = trainer.evaluate()
    assert 1 <= metrics["eval_acceptance_length"] <= 4 and "eval_confidence_loss" not in metrics
    trainer.save_model()
    assert type(Drafter.from_pretrained(tmp_path)) is BigramDrafter
    followed = replay(drafter, target, rows[0])
    assert followed.tokens == 15 and followed.rounds <= 15


def test_it_is_a_choice_of_the_training_command(target):
    config, fields = presets()["bigram"]
    assert config is BigramConfig and fields == {}
    assert "inner_size" in config.own_fields() and "markov_rank" not in config.own_fields()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's call, not ours.
def test_what_it_does_not_have_is_not_asked_of_it(target):
    drafter = new_drafter(target)
    assert not is_dflash(drafter)
    assert warm_start(drafter, inner_size=4).config.inner_size == 4
    pytest.importorskip("peft")
    adapted = add_lora(drafter, 2, ["0.0", "0.1"])
    assert adapted.peft_config["default"].modules_to_save == []
