"""What is recorded of each round, and the numbers made of it."""

import math
import threading

import pytest
from generation import rig

import tiny
from dspark_hf import SpeculationStats, record_speculation
from dspark_hf.generation import Round, StageClock
from dspark_hf.generation.telemetry import current_recorder, stage


def rounds(*counts):
    """Rounds of `(verified, accepted)`; the target's own token is committed as well."""
    return [Round(drafted=v, verified=v, accepted=a, committed=a + 1) for v, a in counts]


def test_totals():
    stats = SpeculationStats(rounds=rounds((4, 4), (4, 1), (2, 0)))
    assert stats.num_committed == 8
    assert stats.acceptance_length == 8 / 3
    assert stats.acceptance_rate == 0.5


def test_acceptance_by_slot_counts_only_slots_that_were_reached():
    stats = SpeculationStats(rounds=rounds((4, 4), (4, 1), (2, 0), (3, 1), (0, 0)))
    # Slot 0: verified four times, passed three times; slot 1: reached three times, passed once; then once each.
    assert stats.conditional_acceptance == [3 / 4, 1 / 3, 1.0, 1.0]


def test_a_slot_that_was_never_reached_has_no_rate():
    rates = SpeculationStats(rounds=rounds((3, 0))).conditional_acceptance
    assert rates[0] == 0.0 and all(math.isnan(r) for r in rates[1:])


def test_without_rounds():
    stats = SpeculationStats()
    assert math.isnan(stats.acceptance_length) and math.isnan(stats.acceptance_rate)
    assert stats.conditional_acceptance == [] and stats.num_committed == 0


@pytest.mark.parametrize(
    ("accepted", "committed", "expected"),
    [(2, 3, (4, 2, 3)), (4, 5, (4, 4, 5)), (0, 1, (4, 0, 1)), (4, 2, (2, 2, 2)), (2, 2, (2, 2, 2)), (3, 1, (1, 1, 1))],
    ids=[
        "some pass",
        "all pass",
        "none passes",
        "ends inside the drafts",
        "ends with the last that passes",
        "ends at once",
    ],
)
def test_a_round_that_ends_the_output_counts_up_to_the_end(accepted, committed, expected):
    r = Round.cut_to_output(row=3, drafted=4, verified=4, accepted=accepted, committed=committed)
    assert (r.verified, r.accepted, r.committed) == expected
    assert r.drafted == 4 and r.row == 3


class Ticking(StageClock):
    """A clock whose readings are given."""

    def __init__(self, *readings):
        super().__init__()
        self.readings = list(readings)

    def _read(self):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("time.perf_counter", lambda: self.readings.pop(0))
            super()._read()


def test_rows_share_the_times_of_their_round():
    stats = SpeculationStats(clock=Ticking(0, 7, 10, 12, 20, 26, 30, 31))
    for name in ("prompt", "draft", "verify", "commit"):
        with stats.clock.stage(name):
            pass
    pair = rounds((4, 4), (4, 1))
    stats.add(pair)
    assert stats.rounds == pair and stats.prefill_s == 7
    assert all((r.drafting_s, r.verifying_s, r.elsewhere_s) == (1, 3, 0.5) for r in pair)
    more = SpeculationStats(clock=stats.clock)
    more.add(rounds((1, 1)))
    assert more.prefill_s == more.rounds[0].drafting_s == 0, "a clock may have run before"


def test_the_time_of_a_nested_stage_is_counted_once():
    clock = Ticking(0, 2, 5, 6, 16, 20)
    with clock.stage("draft"):
        with clock.stage("backbone"):
            pass
        with clock.stage("confidence"):
            pass
    assert clock.seconds == {("draft", "draft"): 2 + 1 + 4, ("draft", "backbone"): 3, ("draft", "confidence"): 10}
    assert clock.total("draft") == 20


def test_a_clock_waits_for_the_device_before_each_reading():
    waits = []
    clock = StageClock(lambda: waits.append(None))
    with record_speculation(clock), stage("draft"), stage("backbone"):
        pass
    with stage("draft"):
        pass
    assert len(waits) == 4


def test_recording_covers_every_call_inside_and_none_outside():
    target = rig.target()
    call = tiny.prompt() | {"max_new_tokens": 8, "do_sample": False, "assistant_model": tiny.random_drafter(target)}
    target.generate(**call)
    with record_speculation() as stats:
        assert current_recorder() is stats
        target.generate(**call)
        once = len(stats.rounds)
        target.generate(**call)
    target.generate(**call)
    assert len(stats.rounds) == 2 * once > 0
    assert stats.num_committed == 2 * 7
    assert stats.prefill_s > 0 and all(r.drafting_s > 0 and r.verifying_s > 0 for r in stats.rounds)
    assert current_recorder() is None


def test_a_nested_record_counts_its_calls_alone():
    target = rig.target()
    call = tiny.prompt() | {"max_new_tokens": 6, "do_sample": False, "assistant_model": tiny.random_drafter(target)}
    with record_speculation() as outer:
        with record_speculation() as inner:
            target.generate(**call)
        assert outer.rounds == [] and inner.num_committed == 5
        target.generate(**call)
    assert outer.num_committed == 5


def test_recording_ends_with_an_exception():
    with pytest.raises(KeyError), record_speculation():
        raise KeyError
    assert current_recorder() is None


def test_each_thread_has_its_own_record():
    seen = []
    with record_speculation():
        thread = threading.Thread(target=lambda: seen.append(current_recorder()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_confidence_is_recorded_where_there_is_a_head():
    target = rig.target()
    for head in (True, False):
        drafter = tiny.random_drafter(target, enable_confidence_head=head)
        with record_speculation() as stats:
            target.generate(**tiny.prompt(), max_new_tokens=8, do_sample=False, assistant_model=drafter)
        first = stats.rounds[0]
        assert len(first.confidence) == (first.drafted if head else 0)
        assert all(0 <= c <= 1 for c in first.confidence)


@pytest.mark.parametrize("slot", range(rig.BLOCK_SIZE + 1), ids=lambda n: f"after {n} tokens")
def test_counts_add_up_where_the_output_ends_inside_a_block(slot):
    target = rig.target()
    text = rig.ids_of(target.generate(**tiny.prompt(), max_new_tokens=8, do_sample=False))
    outcome = rig.compare(target, eos_token_id=text[9 + slot], pad_token_id=0, max_new_tokens=8)
    for stats in outcome.stats.values():
        assert stats.num_committed == len(rig.ids_of(outcome.plain)) - 9 - 1
        assert all(r.accepted <= r.verified <= r.drafted and r.committed <= r.accepted + 1 for r in stats.rounds)
