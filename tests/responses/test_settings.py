"""Settings given, settings of the target, and what is known of them before the target is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny_folders
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
)

import tiny
from dspark_hf.responses.regeneration import Regenerator
from dspark_hf.responses.settings import RegenerationSettings, origin_before_loading, resolve_sampling
from dspark_hf.responses.token_sampling import Sampling


def test_settings_go_before_the_generation_config(target: PreTrainedModel) -> None:
    config = type(target.generation_config)(do_sample=True, temperature=0.6, top_p=0.95)
    assert resolve_sampling(RegenerationSettings(), config) == Sampling(True, 0.6, 50, 0.95)
    assert resolve_sampling(RegenerationSettings(top_k=0, temperature=1.0), config) == Sampling(True, 1.0, 0, 0.95)
    assert not resolve_sampling(RegenerationSettings(do_sample=False), config).do_sample
    assert not resolve_sampling(RegenerationSettings(temperature=0), config).do_sample
    plain = type(target.generation_config)()
    assert not resolve_sampling(RegenerationSettings(), plain).do_sample
    assert resolve_sampling(RegenerationSettings(temperature=0.6), plain).do_sample


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
@pytest.mark.parametrize(
    "settings",
    [RegenerationSettings(), RegenerationSettings(temperature=0.6, top_p=0.9, seed=3, enable_thinking=False)],
    ids=["the target's", "given"],
)
def test_settings_are_known_from_the_small_files_of_a_target(
    tmp_path: Path, dtype: str, family: str, settings: RegenerationSettings
) -> None:
    target = tiny.TARGETS[family]()
    target.generation_config.update(do_sample=True, temperature=0.7, top_k=5, max_new_tokens=9)
    target.save_pretrained(tmp_path)
    tiny_folders.tokenizer().save_pretrained(tmp_path)
    known = origin_before_loading(settings, str(tmp_path), dtype)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert known == Regenerator(loaded, AutoTokenizer.from_pretrained(tmp_path), settings).origin()


def test_of_a_target_that_is_not_there_nothing_is_known(tmp_path: Path) -> None:
    assert origin_before_loading(RegenerationSettings(), str(tmp_path / "missing")) == {}
