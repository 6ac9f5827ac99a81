"""Speed under load: measurements, results, files; and that the throughput scheduler can leave drafting be."""

import json

import pytest
import tiny_folders

import tiny
from dspark_hf.evaluation.serving import (
    ASYNC,
    FIXED,
    THROUGHPUT,
    Load,
    LoadFile,
    batch_of,
    main,
    margins_of,
    markdown_of,
    measure_load,
    results_of,
    run_serving,
    serving_methods,
)
from dspark_hf.scheduling import ThroughputCurve

CHEAP = ThroughputCurve([1, 2], [1.0, 1.001], drafting={1: 0.01})
DEAR = ThroughputCurve([1, 2], [1.0, 2.0], drafting={1: 3.0})


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


def test_every_method_decodes_the_same_tokens_in_fewer_passes_where_drafts_pass():
    measured = loads(CHEAP)
    assert {load.tokens for load in measured.values()} == {2 * 23}
    assert measured["plain"].passes == 23 and measured["plain"].verify_length == 0.0
    for name in (FIXED, THROUGHPUT):
        assert measured[name].passes < 12 and measured[name].acceptance_rate == 1.0
        assert measured[name].drafted_share == 1.0


def test_where_tokens_are_dear_the_scheduler_decodes_plainly():
    measured = loads(DEAR, num_new_tokens=48)
    assert measured[THROUGHPUT].verify_length < 0.5 and measured[THROUGHPUT].drafted_share < 0.5
    assert measured[FIXED].verify_length > 2 and measured[FIXED].drafted_share == 1.0


def test_a_run_goes_on_where_it_stopped(tmp_path):
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


def test_the_command_writes_table_figures_and_document(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folders = tiny_folders.save(tmp_path / "models")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["1 + 1?"]}\n{"turns": ["and 2 + 22?"]}\n')
    output = tmp_path / "out"
    models = ["--target", str(folders.target), "--drafter", str(folders.perfect), "--prompts", str(questions)]
    limits = ["--batches", "1,2", "--max-new-tokens", "6", "--repeats", "1", "--output", str(output)]
    main(models + limits)
    document = json.loads((output / "serving.json").read_text())
    assert {(r["batch"], r["method"]) for r in document["results"]} == {
        (batch, method) for batch in (1, 2) for method in ("plain", FIXED, "threshold 0.5", THROUGHPUT, ASYNC)
    }
    assert set(document["curve"]["drafting"]) == {"1", "2"} and document["environment"]["cpu"]
    assert (output / "serving.md").read_text() == markdown_of(document) == capsys.readouterr().out.removesuffix("\n")
    assert all((output / f"{name}.png").exists() for name in ("throughput", "budget"))
