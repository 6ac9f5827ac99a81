"""Pushing to a Hub, pulling from it, and the card that stands there; the Hub is a server on this machine."""

import json
import logging
import time
from pathlib import Path

import pytest
import torch
from hub_server import TOKEN, USER, Hub
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.evaluation import Method, Prompt, Task
from dspark_hf.evaluation.document import build_document
from dspark_hf.evaluation.records import Record, RecordFile, Turn
from dspark_hf.generation.telemetry import Round
from dspark_hf.hub import TrainingSummary, build_card, is_generated, write_card
from dspark_hf.hub.words import speed_in_words
from dspark_hf.scheduling import ThroughputCurve

pytestmark = pytest.mark.integration

NAME = f"{USER}/drafter"
TEMPERATURES = [1.5, 1.25, 1.125, 1.0]


@pytest.fixture
def target():
    return tiny.qwen3()


@pytest.fixture
def drafter(target) -> DSparkDrafter:
    drafter = tiny.random_drafter(target, target_name_or_path="maker/target")
    drafter.bind(target)
    drafter.generation_config.num_assistant_tokens = 3
    return drafter


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client waits before it tries again; not here."""
    monkeypatch.setattr(time, "sleep", lambda seconds: None)


def pull(tmp_path: Path, name: str = NAME, cache: str = "cache", **kwargs) -> DSparkDrafter:
    return DSparkDrafter.from_pretrained(name, cache_dir=tmp_path / cache, **kwargs)


def same(one: DSparkDrafter, other: DSparkDrafter) -> bool:
    return all(torch.equal(other.state_dict()[name], tensor) for name, tensor in one.state_dict().items())


def card_of(hub: Hub, name: str = NAME, revision: str = "main") -> ModelCard:
    return ModelCard(hub.tree(name, revision)["README.md"].decode())


def benchmark(folder: Path) -> dict:
    """A small `results.json`, made as `dspark-hf bench` makes it."""
    settings = {"target": "tiny", "temperature": 0, "max_new_tokens": 12, "dtype": "float32", "device": "cpu"}
    file = RecordFile(folder / "records.jsonl", settings)
    for prompt in range(3):
        rounds = [Round(4, 4, prompt, prompt + 1, [0.5] * 4, 0.01, 0.05, 0.002)] * 5
        file.add(Record("<sums>", prompt, "plain", [Turn([1] * 9, 3.0, 0.2, [1] * 8, 2**30)]))
        file.add(Record("<sums>", prompt, "dspark", [Turn([1] * 9, 1.5, 0.2, [5] * 5, 2**30, rounds)]))
        file.add_check(("<sums>", prompt, "dspark"), None)
    file.close()
    (folder / "records.jsonl").unlink()
    dspark = Method(
        "dspark", {}, type("Drafter", (), {"config": type("Config", (), {"confidence_temperatures": None})})
    )
    document = build_document([Method("plain"), dspark], [Task("<sums>", "math", [Prompt(["a"])] * 3)], settings, file)
    (folder / "results.json").write_text(json.dumps(document))
    return document


def describe(folder: Path) -> None:
    """All companion files of the weights."""
    TrainingSummary(
        command=f"dspark-hf train --hub_token {TOKEN} --out runs/a",
        data="Ten thousand sums.",
        datasets=["maker/sums"],
        settings={"learning_rate": 6e-4, "losses": "0.1 | 0.9"},
        results={"loss": 1.23456789},
        figures=["curve.png", "../secret.png"],
    ).save(folder)
    (folder / "curve.png").write_bytes(b"png")
    benchmark(folder)
    ThroughputCurve([1, 2, 4], [0.010, 0.011, 0.013], {"device": "cpu: abacus", "dtype": "float32"}).save(
        folder / "throughput_curve.json"
    )


# ---------------------------------------------------------------------- there and back


def test_what_is_pushed_comes_back(hub: Hub, drafter, target, tmp_path: Path):
    drafter.config.confidence_temperatures = TEMPERATURES
    info = drafter.push_to_hub("drafter", token=TOKEN, commit_message="First")
    assert info.oid == hub.repositories[NAME].branches["main"] and hub.repositories[NAME].messages[-1] == "First"
    pulled = pull(tmp_path)
    assert same(drafter, pulled)
    assert pulled.config.confidence_temperatures == TEMPERATURES
    assert pulled.generation_config.num_assistant_tokens == 3
    inputs = torch.arange(1, 6)[None]
    plain = target.generate(inputs, max_new_tokens=12, do_sample=False)
    assert torch.equal(target.generate(inputs, max_new_tokens=12, do_sample=False, assistant_model=pulled), plain)

    before = dict(hub.sent)
    assert before["model.safetensors"] > 0
    pull(tmp_path)
    assert dict(hub.sent) == before, "a second pull downloads nothing"
    pull(tmp_path, cache="fresh-cache")
    assert hub.sent["model.safetensors"] == 2 * before["model.safetensors"]


def test_revisions_are_apart(hub: Hub, drafter, target, tmp_path: Path):
    other = tiny.random_drafter(target, block_size=6)
    first = drafter.push_to_hub(NAME, token=TOKEN)
    other.push_to_hub(NAME, token=TOKEN, revision="v2")
    assert same(drafter, pull(tmp_path)) and same(other, pull(tmp_path, revision="v2"))
    other.push_to_hub(NAME, token=TOKEN)
    assert pull(tmp_path).config.block_size == 6
    assert same(drafter, pull(tmp_path, revision=first.oid))


def test_a_pull_request_leaves_the_branch_alone(hub: Hub, drafter):
    info = drafter.push_to_hub(NAME, token=TOKEN, create_pr=True)
    assert info.pr_url.endswith("/discussions/1")
    assert "config.json" in hub.tree(NAME, "refs/pr/1") and "config.json" not in hub.tree(NAME)


def test_a_private_repository(hub: Hub, drafter, tmp_path: Path):
    drafter.push_to_hub(NAME, private=True, token=TOKEN)
    assert hub.repositories[NAME].private
    with pytest.raises(OSError, match=NAME):
        pull(tmp_path, token=False)
    assert same(drafter, pull(tmp_path, token=TOKEN))
    with pytest.raises(HfHubHTTPError, match="401"):
        drafter.push_to_hub(NAME, token=False)


@pytest.mark.parametrize(
    ("method", "part"),
    [("PUT", "lfs/"), ("POST", "lfs/"), ("POST", "/commit/"), ("POST", "/preupload/"), ("POST", "repos/create")],
    ids=["upload", "verification", "commit", "announcement", "creation"],
)
def test_an_interrupted_push_changes_nothing_and_can_be_repeated(hub: Hub, drafter, tmp_path: Path, method, part):
    hub.fail(method, part, 403)
    with pytest.raises((HfHubHTTPError, RuntimeError)):
        drafter.push_to_hub(NAME, token=TOKEN)
    assert NAME not in hub.repositories or hub.tree(NAME).keys() == {".gitattributes"}
    drafter.push_to_hub(NAME, token=TOKEN)
    assert same(drafter, pull(tmp_path))
    uploads = [request for request in hub.requests if request.startswith("PUT /lfs/")]
    assert len(uploads) == (2 if method == "PUT" else 1), "what was uploaded is not uploaded again"


def test_an_upload_that_is_cut_off_is_taken_up_by_the_client(hub: Hub, drafter, tmp_path: Path):
    hub.fail("PUT", "lfs/", 0, times=2)
    drafter.push_to_hub(NAME, token=TOKEN)
    assert same(drafter, pull(tmp_path))


def test_saving_can_push_as_well(hub: Hub, drafter, tmp_path: Path):
    folder = tmp_path / "drafter"
    drafter.save_pretrained(folder, push_to_hub=True, token=TOKEN, custom_generate=True, commit_message="Saved")
    assert hub.repositories[NAME].messages[-1] == "Saved"
    pushed = hub.tree(NAME)
    written = {f.relative_to(folder).as_posix(): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    code = "custom_generate/generate.py"
    assert {name: content for name, content in written.items() if name != code}.items() <= pushed.items()
    assert (
        pushed[code] == written[code].replace(b"REPOSITORY = None", f'REPOSITORY = "{NAME}"'.encode()) != written[code]
    )
    assert json.loads(pushed["generation_config.json"])["num_assistant_tokens"] == 3
    assert pushed["custom_generate/requirements.txt"].startswith(b"dspark-hf")
    assert pushed.keys() - written.keys() == {".gitattributes", "README.md"}


def test_a_file_for_engines_can_be_pushed(hub: Hub, drafter, tmp_path: Path):
    drafter.push_to_hub(NAME, token=TOKEN, format="vllm-sglang")
    assert json.loads(hub.tree(NAME)["config.json"])["architectures"] == ["Qwen3DSparkModel"]
    assert f'vllm serve maker/target --speculative-config \'{{"method": "dspark", "model": "{NAME}"' in str(
        card_of(hub)
    )
    assert same(drafter, pull(tmp_path))


def test_the_token_is_nowhere(hub: Hub, drafter, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    describe(tmp_path)
    said = []
    hub.fail("PUT", "lfs/", 403)
    hub.fail("POST", "/commit/", 500)
    for _ in range(2):
        with pytest.raises((HfHubHTTPError, RuntimeError)) as refused:
            drafter.push_to_hub(NAME, token=TOKEN, private=True, companion_folder=tmp_path)
        said += [str(refused.getrepr(style="short")), repr(refused.value)]
    drafter.push_to_hub(NAME, token=TOKEN, companion_folder=tmp_path)
    pull(tmp_path, token=TOKEN)
    with pytest.raises(OSError, match="other") as refused:
        pull(tmp_path, name=f"{USER}/other", token=TOKEN)
    said += [str(refused.value), caplog.text, *hub.requests]
    files = [file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()]
    assert len(files) > 5 and len(caplog.text) > 0
    assert not [text for text in said if TOKEN in text]
    assert not [content for content in (*files, *hub.tree(NAME).values()) if TOKEN.encode() in content]


# ---------------------------------------------------------------------- the card


def test_the_card_says_what_is_known(hub: Hub, drafter, tmp_path: Path):
    hub.create("maker/target").commit("main", {"README.md": b"---\nlicense: mit\n---\n"}, "card")
    describe(tmp_path)
    drafter.config.confidence_temperatures = TEMPERATURES
    drafter.push_to_hub(NAME, token=TOKEN, companion_folder=tmp_path, tags=["mine"])
    card = card_of(hub)
    assert card.data.base_model == "maker/target" and card.data.to_dict()["base_model_relation"] == "adapter"
    assert card.data.license == "mit" and card.data.library_name == "dspark-hf"
    assert card.data.pipeline_tag == "text-generation" and card.data.datasets == ["maker/sums"]
    assert card.data.tags == ["speculative-decoding", "dspark", "mine"]
    for said in (
        f'from_pretrained("{NAME}"',
        "dspark-hf train --hub_token *** --out runs/a",
        "| learning_rate | 0.0006 |",
        "| losses | 0.1 \\| 0.9 |",
        "| Loss | 1.235 |",
        "![curve.png](curve.png)",
        "| &lt;sums&gt; (3) | dspark | ",
        "dspark: 3 of 3 greedy answers equal those of plain `generate`.",
        "dspark: 2.00 times the speed of plain `generate`",
        "1.5, 1.25, 1.12, 1",
        "| tokens | 1 | 2 | 4 |",
        "| ms | 10.0 | 11.0 | 13.0 |",
        "cpu: abacus, float32",
    ):
        assert said in card.text, said
    assert "secret" not in card.text and "None" not in card.text
    assert {"training.json", "results.json", "throughput_curve.json", "curve.png"} <= hub.tree(NAME).keys()


def test_no_pushed_file_holds_a_local_path(hub: Hub, tmp_path: Path):
    drafter, folder = tiny.random_drafter(tiny.qwen3()), tmp_path / "runs" / "a"
    drafter.config.target_name_or_path = str(tmp_path / "models" / "Target-1B")
    drafter.save_pretrained(folder)
    document = benchmark(folder)
    document["settings"] |= {"target": str(tmp_path / "models" / "Target-1B"), "drafters": [str(folder)]}
    (folder / "results.json").write_text(json.dumps(document))
    measured_on = {"model": str(tmp_path / "models" / "Target-1B"), "device": "cpu: abacus"}
    ThroughputCurve([1, 2], [0.010, 0.011], measured_on).save(folder / "throughput_curve.json")
    DSparkDrafter.from_pretrained(folder).push_to_hub(NAME, token=TOKEN)
    files = hub.tree(NAME)
    assert str(tmp_path).encode() in (folder / "results.json").read_bytes(), "the local file keeps its paths"
    assert not [name for name, content in files.items() if str(tmp_path).encode() in content]
    pushed = json.loads(files["results.json"])
    assert pushed["settings"]["target"] == "Target-1B" and pushed["settings"]["drafters"] == ["a"]
    assert pushed["results"] == json.loads(json.dumps(document["results"]))
    assert json.loads(files["config.json"])["target_name_or_path"] == "Target-1B"
    assert ThroughputCurve.from_dict(json.loads(files["throughput_curve.json"])).measured_on["model"] == "Target-1B"


def test_the_card_of_a_drafter_without_any_records(tmp_path: Path):
    drafter = tiny.random_drafter(tiny.qwen3(), markov_rank=0, confidence_head_with_markov=False)
    drafter.config.target_name_or_path = str(tmp_path)
    card = build_card(drafter, tmp_path, repo_id="a/b")
    assert card.data.base_model is None and card.data.license is None and card.data.tags[1] == "dflash"
    for heading in ("## Training", "## Speed", "## Calibration", "## Cost", "None", str(tmp_path.parent)):
        assert heading not in card.text


def test_the_card_of_a_local_run_has_placeholders_instead_of_paths(drafter, tmp_path: Path):
    folder = tmp_path / "run1"
    drafter.save_pretrained(folder)
    drafter.config.target_name_or_path = str(tmp_path / "models" / "Target-1B")
    text = build_card(drafter, folder).text
    assert 'from_pretrained("your-name/drafter"' in text and 'from_pretrained("path/to/Target-1B"' in text
    assert "drafter for Target-1B" in text and str(tmp_path) not in text and "run1" not in text
    adapter = build_card(drafter, folder, adapts=str(tmp_path / "base")).text
    assert "for the drafter path/to/base" in adapter and str(tmp_path) not in adapter


@pytest.mark.parametrize(
    ("length", "said"),
    [
        (1.03, "gives 1.03 tokens; plain decoding gives 1.00. This drafter is not expected to save time"),
        (2.4, "gives 2.40"),
    ],
    ids=["hardly any gain", "gain"],
)
def test_the_card_says_what_training_promises(drafter, tmp_path: Path, length: float, said: str):
    results = {"acceptance_length": length, "acceptance_1": 0.51, "acceptance_2": 0.3, "runtime": 3.2, "own": 7}
    TrainingSummary(results=results).save(tmp_path)
    text = build_card(drafter, tmp_path).text
    assert said in text and ("not expected" in text) == (length < 1.1)
    assert "| Tokens per target pass, sampled drafts | 1.03 |" in text or length > 2
    assert "| Acceptance of drafts 1, 2, ..., given that those before were accepted | 0.51, 0.30 |" in text
    assert "acceptance_" not in text and "runtime" not in text and "| own | 7 |" in text


def speedup(value: float, low: float, high: float, group: str = "all", method: str = "dspark") -> dict:
    estimate = {"value": value, "low": low, "high": high}
    return {"group": group, "method": method, "num_rounds": 5 * (method != "plain"), "estimates": {"speedup": estimate}}


@pytest.mark.parametrize(
    ("results", "said"),
    [
        ([speedup(1.4, 1.2, 1.6)], "saves time on this machine. dspark: 1.40 times the speed"),
        ([speedup(0.9, 0.8, 0.95)], "does not save time on this machine. dspark: 0.90 times"),
        ([speedup(1.05, 0.9, 1.2)], "A gain in speed could not be shown"),
        ([speedup(3, 2, 4, group="math"), speedup(0.9, 0.8, 0.95)], "does not save time"),
        (
            [speedup(9, 9, 9, method="plain"), speedup(0.8, 0.7, 0.9), speedup(1.3, 1.2, 1.4, method="b")],
            "b: 1.30 times",
        ),
    ],
    ids=["faster", "slower", "unclear", "all prompts count", "the best of its settings"],
)
def test_speed_in_words(results: list[dict], said: str):
    assert said in speed_in_words(results)


def test_speed_that_was_not_measured_is_not_told():
    assert speed_in_words([]) is None and speed_in_words([speedup(1, 1, 1, method="plain")]) is None


def test_a_licence_that_is_given_wins(hub: Hub, drafter):
    hub.create("maker/target").commit("main", {"README.md": b"---\nlicense: mit\n---\n"}, "card")
    drafter.push_to_hub(NAME, token=TOKEN, license="apache-2.0", base_model="maker/other")
    assert card_of(hub).data.license == "apache-2.0" and card_of(hub).data.base_model == "maker/other"


@pytest.mark.parametrize("change", ["# Mine\n", "---\nlicense: mit\n---\n# Mine\n", "appended", "metadata"])
def test_a_card_that_somebody_wrote_stays(hub: Hub, drafter, change: str):
    drafter.push_to_hub(NAME, token=TOKEN)
    made = hub.tree(NAME)["README.md"].decode()
    assert is_generated(made)
    mine = {
        "appended": made + "And one more thing.\n",
        "metadata": made.replace("mine", "x").replace("dspark\n", "dspark\n- x\n", 1),
    }
    mine = mine.get(change, change)
    assert not is_generated(mine)
    hub.tree(NAME)["README.md"] = mine.encode()
    drafter.config.confidence_temperatures = TEMPERATURES
    drafter.push_to_hub(NAME, token=TOKEN)
    assert hub.tree(NAME)["README.md"].decode() == mine


def test_an_unchanged_card_is_written_again(hub: Hub, drafter):
    drafter.push_to_hub(NAME, token=TOKEN)
    assert "## Calibration" not in card_of(hub).text
    drafter.config.confidence_temperatures = TEMPERATURES
    drafter.push_to_hub(NAME, token=TOKEN)
    assert "## Calibration" in card_of(hub).text


def test_a_card_in_the_folder_goes_along(hub: Hub, drafter, tmp_path: Path):
    folder = tmp_path / "drafter"
    drafter.save_pretrained(folder)
    assert write_card(drafter, folder)
    (folder / "README.md").write_text("# Mine\n")
    assert not write_card(drafter, folder)
    DSparkDrafter.from_pretrained(folder).push_to_hub(NAME, token=TOKEN)
    assert hub.tree(NAME)["README.md"] == b"# Mine\n"


def test_files_about_the_weights_follow_them_and_no_others(hub: Hub, drafter, tmp_path: Path):
    folder = tmp_path / "trained"
    drafter.save_pretrained(folder)
    describe(folder)
    DSparkDrafter.from_pretrained(folder, dtype=torch.bfloat16).push_to_hub(NAME, token=TOKEN)
    assert "## Training" in card_of(hub).text and "training.json" in hub.tree(NAME)

    pulled = pull(tmp_path)  # The same weights from elsewhere: the files stay, and the card is made from them.
    pulled.config.confidence_temperatures = TEMPERATURES
    pulled.push_to_hub(NAME, token=TOKEN)
    assert "## Training" in card_of(hub).text and "## Calibration" in card_of(hub).text

    trained_on = DSparkDrafter.from_pretrained(folder)
    with torch.no_grad():
        trained_on.fc.weight[0, 0] += 1
    trained_on.push_to_hub(NAME, token=TOKEN)
    assert "## Training" not in card_of(hub).text
    assert not {"training.json", "results.json"} & hub.tree(NAME).keys()
    assert "throughput_curve.json" in hub.tree(NAME), "what a pass of the target costs has not changed"


def test_another_tools_results_are_no_benchmark(drafter, tmp_path: Path):
    (tmp_path / "results.json").write_text('{"results": {"hellaswag": 0.3}}')
    assert "## Speed" not in build_card(drafter, tmp_path, repo_id=NAME).text
