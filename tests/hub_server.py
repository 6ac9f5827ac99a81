"""A Hub on this machine: as much of its HTTP protocol as creating, pushing to, listing and reading repositories needs.

```python
def test_something(hub):                                # the fixture points this process's huggingface_hub at it
    hub.publish("some/drafter", folder)                 # or drafter.push_to_hub("some/drafter", token=hub_server.TOKEN)
    DSparkDrafter.from_pretrained("some/drafter", cache_dir=...)
    assert hub.sent["model.safetensors"] > 0
```
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest
import transformers
from huggingface_hub import ModelCard, constants

TOKEN = "hf_aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
USER = "someone"

Tree = dict[str, bytes]


@dataclass
class Repository:
    """Commits by their id, and branches that point to them."""

    private: bool = False
    commits: dict[str, Tree] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, branch: str, tree: Tree, message: str) -> str:
        self.messages.append(message)
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        return oid

    def at(self, revision: str) -> str | None:
        """The commit that a branch or commit id names."""
        return self.branches.get(revision) or (revision if revision in self.commits else None)


@dataclass
class Fault:
    """A request to spoil: its method, a part of its path, and the answer (0: the connection is cut)."""

    method: str
    part: str
    status: int
    times: int = 1


class Hub(ThreadingHTTPServer):
    """
    The server. Its repositories can be looked at and changed between requests.

    Args of interest: `repositories` by name, `stored` (LFS objects by digest), `sent` (bytes of files sent, by file name),
    `requests` (every method and path) and `faults`.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, Repository] = {}
        self.stored: dict[str, bytes] = {}
        self.sent: Counter[str] = Counter()
        self.requests: list[str] = []
        self.faults: list[Fault] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def store_url(self) -> str:
        """Where large files are: another host, as far as clients can tell."""
        return f"http://localhost:{self.server_port}/lfs"

    def create(self, name: str, private: bool = False) -> Repository:
        repository = self.repositories[name] = Repository(private)
        repository.commit("main", {".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return repository

    def publish(self, name: str, folder: Path, branch: str = "main", private: bool = False) -> str:
        """Puts a folder there without asking, as one commit; its id."""
        repository = self.repositories.get(name) or self.create(name, private)
        files = (file for file in folder.rglob("*") if file.is_file())
        return repository.commit(branch, {f.relative_to(folder).as_posix(): f.read_bytes() for f in files}, "publish")

    def tree(self, name: str, revision: str = "main") -> Tree:
        """The files of a repository."""
        repository = self.repositories[name]
        return repository.commits[repository.at(revision)]

    def fail(self, method: str, part: str, status: int, times: int = 1) -> None:
        """Spoils the next requests of a method whose path contains `part`."""
        self.faults.append(Fault(method, part, status, times))

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # A client that went away.


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_HEAD(self) -> None:
        self.route()

    do_GET = do_POST = do_PUT = do_HEAD

    # ------------------------------------------------------------------ routing

    def route(self) -> None:
        path, query = urlsplit(self.path).path.strip("/"), parse_qs(urlsplit(self.path).query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append(f"{self.command} /{path}")
        fault = next((f for f in self.server.faults if f.times and f.method == self.command and f.part in path), None)
        if fault is not None:
            fault.times -= 1
            return self.spoil(fault)
        if path.startswith("lfs/"):
            return self.object(path.removeprefix("lfs/"), body)
        if self.command in ("POST", "PUT") and not self.is_known:
            return self.error(401, "RepoNotFound" if "/models/" in path else "")
        if path == "api/repos/create":
            return self.create(json.loads(body))
        if path == "api/validate-yaml":
            return self.json({"errors": [], "warnings": []})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(body))
        if path.startswith("api/models/"):
            owner, name, *rest = path.removeprefix("api/models/").split("/")
        else:
            owner, name, *rest = path.split("/")
        repository = self.server.repositories.get(f"{owner}/{name}")
        if repository is None or (repository.private and not self.is_known):
            return self.error(404 if self.is_known else 401, "RepoNotFound")
        verb, rest = (rest[0], rest[1:]) if rest else ("revision", ["main"])
        if verb == "branch":
            return self.branch(repository, unquote(rest[0]))
        revision = unquote(rest[0]) if rest else "main"
        if (commit := repository.at(revision)) is None:
            return self.error(404, "RevisionNotFound")
        tree, file = repository.commits[commit], unquote("/".join(rest[1:]))
        if verb == "resolve":
            return self.resolve(tree, commit, file)
        if verb == "tree":
            return self.json([self.listed(name, content) for name, content in tree.items()])
        if verb == "revision":
            return self.info(f"{owner}/{name}", repository, tree, commit)
        if verb == "preupload":
            return self.preupload(json.loads(body))
        if verb == "commit":
            return self.commit(f"{owner}/{name}", repository, revision, dict(tree), body, "create_pr" in query)
        self.error(404, "")

    @property
    def is_known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def spoil(self, fault: Fault) -> None:
        if fault.status:
            return self.error(fault.status, "")
        self.close_connection = True
        self.connection.close()

    # ------------------------------------------------------------------ writing

    def create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or USER}/{asked['name']}"
        exists = name in self.server.repositories
        if not exists:
            self.server.create(name, bool(asked.get("private")) or asked.get("visibility") == "private")
        self.json({"url": f"{self.server.url}/{name}", "name": name, "id": name}, 409 if exists else 200)

    def branch(self, repository: Repository, name: str) -> None:
        if name in repository.branches:
            return self.json({}, 409)
        repository.branches[name] = repository.branches["main"]
        self.json({}, 201)

    def preupload(self, asked: dict[str, Any]) -> None:
        files = [
            {"path": f["path"], "uploadMode": "lfs" if is_large(f["path"]) else "regular", "shouldIgnore": False}
            for f in asked["files"]
        ]
        self.json({"files": files})

    def batch(self, asked: dict[str, Any]) -> None:
        """An upload for each object that is not there yet."""
        objects = []
        for item in asked["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.server.stored:
                here = f"{self.server.store_url}/{item['oid']}"
                entry["actions"] = {"upload": {"href": here}, "verify": {"href": here}}
            objects.append(entry)
        self.json({"transfer": "basic", "objects": objects})

    def object(self, oid: str, body: bytes) -> None:
        """The store of large files, whose addresses are secrets by themselves."""
        if self.command == "PUT":
            if hashlib.sha256(body).hexdigest() != oid:
                return self.error(400, "")
            self.server.stored[oid] = body
            return self.json({})
        if self.command == "POST":  # verification
            return self.json({}, 200 if oid in self.server.stored else 404)
        oid, _, name = oid.partition("/")
        self.content(self.server.stored[oid], {"ETag": f'"{oid}"'}, name)

    def commit(self, name: str, repository: Repository, branch: str, tree: Tree, body: bytes, as_pr: bool) -> None:
        message = ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                tree[value["path"]] = self.server.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del tree[value["path"]]
        oid = repository.commit("refs/pr/1" if as_pr else branch, tree, message)
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{name}/commit/{oid}"}
        self.json(answer | ({"pullRequestUrl": f"{self.server.url}/{name}/discussions/1"} if as_pr else {}))

    # ------------------------------------------------------------------ reading

    def listed(self, name: str, content: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
        if is_large(name):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
        return entry

    def info(self, name: str, repository: Repository, tree: Tree, commit: str) -> None:
        card = ModelCard(tree.get("README.md", b"---\n{}\n---\n").decode()).data.to_dict()
        siblings = [{"rfilename": file} for file in tree]
        fields = {"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []}
        self.json(fields | {"cardData": card})

    def resolve(self, tree: Tree, commit: str, file: str) -> None:
        """A file, or, where it is large, the address of the store."""
        if file not in tree:
            return self.error(404, "EntryNotFound", {"X-Repo-Commit": commit})
        content, headers = tree[file], {"X-Repo-Commit": commit}
        if not is_large(file):
            return self.content(content, headers | {"ETag": f'"{blob_id(content)}"'}, file)
        digest = hashlib.sha256(content).hexdigest()
        self.server.stored[digest] = content
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content)), "ETag": '"pointer"'}
        self.answer(302, b"", headers | linked | {"Location": f"{self.server.store_url}/{digest}/{file}"})

    def content(self, content: bytes, headers: dict[str, str], name: str) -> None:
        status = 200
        if (span := self.headers.get("Range")) is not None:
            start, _, end = span.removeprefix("bytes=").partition("-")
            last = min(int(end or len(content)), len(content) - 1)
            headers = headers | {"Content-Range": f"bytes {start}-{last}/{len(content)}"}
            status, content = 206, content[int(start) : last + 1]
        if self.command == "GET":
            self.server.sent[name] += len(content)
        self.answer(status, content, headers)

    # ------------------------------------------------------------------ answers

    def json(self, value: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def error(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self.answer(status, b"", (headers or {}) | ({"X-Error-Code": code} if code else {}))

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body)), "Accept-Ranges": "bytes"}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf"))


def blob_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub that this process's huggingface_hub talks to, with nobody logged in and a fresh cache."""
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet's store is no part of this server; LFS is.
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)  # It remembers address and commits.
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
