"""The distribution a drafter is compared with is the target's own, whatever its family does to the LM head's output."""

import pytest
import torch

import tiny
from dspark_hf.training.target_logits import logit_rule

FAMILIES = {
    "plain": lambda: tiny.qwen3(),
    "soft_capped": lambda: tiny.gemma4(),
    "multiplied (Cohere)": lambda: tiny.build_target(tiny.target_config("Cohere", logit_scale=0.25)),
    "divided (Granite)": lambda: tiny.build_target(tiny.target_config("Granite", logits_scaling=8.0)),
}
EXPECTED = {"plain": 1.0, "soft_capped": 1.0, "multiplied (Cohere)": 0.25, "divided (Granite)": 0.125}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_factor_is_found(family, dtype):
    rule = logit_rule(FAMILIES[family]().to(dtype))
    assert rule.scale == pytest.approx(EXPECTED[family], rel=1e-3 if dtype == torch.float32 else 0.01)
    assert (rule.softcap is None) == (family != "soft_capped")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trainer_compares_with_the_distribution_of_generate(family, make_trainer, rows):
    target = FAMILIES[family]()
    trainer = make_trainer(tiny.random_drafter(target), target)
    ids = torch.tensor([rows(1)[0]["input_ids"]])
    states = target.base_model(ids).last_hidden_state
    found = trainer.target_head.rule(trainer.target_head.embeddings.target_logits(states))
    torch.testing.assert_close(found, target(ids).logits, rtol=1e-4, atol=1e-4)


def test_a_target_whose_logits_are_something_else_is_refused():
    target = tiny.qwen3()
    genuine = target.forward

    def forward(*args, **kwargs):
        outputs = genuine(*args, **kwargs)
        outputs.logits = outputs.logits.roll(1, dims=-1)
        return outputs

    target.forward = forward
    with pytest.raises(ValueError, match="not its LM head's output times a factor"):
        logit_rule(target)
