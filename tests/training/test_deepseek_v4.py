"""Training DeepSeek-V4's kind of drafter: the same numbers as in drafting, and a loss that falls."""

import pytest
import tiny_deepseek_v4 as v4
import torch

import tiny
from dspark_hf import DeepseekV4Drafter, DeepseekV4DrafterConfig, Drafter
from dspark_hf.evaluation.replay import replay
from dspark_hf.tapping import Tap
from dspark_hf.training import DSparkTrainingArguments, add_lora, warm_start

pytestmark = pytest.mark.integration


def drafter_for(target, **fields) -> DeepseekV4Drafter:
    own = {"mask_token_id": tiny.MASK_ID, "initializer_range": 0.1, "markov_rank": 8}
    torch.manual_seed(0)
    return DeepseekV4Drafter(DeepseekV4DrafterConfig.for_target(target.config, **(own | fields)))


def test_many_anchors_at_once_are_blocks_one_by_one():
    target = v4.target()
    drafter = drafter_for(target).eval().requires_grad_(False)
    embeddings = drafter.bind(target)
    ids = tiny.prompt(24, num_rows=2)["input_ids"]
    attention_mask = torch.ones_like(ids)
    attention_mask[1, 20:] = 0
    tap = Tap(target, drafter.config.hidden_state_indices)
    with tap.reading():
        features = tap.features(target(input_ids=ids, output_hidden_states=tap.argument, use_cache=False))
    anchors, keep = torch.tensor([[0, 3, 17], [9, 15, 0]]), torch.tensor([[True] * 3, [True, True, False]])
    inputs = drafter.training_inputs(ids, attention_mask, anchors, keep)
    together = drafter(**inputs, context_features=features, embeddings=embeddings).last_hidden_state
    together = together.unflatten(1, (3, drafter.config.block_size))
    for row, index in keep.nonzero().tolist():
        anchor = int(anchors[row, index])
        cache = drafter.new_cache()
        if anchor:
            drafter.extend_cache(cache, features[row : row + 1, :anchor], torch.arange(anchor)[None])
        block = drafter.block_inputs(ids[row : row + 1], torch.tensor([[anchor]]))
        alone = drafter(**block, draft_cache=cache, embeddings=embeddings).last_hidden_state
        torch.testing.assert_close(together[row, index], alone[0], atol=1e-5, rtol=1e-5)


def test_the_loss_falls_and_every_weight_learns(make_trainer, rows):
    target = v4.target()
    drafter = drafter_for(target)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    trainer = make_trainer(drafter, target, rows=rows(8), eval_rows=rows(8), max_steps=12, learning_rate=5e-3)
    first = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < first - 0.1
    assert not [name for name, parameter in drafter.named_parameters() if torch.equal(parameter, before[name])]
    trainer.save_model()
    assert type(Drafter.from_pretrained(trainer.args.output_dir)) is DeepseekV4Drafter


def test_checkpointed_activations_change_nothing(make_trainer, rows):
    target, losses = v4.target(), []
    fields = DSparkTrainingArguments.__dataclass_fields__
    option = next(name for name in ("activation_checkpointing", "gradient_checkpointing") if name in fields)
    for checkpointing in (False, True):
        options = {"max_steps": 2, option: checkpointing, "folder": f"run-{checkpointing}"}
        trainer = make_trainer(drafter_for(target), target, rows=rows(4), **options)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4) and losses[0][0] != losses[0][1]


def test_replay_follows_an_answer_of_the_target():
    target = v4.target()
    ids = target.generate(**tiny.prompt(6), max_new_tokens=16, do_sample=False)[0].tolist()
    followed = replay(drafter_for(target).eval(), target, {"input_ids": ids, "loss_mask": [0] * 6 + [1] * 16})
    assert followed.tokens == 15 and 1 <= followed.rounds <= 15


def test_a_warm_start_with_fewer_drafts():
    target = v4.target()
    drafter = drafter_for(target)
    changed = warm_start(drafter, block_size=3)
    assert changed.config.num_draft_tokens == 3
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(changed.state_dict()[name], tensor), name


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's call, not ours.
def test_lora(make_trainer, rows):
    pytest.importorskip("peft")
    target = v4.target()
    drafter = drafter_for(target)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    adapted = add_lora(drafter, 2, ["q_a_proj", "q_b_proj", "kv_proj", "o_b_proj"])
    assert set(adapted.peft_config["default"].modules_to_save) == {"markov_head", "confidence_head"}
    make_trainer(adapted, target, rows=rows(4), max_steps=3, learning_rate=1e-2).train()
    state = adapted.state_dict()
    learnt = [name for name, tensor in state.items() if "lora_B" in name and tensor.any()]
    assert len(learnt) == 3 * 4
    for name in ("layers.0.mlp.experts.down_proj", "norm.weight", "layers.2.attn_hc.fn"):
        assert torch.equal(state[f"base_model.model.{name}"], before[name])
