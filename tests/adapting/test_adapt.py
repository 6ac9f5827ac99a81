"""An adaptation from prompts to a verdict, interrupted anywhere."""

import json
from dataclasses import replace

import pytest
import tiny_folders

import tiny
from dspark_hf import Drafter
from dspark_hf.adapting import AdaptSettings, adapt

pytest.importorskip("scipy")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    for name, text in (("own", "{} + {}?"), ("general", "what is {} of {}?")):
        rows = ({"prompt": text.format(i, 3 * i)} for i in range(60))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def settings(folders, prompts, output, **changes):
    given = AdaptSettings(
        target=str(folders.target),
        drafter=str(folders.random),
        prompts=str(prompts / "own.jsonl"),
        output=str(output),
        general=str(prompts / "general.jsonl"),
        general_prompts=40,
        held_out=0.5,
        max_new_tokens=16,
        temperature=0.0,
        max_steps=24,
        evaluations=4,
        learning_rate=1e-2,
        num_anchors=8,
        device="cpu",
        training={"disable_tqdm": True, "weight_decay": 0.0},
    )
    return replace(given, **changes)


@pytest.fixture(scope="module")
def adapted(folders, prompts, tmp_path_factory):
    return adapt(settings(folders, prompts, tmp_path_factory.mktemp("whole") / "out"))


def test_the_drafter_has_learned_and_is_saved_as_it_was_compared(adapted, folders):
    assert adapted.prompts.gain.low > 0 and adapted.general.gain.low > 0
    assert "Use " in adapted.verdict
    saved, before = Drafter.from_pretrained(adapted.folder), Drafter.from_pretrained(folders.random)
    assert saved.dtype == before.dtype
    for name, tensor in saved.state_dict().items():
        assert tensor.equal(adapted.drafter.state_dict()[name].to(saved.dtype))
    assert saved.config.confidence_temperatures == adapted.calibration.temperatures
    document = json.loads((adapted.folder.parent / "adaptation.json").read_text())
    assert document == json.loads(json.dumps(adapted.document)) and document["steps"] == 24


@pytest.mark.parametrize("stage", ["Computing", "Training", "Calibrating", "Comparing"])
def test_an_interrupted_run_gives_the_same_drafter(adapted, folders, prompts, tmp_path, stage):
    def stop(line):
        if line.startswith(stage):
            raise KeyboardInterrupt

    given = settings(folders, prompts, tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        adapt(given, stop)
    again = adapt(given)
    assert again.prompts == adapted.prompts and again.general == adapted.general
    assert again.calibration.temperatures == adapted.calibration.temperatures


def test_other_settings_are_another_run(adapted, folders, prompts):
    with pytest.raises(ValueError, match="other settings: temperature"):
        adapt(settings(folders, prompts, adapted.folder.parent, temperature=1.0))


def test_too_few_prompts(folders, prompts, tmp_path):
    with pytest.raises(ValueError, match="12 answered prompts are too few"):
        adapt(settings(folders, prompts, tmp_path / "out", max_prompts=12))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT's call, not ours.
def test_lora_is_merged(folders, prompts, tmp_path):
    pytest.importorskip("peft")
    found = adapt(settings(folders, prompts, tmp_path / "out", lora_rank=4, general_prompts=0, max_steps=8))
    saved = Drafter.from_pretrained(found.folder)
    assert found.general is None and not any("lora" in name for name in saved.state_dict())
    before = Drafter.from_pretrained(folders.random)
    assert saved.state_dict().keys() == before.state_dict().keys()
    assert not saved.layers[0].mlp.up_proj.weight.equal(before.layers[0].mlp.up_proj.weight)


def test_a_drafter_without_confidences_is_not_calibrated(folders, prompts, tmp_path):
    tiny.random_drafter(tiny.bigram(), enable_confidence_head=False).save_pretrained(tmp_path / "unsure")
    given = settings(
        folders, prompts, tmp_path / "out", drafter=str(tmp_path / "unsure"), general_prompts=0, max_steps=4
    )
    found = adapt(given)
    assert found.calibration is None and Drafter.from_pretrained(found.folder).config.confidence_temperatures is None


def test_steps_follow_from_the_time(folders, prompts, tmp_path):
    said = []
    given = settings(folders, prompts, tmp_path / "out", max_steps=None, minutes=0.02, general_prompts=0)
    found = adapt(given, said.append)
    assert any(line.startswith("Timing") for line in said)
    assert not (tmp_path / "out" / "probe").exists()
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["steps"] == found.document["steps"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"held_out": 0.0}, "held_out is 0.0"), ({"minutes": 0}, "minutes is 0"), ({"patience": 0}, "patience is 0")],
)
def test_settings_are_checked(folders, prompts, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        settings(folders, prompts, tmp_path, **changes)
