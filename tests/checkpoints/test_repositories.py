"""Repositories of the Hub, from a server on this machine that speaks as much of its protocol as reading needs."""

import hashlib
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import spellings
import torch
from huggingface_hub import constants

import tiny
from dspark_hf import DSparkDrafter
from dspark_hf.checkpoints import inspect_checkpoint

pytestmark = pytest.mark.integration

TOKEN = "hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"


class Hub(ThreadingHTTPServer):
    """Serves `root/<owner>/<name>/<revision>/<file>`; repositories named `private` want the token."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), Handler)
        self.root, self.sent = root, Counter()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, with_body: bool) -> None:
        repository, found, rest = self.path.lstrip("/").partition("/resolve/")
        revision, _, name = rest.partition("/")
        if "private" in repository and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.send(401, b"", {"X-Error-Code": "GatedRepo"}, with_body)
        folder = self.server.root / repository / revision
        if not found or not folder.is_dir():
            code = "RevisionNotFound" if (self.server.root / repository).is_dir() else "RepoNotFound"
            return self.send(404, b"", {"X-Error-Code": code}, with_body)
        if not (folder / name).is_file():
            return self.send(404, b"", {"X-Error-Code": "EntryNotFound"}, with_body)
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": hashlib.sha1(revision.encode()).hexdigest()}
        if (span := self.headers.get("Range")) is not None:
            start, _, end = span.removeprefix("bytes=").partition("-")
            last = min(int(end or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {start}-{last}/{len(content)}"
            return self.send(206, content[int(start) : last + 1], headers, with_body, name)
        return self.send(200, content, headers, with_body, name)

    def send(self, status: int, body: bytes, headers: dict[str, str], with_body: bool, name: str = "") -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body)), "Accept-Ranges": "bytes"}).items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.server.sent[name] += len(body)
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = Hub(tmp_path / "hub")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def target():
    return tiny.qwen3()


def bound(target, **fields) -> DSparkDrafter:
    drafter = tiny.random_drafter(target, **fields)
    drafter.bind(target)
    return drafter


def same(one: DSparkDrafter, other: DSparkDrafter) -> bool:
    return all(torch.equal(other.state_dict()[name], tensor) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize("spelling", ["SpecForge", "ModelOpt"])
def test_a_repository_loads_like_a_folder(hub: Hub, target, spelling: str, tmp_path: Path):
    drafter = bound(target)
    spellings.DSPARK[spelling](drafter, hub.root / "some" / "drafter" / "main")
    assert same(drafter, DSparkDrafter.from_pretrained("some/drafter", cache_dir=tmp_path / "cache"))


def test_a_revision_and_a_subfolder(hub: Hub, target, tmp_path: Path):
    old, new = bound(target), bound(target, block_size=6)
    spellings.modelopt(old, hub.root / "some" / "drafter" / "v1" / "inner")
    spellings.modelopt(new, hub.root / "some" / "drafter" / "main" / "inner")
    where = {"cache_dir": tmp_path / "cache", "subfolder": "inner"}
    assert DSparkDrafter.from_pretrained("some/drafter", revision="v1", **where).config.block_size == 4
    assert DSparkDrafter.from_pretrained("some/drafter", **where).config.block_size == 6
    assert inspect_checkpoint("some/drafter", revision="v1", **where).config.block_size == 4


def test_a_private_repository_wants_the_token(hub: Hub, target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    drafter = bound(target)
    spellings.modelopt(drafter, hub.root / "some" / "private" / "main")
    with pytest.raises(OSError, match="some/private") as refused:
        DSparkDrafter.from_pretrained("some/private", cache_dir=tmp_path / "cache", token=False)
    assert TOKEN not in str(refused.value)
    loaded = DSparkDrafter.from_pretrained("some/private", cache_dir=tmp_path / "cache", token=TOKEN)
    assert same(drafter, loaded)


def test_inspection_fetches_headers_only(hub: Hub, target, tmp_path: Path):
    target = tiny.qwen3(vocab_size=4096)
    folder = spellings.specforge(bound(target, vocab_size=4096), hub.root / "some" / "drafter" / "main")
    file = folder / "model.safetensors"
    found = inspect_checkpoint("some/drafter", cache_dir=tmp_path / "cache")
    assert found.format == "SpecForge"
    assert found.num_bytes > 250_000
    assert hub.sent["model.safetensors"] < 110_000 < file.stat().st_size
    assert found.to_dict() | {"path": ""} == inspect_checkpoint(folder).to_dict() | {"path": ""} | {
        "config": found.to_dict()["config"]
    }


@pytest.mark.parametrize("missing", ["repository", "revision"])
def test_what_is_not_there_is_named(hub: Hub, target, missing: str, tmp_path: Path):
    spellings.modelopt(bound(target), hub.root / "some" / "drafter" / "main")
    name, revision = ("some/other", "main") if missing == "repository" else ("some/drafter", "v9")
    with pytest.raises(OSError, match=name if missing == "repository" else "v9"):
        DSparkDrafter.from_pretrained(name, revision=revision, cache_dir=tmp_path / "cache", token=False)
