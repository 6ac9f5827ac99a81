"""Reliability figures and Sequential Temperature Scaling."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from dspark_hf.scheduling import (
    ConfidenceRounds,
    calibrated_confidence,
    fit_temperatures,
    measure_calibration,
    measure_reliability,
    plot_reliability,
    prefix_survival,
    weighted_mean,
)

CASES_WITH_CONFIDENCE = ("a_qwen3_vanilla_confmarkov", "c_qwen3_rnn_confmarkov", "f_gemma4_vanilla_confmarkov")


def rounds_of(case):
    counts = np.minimum(case["draft_token_count"], case["effective_proposal_length"])
    return ConfidenceRounds(
        torch.tensor(case["confidence_logits"]),
        torch.tensor(case["accept_prefix_mask"]).bool(),
        torch.from_numpy(counts),
    )


def assert_figures(case):
    found, expected = measure_calibration(rounds_of(case), num_bins=case["num_ece_bins"]), case["expected"]

    def same(value, reference):
        assert value == pytest.approx(math.nan if reference is None else reference, abs=2e-7, nan_ok=True)

    for slot, reference in zip(found, expected["per_position"], strict=True):
        assert slot.weight == reference["total_weight"]
        for name, theirs in {
            "ece": "ece",
            "auc": "auc",
            "brier": "brier",
            "predicted": "pred_mean",
            "observed": "target_mean",
        }.items():
            same(getattr(slot, name), reference[theirs])
        assert [(b.index, b.weight) for b in slot.bins] == [(b["bin"], b["weight"]) for b in reference["reliability"]]
        for ours, theirs in zip(slot.bins, reference["reliability"], strict=True):
            same(ours.predicted, theirs["avg_pred"])
            same(ours.observed, theirs["avg_target"])
    summary = {
        "ece": "ece_mean",
        "auc": "auc_mean",
        "brier": "brier_mean",
        "predicted": "pred_mean",
        "observed": "target_mean",
    }
    for name, theirs in summary.items():
        same(weighted_mean(found, name), expected["summary"][theirs])


@pytest.mark.parametrize("index", range(3), ids=["bin edges", "one outcome only", "ties"])
def test_figures_at_the_edges(data, index):
    assert_figures(json.loads((data / "scheduling" / "calibration_edge_cases.json").read_text())["cases"][index])


@pytest.mark.parametrize("name", CASES_WITH_CONFIDENCE)
def test_figures_of_the_reference(shared, name):
    assert_figures(json.loads((shared / "parity" / name / "calibration.json").read_text()))


def test_auc_of_separated_and_of_reversed_predictions():
    outcome = np.array([0, 0, 1, 1])
    assert measure_reliability(np.array([0.1, 0.2, 0.8, 0.9]), outcome).auc == pytest.approx(1)
    assert measure_reliability(np.array([0.9, 0.8, 0.2, 0.1]), outcome).auc == pytest.approx(0)
    assert measure_reliability(np.full(4, 0.5), outcome).auc == pytest.approx(0.5)


# ---------------------------------------------------------------------- fitting

TRUE_TEMPERATURES = [2.0, 0.5, 1.5]


def synthetic_rounds(num_rounds=4000, seed=0):
    """Rounds of a head whose logits are too sure or not sure enough, by a factor known for each slot."""
    generator = torch.Generator().manual_seed(seed)
    true_logits = torch.randn(num_rounds, 3, generator=generator) + 0.5
    passes = torch.rand(num_rounds, 3, generator=generator) < torch.sigmoid(true_logits)
    logits = true_logits * torch.tensor(TRUE_TEMPERATURES)
    return ConfidenceRounds(logits, passes.long().cumprod(1).bool(), torch.full((num_rounds,), 3))


def test_temperatures_are_found_again_and_hold_on_other_rounds():
    calibration = fit_temperatures(synthetic_rounds())
    np.testing.assert_allclose(calibration.temperatures, TRUE_TEMPERATURES, rtol=0.25)
    assert calibration.notes == ["", "", ""]
    held_out = synthetic_rounds(seed=1)
    before = measure_calibration(held_out)
    after = measure_calibration(held_out, calibration.temperatures)
    for slot in range(3):
        assert after[slot].ece < 0.03 and after[slot].ece < 0.6 * before[slot].ece
        assert calibration.after[slot].ece <= calibration.before[slot].ece


def test_the_order_within_a_slot_is_kept():
    logits = torch.randn(500, 3)
    calibrated = calibrated_confidence(logits, fit_temperatures(synthetic_rounds()).temperatures)
    assert (calibrated.gather(0, logits.argsort(0)).diff(dim=0) >= 0).all()


def test_calibrated_confidences_hardly_change():
    rounds = synthetic_rounds()
    rounds = rounds._replace(confidence_logits=rounds.confidence_logits / torch.tensor(TRUE_TEMPERATURES))
    np.testing.assert_allclose(fit_temperatures(rounds).temperatures, 1.0, rtol=0.25)


def test_earlier_slots_are_fixed_when_a_later_one_is_fitted():
    rounds = synthetic_rounds()
    shorter = ConfidenceRounds(
        rounds.confidence_logits[:, :2], rounds.accepted_prefix[:, :2], rounds.counts.clamp(max=2)
    )
    assert fit_temperatures(rounds).temperatures[:2] == pytest.approx(fit_temperatures(shorter).temperatures)


def test_too_few_rounds_keep_one_and_say_so():
    rounds = synthetic_rounds()
    counts = torch.where(torch.arange(len(rounds.counts)) < 50, 3, 2)
    calibration = fit_temperatures(rounds._replace(counts=counts))
    assert calibration.temperatures[2] == 1.0 and calibration.temperatures[0] != 1.0
    assert calibration.notes[2] == "T = 1: seen in 50 rounds, 200 are needed."
    assert calibration.notes[2] in str(calibration)
    assert calibration.after[2].weight == 50


def test_a_single_outcome_keeps_one_and_says_so():
    rounds = synthetic_rounds()
    calibration = fit_temperatures(rounds._replace(accepted_prefix=torch.ones(4000, 3, dtype=torch.bool)))
    assert calibration.temperatures == [1.0] * 3 and all("too few of one outcome" in note for note in calibration.notes)


def test_slots_that_were_not_verified_do_not_count():
    rounds = synthetic_rounds()
    counts = torch.arange(len(rounds.counts)) % 4
    nonsense = torch.arange(3) >= counts[:, None]
    spoilt = rounds._replace(
        counts=counts,
        confidence_logits=rounds.confidence_logits.masked_fill(nonsense, 99.0),
        accepted_prefix=rounds.accepted_prefix & ~nonsense,
    )
    expected, found = fit_temperatures(rounds._replace(counts=counts)), fit_temperatures(spoilt)
    assert found.temperatures == pytest.approx(expected.temperatures)
    assert found.notes == expected.notes
    for name in ("before", "after"):
        for ours, theirs in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert (ours.ece, ours.weight) == pytest.approx((theirs.ece, theirs.weight))


@pytest.mark.parametrize("temperatures", [None, [2.0, 0.5, 1.0]], ids=["before calibration", "after calibration"])
def test_rounds_from_records(temperatures):
    logits = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
    confidence = calibrated_confidence(logits, temperatures)
    records = [
        SimpleNamespace(confidence=confidence[0].tolist(), verified=3, accepted=1),
        SimpleNamespace(confidence=[], verified=0, accepted=0),
        SimpleNamespace(confidence=confidence[1, :2].tolist(), verified=1, accepted=1),
    ]
    rounds = ConfidenceRounds.from_records(records, num_slots=3, temperatures=temperatures)
    torch.testing.assert_close(rounds.confidence_logits[0], logits[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(rounds.confidence_logits[1, :2], logits[1, :2], rtol=1e-5, atol=1e-5)
    assert rounds.counts.tolist() == [3, 1]
    assert rounds.accepted_prefix.tolist() == [[True, False, False], [True, False, False]]


def test_certainty_in_a_record_has_a_finite_logit():
    record = SimpleNamespace(confidence=[1.0, 0.0], verified=2, accepted=1)
    logits = ConfidenceRounds.from_records([record], num_slots=2).confidence_logits
    assert logits.isfinite().all() and logits[0, 0] > 15 and logits[0, 1] < -15


def test_no_rounds_at_all():
    rounds = ConfidenceRounds.from_records([], num_slots=3)
    calibration = fit_temperatures(rounds)
    assert calibration.temperatures == [1.0] * 3 and calibration.before[0].weight == 0
    assert math.isnan(weighted_mean(calibration.before, "ece"))
    assert "0 rounds" in str(calibration)


def test_wrong_shapes_and_temperatures_are_refused():
    rounds = synthetic_rounds(num_rounds=10)
    with pytest.raises(ValueError, match=r"counts \[9\]"):
        fit_temperatures(rounds._replace(counts=rounds.counts[:9]))
    with pytest.raises(ValueError, match="must be positive"):
        fit_temperatures(rounds, grid=[1.0, 0.0])


def test_survival_multiplies_in_double_precision():
    confidence = torch.full((1, 30), 0.9)
    assert prefix_survival(confidence)[0, -1].item() == pytest.approx(float(confidence[0, 0]) ** 30, rel=1e-12)
    logits = torch.tensor([5.0, -5.0, 5.0])
    assert prefix_survival(calibrated_confidence(logits))[1:].max() < 0.01


def test_reliability_diagram(tmp_path):
    pytest.importorskip("matplotlib")
    plot_reliability(fit_temperatures(synthetic_rounds(500))).savefig(tmp_path / "reliability.png")
    assert (tmp_path / "reliability.png").stat().st_size > 1000
