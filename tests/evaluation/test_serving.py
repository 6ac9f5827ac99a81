"""Speed under load: measurements, results and resuming; and the throughput scheduler stops drafting where it does not pay."""

import pytest

import tiny
from dspark_hf.evaluation.serving import (
    FIXED,
    THROUGHPUT,
    Load,
    LoadFile,
    batch_of,
    measure_load,
    run_serving,
    serving_methods,
)
from dspark_hf.evaluation.serving_report import margins_of, results_of
from dspark_hf.scheduling import ThroughputCurve

CHEAP = ThroughputCurve([1, 2], [1.0, 1.001], drafting={1: 0.01})
EXPENSIVE = ThroughputCurve([1, 2], [1.0, 2.0], drafting={1: 3.0})


def prompts(num=3):
    return [tiny.prompt(4 + i, seed=i)["input_ids"] for i in range(num)]


def loads(curve, num_rows=2, num_new_tokens=24):
    target = tiny.bigram()
    inputs = batch_of(prompts(), num_rows, target.device)
    methods = serving_methods(tiny.perfect_drafter(target), curve)
    return {m.name: measure_load(target, inputs, m, num_new_tokens, 0.0, 0) for m in methods}


def test_prompts_fill_a_batch_in_turn_and_are_padded_on_the_left():
    batch = batch_of(prompts(2), 3, "cpu")
    assert batch["attention_mask"].tolist() == [[0, 1, 1, 1, 1], [1] * 5, [0, 1, 1, 1, 1]]
    assert batch["input_ids"][2, 1:].tolist() == prompts(1)[0][0].tolist()


def test_every_method_decodes_as_many_tokens_and_accepted_drafts_save_passes():
    measured = loads(CHEAP)
    assert {load.tokens for load in measured.values()} == {2 * 23}
    assert measured["plain"].passes == 23 and measured["plain"].verify_length == 0.0
    for name in (FIXED, THROUGHPUT):
        assert measured[name].passes < 12 and measured[name].acceptance_rate == 1.0
        assert measured[name].drafted_share == 1.0


def test_the_scheduler_decodes_plainly_where_verification_is_expensive():
    measured = loads(EXPENSIVE, num_new_tokens=48)
    assert measured[THROUGHPUT].verify_length < 0.5 and measured[THROUGHPUT].drafted_share < 0.5
    assert measured[FIXED].verify_length > 2 and measured[FIXED].drafted_share == 1.0


def test_an_interrupted_run_resumes(tmp_path):
    target = tiny.bigram()
    methods = serving_methods(tiny.perfect_drafter(target), CHEAP)
    seen = []
    for repeats in (1, 2):
        file = LoadFile(tmp_path / "loads.jsonl", {"a": 1})
        run_serving(
            target,
            prompts(),
            methods,
            [1, 2],
            file,
            num_new_tokens=6,
            num_repeats=repeats,
            on_load=lambda load, done, total: seen.append((load.repeat, done, total)),
        )
        file.close()
    assert [s[0] for s in seen] == [0] * 10 + [1] * 10
    assert seen[9][1:] == (10, 10) and seen[19][1:] == (20, 20)
    with pytest.raises(ValueError, match="other settings"):
        LoadFile(tmp_path / "loads.jsonl", {"a": 2})


def load(method, seconds, repeat=0, batch=2, verify_length=0.0):
    return Load(batch, method, repeat, seconds, 100, 50, verify_length)


def test_medians_speedups_and_margins():
    measured = [load("plain", s, i) for i, s in enumerate((10.0, 5.0, 8.0))]
    measured += [load(FIXED, 10.0), load(THROUGHPUT, 4.0, verify_length=1.5)]
    results = {r["method"]: r for r in results_of(measured)}
    assert results["plain"]["tokens_per_second"] == pytest.approx(12.5) and results["plain"]["per_row"] == 6.25
    assert results[FIXED]["speedup"] == pytest.approx(0.8)
    assert margins_of(list(results.values())) == {2: pytest.approx(1.0)}
