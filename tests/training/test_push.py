"""A trainer's push leaves the drafter's own card, and no token."""

import pytest
from hub_server import TOKEN, USER, Hub

from dspark_hf import DSparkDrafter

pytestmark = pytest.mark.integration

NAME = f"{USER}/trained"


def test_a_trainer_pushes_the_drafters_own_card(hub: Hub, make_trainer, tmp_path):
    trainer = make_trainer(max_steps=1, hub_model_id=NAME, hub_token=TOKEN)
    trainer.push_to_hub()
    pushed = hub.tree(NAME)
    assert b"# DSpark drafter for " in pushed["README.md"] and NAME.encode() in pushed["README.md"]
    assert DSparkDrafter.from_pretrained(NAME, cache_dir=tmp_path / "cache").config.block_size == 4
    assert [name for name, content in pushed.items() if TOKEN.encode() in content] == []
