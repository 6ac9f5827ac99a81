"""The cost curve: reading, files, repair, measuring."""

import json
import sys
import warnings

import numpy as np
import pytest
import torch

import tiny
from dspark_hf.scheduling import ThroughputCurve, plot_curve
from dspark_hf.scheduling.throughput_curve import config_hash, describe, never_falling

# ---------------------------------------------------------------------- reading


def test_measured_points_are_met_and_between_them_seconds_are_linear():
    curve = ThroughputCurve([1, 2, 4], [0.010, 0.011, 0.015])
    np.testing.assert_allclose(curve.seconds([1, 2, 3, 4]), [0.010, 0.011, 0.013, 0.015])
    np.testing.assert_allclose(curve.steps_per_second(3), 1 / 0.013)


def test_beyond_the_measured_points():
    curve = ThroughputCurve([2, 4], [0.010, 0.014])
    np.testing.assert_allclose(curve.seconds([1, 2, 6, 14]), [0.010, 0.010, 0.018, 0.034])
    assert ThroughputCurve([1], [0.01]).seconds(100) == pytest.approx(0.01)


def test_table_grows_and_agrees_with_the_curve():
    curve = ThroughputCurve([1, 2, 4], [0.010, 0.011, 0.015])
    for longest in (3, 50, 10):
        table = curve.table(longest)
        assert len(table) > longest
        np.testing.assert_allclose(table[1 : longest + 1], curve.steps_per_second(np.arange(1, longest + 1)))


def test_noise_is_repaired_and_the_measurements_are_kept():
    curve = ThroughputCurve([1, 2, 3, 4], [1.0, 3.0, 2.0, 4.0])
    np.testing.assert_allclose(curve.pass_s, [1.0, 2.5, 2.5, 4.0])
    assert curve.measured_s.tolist() == [1.0, 3.0, 2.0, 4.0]


@pytest.mark.parametrize("seed", range(10))
def test_repair_is_the_nearest_never_falling_sequence(seed):
    rng = np.random.default_rng(seed)
    values = rng.uniform(0, 1, 8) + 0.1 * np.arange(8)
    repaired = never_falling(values)
    assert (np.diff(repaired) >= 0).all()
    # min-max formula of isotonic regression
    expected = [max(min(values[i : j + 1].mean() for j in range(k, 8)) for i in range(k + 1)) for k in range(8)]
    np.testing.assert_allclose(repaired, expected)


def test_overhead_is_added_to_every_pass_and_noted():
    curve = ThroughputCurve([1, 2], [0.01, 0.02]).with_overhead(0.005).with_overhead(0.001)
    np.testing.assert_allclose(curve.seconds([1, 2]), [0.016, 0.026])
    assert curve.measured_on["overhead_s"] == pytest.approx(0.006)


@pytest.mark.parametrize(
    ("counts", "seconds"),
    [([], []), ([0, 1], [1.0, 1.0]), ([2, 1], [1.0, 1.0]), ([1, 2], [1.0]), ([1], [0.0]), ([1], [float("nan")])],
    ids=["nothing", "no tokens", "falling", "a time is missing", "no time", "not a number"],
)
def test_values_that_cannot_be_measurements_are_refused(counts, seconds):
    with pytest.raises(ValueError, match=r"rising numbers of tokens|must be positive"):
        ThroughputCurve(counts, seconds)


# ---------------------------------------------------------------------- what it was measured on


@pytest.fixture(scope="module")
def target():
    return tiny.qwen3()


@pytest.fixture(scope="module")
def measured(target):
    return ThroughputCurve.measure(target, (1, 2, 4), context_length=8, num_warmup=1, num_repeats=3)


def test_a_measurement_records_the_machine(target, measured):
    assert measured.token_counts.tolist() == [1, 2, 4] and (measured.measured_s > 0).all()
    on = measured.measured_on
    assert on["model"] == "Qwen3ForCausalLM" and on["dtype"] == "float32" and on["device"].startswith("cpu: ")
    assert (on["context_length"], on["num_rows"], on["compiled"], on["num_repeats"]) == (8, 1, False, 3)
    assert on["versions"]["torch"] == torch.__version__


def test_a_saved_curve_comes_back(target, measured, tmp_path):
    measured.save(tmp_path / "curve.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = ThroughputCurve.load(tmp_path / "curve.json", target)
    assert loaded.to_dict() == measured.to_dict()
    assert json.loads((tmp_path / "curve.json").read_text())["measured_on"]["context_length"] == 8


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda on: on | {"config_hash": "another"}, "config_hash"),
        (lambda on: on | {"dtype": "bfloat16"}, "dtype was 'bfloat16' and is 'float32'"),
        (lambda on: on | {"device": "cuda: NVIDIA H200"}, "device was 'cuda: NVIDIA H200'"),
    ],
    ids=["another model", "another number type", "another device"],
)
def test_a_curve_of_something_else_is_refused(target, measured, tmp_path, change, named):
    ThroughputCurve([1], [0.01], change(measured.measured_on)).save(tmp_path / "curve.json")
    with pytest.raises(ValueError, match=named) as caught:
        ThroughputCurve.load(tmp_path / "curve.json", target)
    assert "ThroughputCurve.measure(target)" in str(caught.value)


def test_a_wrong_model_is_recognised_by_its_configuration(measured):
    with pytest.raises(ValueError, match="config_hash"):
        measured.check(tiny.qwen3(num_hidden_layers=2))
    with pytest.raises(ValueError, match="dtype"):
        measured.check(tiny.qwen3().to(torch.bfloat16))
    measured.check(tiny.qwen3(seed=1))  # other weights cost the same


@pytest.mark.parametrize("change", [{"versions": {"torch": "2.0"}}, {"num_threads": 64}], ids=["versions", "threads"])
def test_a_curve_that_may_be_off_warns(target, measured, change):
    doubtful = ThroughputCurve([1], [0.01], measured.measured_on | change)
    with pytest.warns(UserWarning, match="may be off: " + next(iter(change))):
        doubtful.check(target)


def test_a_curve_from_numbers_fits_any_target(target):
    ThroughputCurve.from_steps_per_second({1: 10.0}).check(target)


def test_the_path_of_a_model_does_not_matter(target):
    config = tiny.qwen3().config
    config.name_or_path = "/somewhere/else"
    assert config_hash(config) == config_hash(target.config)
    assert describe(target)["config_hash"] == config_hash(target.config)


# ---------------------------------------------------------------------- measuring


@pytest.mark.parametrize("family", ["mistral", "qwen3_5"], ids=["sliding window", "recurrent state"])
def test_every_pass_sees_the_same_context(family, monkeypatch):
    target = tiny.TARGETS[family]()
    lengths = []
    original = type(target).forward

    def forward(self, *args, **kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        lengths.append(0 if cache is None else cache.get_seq_length())
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(target), "forward", forward)
    ThroughputCurve.measure(target, (1, 3), context_length=12, num_warmup=0, num_repeats=2)
    assert lengths == [0, 12, 12, 12, 12]


def test_rows_share_the_tokens(target):
    curve = ThroughputCurve.measure(target, (4, 8), context_length=4, num_rows=4, num_warmup=0, num_repeats=1)
    assert curve.measured_on["num_rows"] == 4
    with pytest.raises(ValueError, match="multiples of num_rows=4"):
        ThroughputCurve.measure(target, (2, 4), num_rows=4)


@pytest.mark.slow
def test_measuring_a_compiled_target(target):
    curve = ThroughputCurve.measure(target, (1, 2), context_length=4, compile=True, num_warmup=1, num_repeats=1)
    assert curve.measured_on["compiled"] is True


# ---------------------------------------------------------------------- plot


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot_curve(ThroughputCurve([1, 2], [0.01, 0.02], {"model": "m"})).savefig(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_plot_without_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"dspark-hf\[plot\]"):
        plot_curve(ThroughputCurve([1], [0.01]))
