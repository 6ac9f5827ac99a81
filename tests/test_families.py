"""
Tiny targets of the families of transformers decode as plain `generate` does, or are refused.

A sample of what models do differently runs with every change; with the marker `slow`, every class of the installed transformers.
`benchmarks/families.py` writes the same outcomes down, and `docs/targets.py` makes a page of them.
"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import family_outcomes
import pytest
import target_families
import transformers
from family_outcomes import CRASHED, EQUAL, NO_PLAIN, REFUSED, UNTESTED, WRONG
from transformers.cache_utils import StaticLayer

import tiny

ROOT = Path(__file__).parents[1]

ALL = {"one row", "several rows", "static cache", "second turn"}
# Mapping and family: what is special about it, and its columns that are not equal.
SAMPLE: dict[tuple[str, str], tuple[str, set[str]]] = {
    ("causal", "llama4_text"): ("attention in chunks", set()),
    ("causal", "gemma3n_text"): ("several residual streams", set()),
    ("causal", "doge"): ("layers with masks of their own", set()),
    ("causal", "longcat_flash"): ("two attentions per layer", set()),
    ("causal", "bloom"): ("no positions, a bias instead", set()),
    ("causal", "openai-gpt"): ("no cache", {"second turn"}),
    ("causal", "bamba"): ("recurrent state", set()),
    ("causal", "mamba"): ("wrong over several tokens", ALL),
    ("causal", "moshi"): ("a window that no mask has", ALL),
    ("image-text", "paligemma"): ("positions that begin at 1", set()),
    ("image-text", "mllama"): ("layers whose cache holds images", set()),
    ("image-text", "qwen2_5_vl"): ("positions with several axes", set()),
}
# Older versions of transformers cannot crop static caches, and take other layouts of pixels.
STRICT = {"one row", "several rows", "second turn"} | (
    {"static cache", "image", "rows with images"} if StaticLayer.is_croppable else set()
)
OTHERS = [
    (mapping, family)
    for mapping, families in target_families.MAPPINGS.items()
    for family in families
    if (mapping, family) not in SAMPLE
]


@pytest.mark.parametrize(("mapping", "family"), SAMPLE, ids=lambda name: name)
def test_what_models_do_differently(mapping, family):
    found = family_outcomes.outcomes(mapping, family)
    _, not_equal = SAMPLE[mapping, family]
    for name, outcome in found.items():
        state = family_outcomes.state(outcome)
        if name in not_equal:
            assert state in (REFUSED, NO_PLAIN), (name, outcome)
        elif name in STRICT:
            assert state == EQUAL, (name, outcome)
        else:
            assert state not in (WRONG, CRASHED), (name, outcome)


@pytest.mark.slow
@pytest.mark.parametrize(("mapping", "family"), OTHERS, ids=lambda name: name)
def test_every_family_is_equal_or_refused(mapping, family):
    found = family_outcomes.outcomes(mapping, family)
    for outcome in found.values():
        assert family_outcomes.state(outcome) not in (WRONG, CRASHED), found
    if "model" in found:
        pytest.skip(found["model"])


class TestTheOutcomes:
    @pytest.fixture
    def of(self):
        target, inputs = tiny.qwen3(), tiny.prompt()
        plain = target.generate(**inputs, do_sample=False, max_new_tokens=8)

        def of(found):
            def draft(drafter):
                if isinstance(found, Exception):
                    raise found
                drafted = target.generate(**inputs, do_sample=False, max_new_tokens=8, assistant_model=drafter)
                return drafted if found is None else found(drafted)

            return family_outcomes._compared(target, inputs, plain, draft)

        return of

    def test_the_same_tokens(self, of):
        assert of(None) == EQUAL

    def test_one_other_token(self, of):
        def changed(drafted):
            drafted[0, -1] += 1
            return drafted

        assert of(changed).startswith(f"{WRONG}: with a drafter that is rejecting, from token 16")

    def test_fewer_tokens(self, of):
        assert of(lambda drafted: drafted[:, :-1]).startswith(WRONG)

    @pytest.mark.parametrize("error", [TypeError("a bug"), ValueError("an error of transformers")], ids=str)
    def test_errors_that_are_not_a_refusal(self, of, error):
        assert of(error) == f"{CRASHED}: {type(error).__name__}: {error}"

    def test_a_refusal(self):
        outcome = family_outcomes.decoded(tiny.qwen3(), tiny.prompt(), cache_implementation="quantized")
        assert family_outcomes.state(outcome) in (REFUSED, NO_PLAIN)
        outcome = family_outcomes.decoded(tiny.qwen3(), tiny.prompt(), use_cache=False)
        assert outcome.startswith(f"{REFUSED}: the target's cache is off")

    def test_drafts_that_are_never_accepted_prove_nothing(self, monkeypatch):
        one = tiny.random_drafter
        monkeypatch.setattr(
            family_outcomes.rig,
            "drafters_of_rows",
            lambda target, scripts: dict.fromkeys(("rejecting", "patterned"), one(target, num_hidden_layers=1)),
        )
        assert family_outcomes.decoded(tiny.qwen3(), tiny.prompt()).startswith(UNTESTED)


class TestThePage:
    @pytest.fixture
    def page(self):
        return runpy.run_path(str(ROOT / "docs" / "targets.py"))

    @pytest.fixture
    def results(self):
        return json.loads((ROOT / "docs" / "results" / "targets.json").read_text(encoding="utf-8"))

    def test_is_made_of_the_results(self, page):
        assert page["PAGE"].read_text(encoding="utf-8") == page["page"](), "run `python docs/targets.py`"

    def test_knows_every_outcome(self, page):
        assert set(page["WORDS"]) == {EQUAL, REFUSED, NO_PLAIN, UNTESTED, CRASHED, WRONG}
        assert page["NEW_TOKENS"] == family_outcomes.NEW_TOKENS

    def test_nothing_is_wrong_or_crashes(self, results):
        found = {
            (family, family_outcomes.state(outcome))
            for of_version in results.values()
            for families in of_version.values()
            for family, columns in families.items()
            for outcome in columns.values()
        }
        assert not [family for family, state in found if state in (WRONG, CRASHED)]

    def test_most_classes_are_equal_or_refused(self, page, results):
        newest = results[max(results)]
        counts = {mapping: page["counts"](families) for mapping, families in newest.items()}
        assert counts["causal"][EQUAL] + counts["causal"][REFUSED] >= 170
        assert counts["image-text"][EQUAL] + counts["image-text"][REFUSED] >= 70

    def test_has_every_class_of_its_transformers(self, results):
        for mapping, families in target_families.MAPPINGS.items():
            if transformers.__version__ in results:
                assert set(results[transformers.__version__][mapping]) == set(families)

    def test_a_class_without_a_result_is_untested(self, monkeypatch):
        families = runpy.run_path(str(ROOT / "benchmarks" / "families.py"))
        monkeypatch.setitem(target_families.MAPPINGS["causal"], "new", "NewForCausalLM")
        kept = {"causal": {"llama": {"class": "LlamaForCausalLM", "one row": EQUAL}}}
        found = families["with_every_class"](kept)["causal"]
        assert found["new"] == {"class": "NewForCausalLM", "model": UNTESTED}
        assert found["llama"]["one row"] == EQUAL
