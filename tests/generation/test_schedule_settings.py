"""Schedulers by name, and the cost curve that travels with the drafter."""

import json

import pytest
import torch
from generation import rig

import tiny
from dspark_hf import DSparkDrafter, record_speculation
from dspark_hf.generation.draft_settings import DraftOptions, backoff_of, draft_settings
from dspark_hf.scheduling import (
    AsyncThroughputScheduler,
    ConfidenceThreshold,
    FixedLength,
    ThroughputCurve,
    ThroughputScheduler,
)
from dspark_hf.scheduling.throughput_curve import describe

KINDS = {
    "fixed": FixedLength,
    "threshold": ConfidenceThreshold,
    "throughput": ThroughputScheduler,
    "async_throughput": AsyncThroughputScheduler,
}


def curve_for(target, token_s=0.1, **fields):
    return ThroughputCurve([1, 2], [1.0, 1.0 + token_s], describe(target) | fields, {1: 0.1})


def drafter_with_curve(target):
    drafter = tiny.random_drafter(target)
    drafter.throughput_curve = curve_for(target)
    return drafter


def scheduler_of(drafter, target, threshold=None, scheduler=None):
    return draft_settings(drafter, target, DraftOptions(None, threshold, scheduler))[1]


@pytest.mark.parametrize("name", KINDS)
def test_by_name_in_the_call_and_in_the_drafters_settings(name):
    target = rig.target()
    drafter = drafter_with_curve(target)
    assert type(scheduler_of(drafter, target, scheduler=name)) is KINDS[name]
    drafter.generation_config.verify_scheduler = name
    assert type(scheduler_of(drafter, target)) is KINDS[name]
    plain = target.generate(**tiny.prompt(), max_new_tokens=20, do_sample=False)
    assert torch.equal(
        target.generate(**tiny.prompt(), max_new_tokens=20, do_sample=False, assistant_model=drafter), plain
    )


def test_arguments_of_the_call_override_the_drafters_settings():
    target = rig.target()
    drafter = drafter_with_curve(target)
    drafter.generation_config.verify_scheduler = "throughput"
    assert type(scheduler_of(drafter, target, threshold=0.5)) is ConfidenceThreshold
    assert type(scheduler_of(drafter, target, scheduler="fixed")) is FixedLength


def test_a_threshold_by_name_takes_its_value_from_the_settings():
    target = rig.target()
    drafter = tiny.random_drafter(target)
    drafter.generation_config.assistant_confidence_threshold = 0.25
    assert scheduler_of(drafter, target, scheduler="threshold").threshold == 0.25


def test_an_unknown_name_and_a_missing_curve_are_refused():
    target = rig.target()
    with pytest.raises(ValueError, match="Unknown verify scheduler 'fast'"):
        scheduler_of(tiny.random_drafter(target), target, scheduler="fast")
    with pytest.raises(ValueError, match="dspark-hf profile"):
        scheduler_of(tiny.random_drafter(target), target, scheduler="throughput")


def test_expensive_passes_verify_fewer_drafts():
    target = rig.target()
    drafter = tiny.random_drafter(target)
    verified = []
    for token_s in (0.001, 0.4):
        drafter.throughput_curve = curve_for(target, token_s)
        with record_speculation() as stats:
            target.generate(
                **tiny.prompt(),
                max_new_tokens=30,
                do_sample=False,
                assistant_model=drafter,
                verify_scheduler="throughput",
                drafting_backoff=False,
            )
        verified.append(sum(r.verified for r in stats.rounds) / len(stats.rounds))
    assert verified[1] < verified[0]


# ---------------------------------------------------------------------- files


def test_settings_and_curve_are_saved_with_the_drafter(tmp_path):
    target = rig.target()
    drafter = drafter_with_curve(target)
    drafter.generation_config.verify_scheduler = "async_throughput"
    drafter.generation_config.drafting_backoff = False
    drafter.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "throughput_curve.json").read_text())["drafting"] == {"1": 0.1}
    loaded = DSparkDrafter.from_pretrained(tmp_path)
    assert loaded.generation_config.verify_scheduler == "async_throughput"
    assert loaded.generation_config.drafting_backoff is False
    assert loaded.throughput_curve.to_dict() == drafter.throughput_curve.to_dict()
    assert type(scheduler_of(loaded, target)) is AsyncThroughputScheduler


def test_without_a_curve_no_file_is_written(tmp_path):
    tiny.random_drafter(rig.target()).save_pretrained(tmp_path)
    assert not (tmp_path / "throughput_curve.json").exists()
    assert DSparkDrafter.from_pretrained(tmp_path).throughput_curve is None


def test_a_file_that_holds_no_curve_is_refused(tmp_path):
    tiny.random_drafter(rig.target()).save_pretrained(tmp_path)
    (tmp_path / "throughput_curve.json").write_text('{"pass_s": [1]}')
    with pytest.raises(ValueError, match="not a throughput curve"):
        DSparkDrafter.from_pretrained(tmp_path)


def test_a_curve_of_another_model_is_not_used():
    target = rig.target()
    drafter = tiny.random_drafter(target)
    drafter.throughput_curve = curve_for(target, config_hash="another", model="another/model")
    with pytest.raises(ValueError, match="weighs drafts against"):
        scheduler_of(drafter, target, scheduler="throughput")
    backoff = backoff_of(drafter, target, FixedLength(), 1, None)
    assert backoff._costs.measured_on == {"assumed": True}


def test_back_off_uses_the_schedulers_curve_then_the_drafters():
    target = rig.target()
    drafter = drafter_with_curve(target)
    own = curve_for(target)
    assert backoff_of(drafter, target, ThroughputScheduler(own), 1, None)._costs is own
    assert backoff_of(drafter, target, FixedLength(), 1, None)._costs is drafter.throughput_curve


def weights_of(*modules):
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


@pytest.mark.parametrize(
    ("build", "passes"), [(tiny.random_drafter, 1), (tiny.eagle3_drafter, tiny.BLOCK_SIZE)], ids=["DSpark", "EAGLE-3"]
)
def test_assumed_drafting_reads_the_weights_once_for_each_pass_of_the_drafter(build, passes):
    target = rig.target()
    drafter = build(target)
    read = weights_of(drafter, target.lm_head)
    of_the_target = weights_of(target) - weights_of(target.get_input_embeddings())
    costs = backoff_of(drafter, target, FixedLength(), 1, None)._costs
    assert costs.drafting_seconds(1) / costs.pass_seconds(1, 0) == pytest.approx(passes * read / of_the_target)
