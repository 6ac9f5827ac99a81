"""Libraries that call `generate` themselves, with a drafter attached: the same results, in fewer passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tiny_folders
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import dspark_hf

pytestmark = [
    pytest.mark.ecosystem,
    # Of the libraries' calls, not of ours.
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


@pytest.fixture
def target(folders):
    return AutoModelForCausalLM.from_pretrained(folders.target, dtype=torch.float32)


@pytest.fixture
def tokenizer(folders):
    return AutoTokenizer.from_pretrained(folders.target)


@pytest.fixture
def drafter(folders):
    return dspark_hf.Drafter.from_pretrained(folders.perfect)


# ---------------------------------------------------------------------- TRL


def rollouts(
    kind: str, folders: Any, folder: Any, drafter: Any, seed: int = 1, **options: Any
) -> tuple[list[str], Any]:
    """Trains a few steps; the completions in their order, and what was drafted."""
    import datasets
    import trl

    target = AutoModelForCausalLM.from_pretrained(folders.target, dtype=torch.float32)
    seen: list[str] = []

    def reward(completions: list[str], **_: Any) -> list[float]:
        seen.extend(completions)
        return [float(len(set(text))) for text in completions]

    settings = {
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": 16,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": seed,
    }
    trainer = getattr(trl, f"{kind}Trainer")(
        target,
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(str(folder), **(settings | options)),
        train_dataset=datasets.Dataset.from_list([{"prompt": f"{i} + {i}?"} for i in range(8)]),
        processing_class=AutoTokenizer.from_pretrained(folders.target),
    )
    with dspark_hf.record_speculation() as stats:
        if drafter is None:
            trainer.train()
        else:
            with dspark_hf.attach(trainer.model, drafter, drafting_backoff=False):
                trainer.train()
    return seen, stats


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_trl_writes_the_same_completions(kind, folders, drafter, tmp_path):
    pytest.importorskip("trl")
    plain, without = rollouts(kind, folders, tmp_path / "plain", None, temperature=1e-4)
    drafted, stats = rollouts(kind, folders, tmp_path / "drafted", drafter, temperature=1e-4)
    assert drafted == plain and len(plain) == 12
    assert not without.rounds and stats.acceptance_length > 3


@pytest.mark.statistical
def test_trl_samples_from_the_same_distribution(folders, target, tokenizer, drafter, tmp_path):
    """How likely the target finds each completion, by a Kolmogorov-Smirnov test; another temperature must not pass it."""
    pytest.importorskip("trl")
    scipy_stats = pytest.importorskip("scipy.stats")
    many = {
        "per_device_train_batch_size": 256,
        "num_generations": 256,
        "max_completion_length": 6,
        "learning_rate": 0.0,
    }

    def likelihoods(name: str, drafter: Any, temperature: float, seed: int) -> list[float]:
        found, _ = rollouts("GRPO", folders, tmp_path / name, drafter, seed=seed, temperature=temperature, **many)
        rows = [tokenizer(text, return_tensors="pt").input_ids for text in found if len(text) > 1]
        with torch.no_grad():
            return [float(-target(ids, labels=ids).loss) for ids in rows]

    plain, drafted = likelihoods("plain", None, 2.0, seed=1), likelihoods("drafted", drafter, 2.0, seed=2)
    assert len(plain) > 500
    assert scipy_stats.ks_2samp(plain, drafted).pvalue > 1e-3
    assert scipy_stats.ks_2samp(plain, likelihoods("warmer", drafter, 2.5, seed=3)).pvalue < 1e-3


# ---------------------------------------------------------------------- lm-eval


def test_lm_eval_gives_the_same_answers_and_scores(target, tokenizer, drafter, tmp_path):
    pytest.importorskip("lm_eval")
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"q": f"{i} + 1?", "a": "w" * 10}) + "\n" for i in range(6)))
    task = {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["\n"], "do_sample": False, "max_gen_toks": 20},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    model = HFLM(pretrained=target, tokenizer=tokenizer, batch_size=3)

    def evaluated() -> Any:
        found = simple_evaluate(model, tasks=[task], log_samples=True)
        answers = [sample["resps"] for sample in found["samples"]["questions"]]
        return answers, found["results"]["questions"]["exact_match,none"]

    plain = evaluated()
    with dspark_hf.attach(target, drafter), dspark_hf.record_speculation() as stats:
        assert evaluated() == plain
    assert stats.acceptance_length > 3


# ---------------------------------------------------------------------- agents


def test_smolagents_answers_the_same(folders, drafter):
    smolagents = pytest.importorskip("smolagents")
    model = smolagents.TransformersModel(model_id=str(folders.target), device_map="cpu", max_new_tokens=20)
    messages = [{"role": "user", "content": [{"type": "text", "text": "What is it?"}]}]
    plain = model.generate(messages).content
    with dspark_hf.attach(model.model, drafter), dspark_hf.record_speculation() as stats:
        assert model.generate(messages).content == plain
    assert stats.rounds
