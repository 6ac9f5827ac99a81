"""A command that cannot do its work ends with one line that says what is wrong, and with the right exit code."""

import builtins
import errno
import json
import sys

import pytest
import tiny_folders
import torch

pytest.importorskip("typer")
pytest.importorskip("rich")

import typer
from safetensors import SafetensorError

import dspark_hf_cli
from dspark_hf_cli.errors import sentence_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return tiny_folders.save(tmp_path_factory.mktemp("models"))


@pytest.fixture
def ends(monkeypatch, capsys):
    """Runs the program; returns its exit code and the lines on standard error that are not about progress."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["dspark-hf", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            dspark_hf_cli.main()
        lines = capsys.readouterr().err.splitlines()
        return exit_.value.code, [line for line in lines if line.startswith(("error", "interrupted", "Traceback"))]

    return run


def chat(folders, **options):
    given = {"target": folders.target, "drafter": folders.random, "device": "cpu"} | options
    return ["chat", *(part for name, value in given.items() for part in (f"--{name}", value))]


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        ({"target": "/nowhere/target"}, 1, "There is no folder '/nowhere/target'"),
        ({"drafter": "runs/of/mine"}, 1, "There is no folder 'runs/of/mine'"),
        ({"drafter": "owner/drafter"}, 1, "'owner/drafter' is neither a folder here"),
        ({"target": "DRAFTER"}, 1, "is a drafter, not a target"),
        ({"drafter": "TARGET"}, 1, "is a language model (Qwen3ForCausalLM), not a drafter"),
        ({"dtype": "int8"}, 2, "not a floating-point dtype: use float32, bfloat16 or float16"),
        ({"device": "gpu"}, 2, "There is no device 'gpu' here"),
        ({"max-new-tokens": 0}, 2, "'--max-new-tokens'"),
        ({"no-such": 1}, 2, "No such option: --no-such. See `dspark-hf chat --help`."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_models_and_options(ends, folders, options, code, said):
    stand_ins = {"DRAFTER": folders.random, "TARGET": folders.target}
    found, lines = ends(*chat(folders, **{name: stand_ins.get(value, value) for name, value in options.items()}))
    assert found == code and len(lines) == 1
    assert lines[0].startswith("error: ") and said in lines[0]


def test_a_damaged_file(ends, folders, tmp_path):
    for file in folders.random.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes()[: 300 if file.suffix == ".safetensors" else None])
    code, lines = ends(*chat(folders, drafter=tmp_path))
    assert code == 1 and len(lines) == 1 and "is not a readable safetensors file" in lines[0]


def test_data_that_is_not_there(ends, folders, tmp_path):
    common = ("--target", folders.target, "--data", tmp_path / "no.jsonl", "--output", tmp_path / "out")
    for command in ("train", "cache-features"):
        code, lines = ends(command, *common)
        assert code == 1 and lines == [f"error: There is no file '{tmp_path / 'no.jsonl'}'."]


def test_a_task_that_cannot_be_downloaded(ends, folders, tmp_path):
    code, lines = ends("bench", "-t", folders.target, "-d", folders.random, "-o", tmp_path / "out")
    assert code == 1 and len(lines) == 1 and "Check its name and the network connection" in lines[0]
    assert not (tmp_path / "out").exists()


def test_prompts_that_are_not_json(ends, folders, tmp_path):
    (tmp_path / "p.jsonl").write_text("nonsense\n")
    code, lines = ends("regenerate", "-t", folders.target, "-p", tmp_path / "p.jsonl", "-o", tmp_path / "r.jsonl")
    assert code == 1 and len(lines) == 1 and "p.jsonl" in lines[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.jsonl"]


def test_a_file_where_the_output_folder_should_be(ends, folders, tmp_path):
    (tmp_path / "out").write_text("")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "1"}) + "\n")
    models = ("--target", folders.target, "--drafter", folders.random)
    code, lines = ends(
        "bench", *models, "--tasks", tmp_path / "p.jsonl", "--output", tmp_path / "out", "--max-new-tokens", 4
    )
    assert code == 1 and len(lines) == 1 and "out" in lines[0]


def test_a_full_disk(ends, folders, tmp_path, monkeypatch):
    """safetensors has an error of its own for that, which is neither a ValueError nor an OSError."""

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("dspark_hf.checkpoints.writing.save_file", full)
    code, lines = ends("convert", folders.random, tmp_path / "out", "--format", "vllm-sglang")
    assert code == 1 and len(lines) == 1 and "No space left on device" in lines[0]
    assert not (tmp_path / "out").exists()


def test_an_interrupt(ends, folders, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("dspark_hf_cli.loading.load_drafter", interrupted)
    assert ends(*chat(folders)) == (130, ["interrupted"])


def test_a_mistake_of_the_program_keeps_its_traceback(folders, monkeypatch, capsys):
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr("dspark_hf_cli.loading.load_drafter", broken)
    monkeypatch.setattr(sys, "argv", ["dspark-hf", *map(str, chat(folders))])
    with pytest.raises(KeyError, match="a bug"):
        dspark_hf_cli.main()
    assert "Please report it" in capsys.readouterr().err


def test_a_traceback_on_request(folders, monkeypatch):
    monkeypatch.setenv("DSPARK_HF_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["dspark-hf", *map(str, chat(folders, target="/nowhere/target"))])
    with pytest.raises(FileNotFoundError):
        dspark_hf_cli.main()


def test_success_is_exit_code_0(ends):
    assert ends("env", "--json") == (0, [])


def test_missing_packages_are_named_with_their_extra(monkeypatch, ends):
    genuine = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.partition(".")[0] == "rich":
            raise ImportError("No module named 'rich'", name="rich")
        return genuine(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert ends("env") == (1, ["error: The command line needs rich: pip install 'dspark-hf[cli]'."])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "x"), "The disk is full, so 'x' could not be written."),
        (PermissionError(errno.EACCES, "Permission denied", "x"), "No permission for 'x': Permission denied."),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), "There is no file or folder 'x'."),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), "'x' is a folder, and a file is needed."),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory", "x/y"), "'x/y' cannot be reached"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), "The memory is full."),
        (MemoryError(), "The memory is full."),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
            "The memory is full.",
        ),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "should be text in UTF-8"),
        (ValueError("one\n  two"), "one two"),
        (SafetensorError("header too large"), "header too large"),
        (typer.BadParameter("no"), "no"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_sentences(error, said):
    sentence = sentence_of(error)
    assert sentence.startswith(said) or said in sentence
    assert "\n" not in sentence


@pytest.mark.parametrize(
    "error", [KeyError("x"), TypeError("x"), AttributeError("x"), RuntimeError("x"), AssertionError()]
)
def test_mistakes_have_no_sentence(error):
    assert sentence_of(error) is None
