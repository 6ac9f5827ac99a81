"""Whatever is wrong with a name, a dtype or a device is said in one sentence that tells what to do."""

import json
import os
from pathlib import Path

import pytest
import tiny_folders
import torch
from hub_server import TOKEN, Hub
from transformers import BertConfig, BertModel

from dspark_hf import Drafter
from dspark_hf.loading import check_is_target, load_target, load_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


def one_sentence(error: pytest.ExceptionInfo) -> str:
    """The message of an error, which has one line."""
    text = str(error.value)
    assert "\n" not in text and text.endswith(".")
    return text


LOADERS = pytest.mark.parametrize("load", [load_target, Drafter.from_pretrained], ids=["target", "drafter"])


def test_a_target_comes_with_its_tokenizer_in_the_dtype_and_place_asked_for(folders):
    target, tokenizer = load_target(str(folders.target), "bfloat16", "cpu")
    assert target.dtype == torch.bfloat16 and not target.training
    assert tokenizer.decode(tokenizer("abc")["input_ids"]) == "abc"


@LOADERS
@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "runs/a/b", "no such", "~/model"])
def test_a_folder_that_does_not_exist(load, name):
    with pytest.raises(FileNotFoundError, match=f"There is no folder '{name}'") as error:
        load(name)
    one_sentence(error)


@LOADERS
def test_no_name_and_a_file(load, tmp_path):
    with pytest.raises(OSError, match="is empty: give a folder"):
        load("")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(OSError, match="is a file: give the folder that contains it"):
        load(str(tmp_path / "model.safetensors"))


@LOADERS
def test_a_folder_without_a_model(load, tmp_path):
    with pytest.raises(OSError, match=r"has no config\.json"):
        load(str(tmp_path))


def test_a_drafter_is_not_a_target(folders):
    with pytest.raises(ValueError, match="is a drafter, not a target") as error:
        load_target(str(folders.random))
    one_sentence(error)


def test_a_drafter_says_which_target_it_was_trained_for(folders, tmp_path):
    drafter = Drafter.from_pretrained(folders.random)
    drafter.config.target_name_or_path = "owner/target"
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="it was trained for 'owner/target'"):
        check_is_target(str(tmp_path))


def test_a_target_is_not_a_drafter(folders):
    with pytest.raises(ValueError, match=r"is a language model \(Qwen3ForCausalLM\), not a drafter") as error:
        Drafter.from_pretrained(folders.target)
    one_sentence(error)


def test_other_models_are_not_targets(folders, tmp_path):
    config = BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=8,
        vocab_size=9,
        architectures=["X"],
    )
    config.model_type = "bert"
    BertModel(config).save_pretrained(tmp_path)
    tiny_folders.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    with pytest.raises(ValueError, match="is not a language model") as error:
        load_target(str(tmp_path))
    one_sentence(error)


def test_a_missing_tokenizer(folders, tmp_path):
    (tmp_path / "config.json").write_bytes((folders.target / "config.json").read_bytes())
    with pytest.raises(ValueError, match=r"The tokenizer of .* cannot be loaded") as error:
        load_tokenizer(str(tmp_path))
    one_sentence(error)


def test_damaged_weights_of_a_target(folders, tmp_path):
    for file in folders.target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 200 if file.suffix == ".safetensors" else None])
    with pytest.raises(OSError, match=r"is damaged .*Download or save it again") as error:
        load_target(str(tmp_path))
    one_sentence(error)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"dtype": "int8"}, "'int8', which is not a floating-point dtype: use float32, bfloat16 or float16"),
        ({"dtype": "fp8"}, "'fp8', which is not a floating-point dtype"),
        ({"device": "gpu"}, "There is no device 'gpu' here; torch .* can use cpu"),
        ({"device": "cuda:99"}, "There is no device 'cuda:99' here"),
    ],
)
def test_a_dtype_or_device_that_does_not_exist(folders, setting, message):
    with pytest.raises(ValueError, match=message):
        load_target(str(folders.target), **setting)


# ---------------------------------------------------------------------- the Hub


@LOADERS
def test_without_a_network_nothing_is_downloaded(load):
    with pytest.raises(OSError, match=r"'owner/model' is neither a folder here .* HF_HUB_OFFLINE=1 forbids") as error:
        load("owner/model")
    one_sentence(error)


@LOADERS
def test_the_hub_has_no_such_model(load, hub: Hub):
    with pytest.raises(OSError, match="neither a folder here nor a model on the Hub") as error:
        load("owner/model")
    assert "hf auth login" in one_sentence(error)


@LOADERS
def test_a_private_model_looks_like_none(load, hub: Hub, folders):
    hub.publish("some/private", folders.random, private=True)
    with pytest.raises(OSError, match="If it is a private model"):
        load("some/private")


@LOADERS
def test_a_revision_that_does_not_exist(load, hub: Hub, folders):
    hub.publish("some/model", folders.random)
    with pytest.raises(OSError, match="'some/model' has no revision 'v9' on the Hub") as error:
        load("some/model", revision="v9")
    one_sentence(error)


@LOADERS
def test_the_hub_cannot_be_reached(load, hub: Hub, monkeypatch):
    monkeypatch.setattr("huggingface_hub.utils._http._DEFAULT_RETRY_MAX_RETRIES", 0, raising=False)
    for method in ("HEAD", "GET"):
        hub.fail(method, "", 0, times=99)
    with pytest.raises(OSError, match="the Hub cannot be reached: check the network") as error:
        load("some/model")
    one_sentence(error)


def test_a_repository_that_is_there_loads(hub: Hub, folders):
    hub.publish("some/target", folders.target)
    target, _ = load_target("some/target", token=TOKEN)
    assert target.config.vocab_size == 128


def test_a_folder_that_may_not_be_read(folders, tmp_path):
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    config = Path(tmp_path / "config.json")
    config.write_text("{}")
    config.chmod(0)
    with pytest.raises(OSError, match="Permission denied"):
        load_target(str(tmp_path))
