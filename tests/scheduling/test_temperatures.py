"""Temperatures travel with the drafter and are applied where confidence is used."""

import pytest
import torch

import tiny
from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.scheduling import ConfidenceRounds, fit_temperatures

TEMPERATURES = [2.0, 0.5, 1.0, 1.5]


def recorded(target, drafter, **settings):
    with record_speculation() as stats:
        target.generate(**tiny.prompt(), assistant_model=drafter, max_new_tokens=20, do_sample=False, **settings)
    return stats.rounds


def test_confidences_are_calibrated_and_their_logits_come_back():
    target = tiny.qwen3()
    plain, scaled = tiny.random_drafter(target), tiny.random_drafter(target, confidence_temperatures=TEMPERATURES)
    raw = ConfidenceRounds.from_records(recorded(target, plain), 4)
    again = ConfidenceRounds.from_records(recorded(target, scaled), 4, TEMPERATURES)
    known = torch.arange(4) < raw.counts[:, None]
    assert known.any(0).all()
    torch.testing.assert_close(again.confidence_logits[known], raw.confidence_logits[known], rtol=1e-3, atol=1e-3)
    assert torch.equal(again.accepted_prefix, raw.accepted_prefix) and torch.equal(again.counts, raw.counts)


def test_a_threshold_cuts_calibrated_confidence():
    target = tiny.bigram()
    drafter = tiny.perfect_drafter(target)  # confidence .99 everywhere
    assert {r.verified for r in recorded(target, drafter, assistant_confidence_threshold=0.9)[:-1]} == {4}
    drafter.config.confidence_temperatures = [1.0, 1.0, 10.0, 1.0]  # .61 at the third slot
    assert {r.verified for r in recorded(target, drafter, assistant_confidence_threshold=0.9)[:-1]} == {2}


def test_temperatures_are_saved_with_the_drafter(tmp_path):
    target = tiny.bigram()
    drafter = tiny.perfect_drafter(target)
    fitted = fit_temperatures(ConfidenceRounds.from_records(recorded(target, drafter), 4), min_rounds=1)
    drafter.config.confidence_temperatures = fitted.temperatures
    drafter.save_pretrained(tmp_path)
    assert DSparkDrafter.from_pretrained(tmp_path).config.confidence_temperatures == fitted.temperatures


@pytest.mark.parametrize("temperatures", [[1.0, 1.0], [1.0, 1.0, 0.0, 1.0], []], ids=["too few", "zero", "none"])
def test_invalid_temperatures_are_refused(temperatures):
    with pytest.raises(ValueError, match="one positive number for each of the 4 drafts"):
        tiny.random_drafter(tiny.qwen3(), confidence_temperatures=temperatures)
