"""A Hub on loopback, and every way in which it can fail; and directories as runs leave them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import yaml
from huggingface_hub import constants, hf_api
from safetensors.numpy import save_file

from hf_rocm_tune.survive import manifest
from tests.publish.run_files import report

TOKEN = "hf_PlantedTokenThatMustNeverBeSeen0123"
USER = "tester"
Answer = tuple[int, dict[str, str], bytes]


class Request(NamedTuple):
    """One request that came in."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def line(self) -> str:
        return f"{self.method} {unquote(self.path)}"

    @property
    def token(self) -> str:
        return self.headers.get("authorization", "").removeprefix("Bearer ")


@dataclass
class Fault:
    """What goes wrong with the requests that match."""

    match: str  # regular expression for "METHOD path"
    status: int = 0  # answer with it, instead of doing the work
    headers: dict[str, str] = field(default_factory=dict)  # of that answer
    body: bytes = b""  # of that answer; a message where it is empty
    # Close the connection, "before" or "after" the work.
    drop: str = ""
    hold: bool = False  # stop in the middle of the body, or at once without one, until `LoopbackHub.release`; no answer
    first: Callable[[], None] | None = None  # called before anything else is done
    times: int | None = 1  # how many requests it hits; None for all
    hits: int = 0


class LoopbackHub(ThreadingHTTPServer):
    """The server; ``url`` is its address for HF_ENDPOINT."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.store = Store()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}"  # another host: no token may arrive there
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.damage: list[str] = []
        self.release, self.held = threading.Event(), threading.Event()

    def fault(self, match: str, **settings: Any) -> Fault:
        self.faults.append(Fault(match=match, **settings))
        return self.faults[-1]

    def corrupt(self, path: str) -> None:
        self.damage.append(path)

    def stored(self, key: str, content: bytes) -> bytes:
        return bytes([content[0] ^ 1]) + content[1:] if any(re.search(one, key) for one in self.damage) else content

    def lines(self, pattern: str = "") -> list[str]:
        return [one.line for one in self.requests if re.search(pattern, one.line)]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Connections that clients close are part of the tests."""


@contextmanager
def loopback_hub() -> Iterator[LoopbackHub]:
    """A server that runs within the block."""
    with LoopbackHub() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.release.set()
            server.shutdown()
            thread.join()


class _Dropped(Exception):
    """The connection is to be closed without an answer."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: LoopbackHub

    def _serve(self) -> None:
        request = Request(self.command, self.path, {k.lower(): v for k, v in self.headers.items()})
        self.server.requests.append(request)
        fault = self._fault(request)
        try:
            if fault.first is not None:
                fault.first()
            if fault.drop == "before":
                raise _Dropped
            body = self._body(request, fault)
            if fault.status:
                message = fault.body or json.dumps({"error": f"injected {fault.status}"}).encode()
                kind = "application/json" if not fault.body else "text/html"
                status, headers, content = fault.status, {"Content-Type": kind, **fault.headers}, message
            else:
                status, headers, content = self._answer(request, body)
            if fault.drop == "after":
                raise _Dropped
            self.send_response(status)
            for name, value in {"Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
        except _Dropped:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _fault(self, request: Request) -> Fault:
        with self.server.store.lock:
            for fault in self.server.faults:
                if re.search(fault.match, request.line) and (fault.times is None or fault.hits < fault.times):
                    fault.hits += 1
                    return fault
        return Fault(match="")

    def _body(self, request: Request, fault: Fault) -> bytes:
        if request.headers.get("transfer-encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip() or b"0", 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            body = b"".join(parts)
        else:
            size = int(request.headers.get("content-length") or 0)
            size = size // 2 if fault.hold else size
            body = self.rfile.read(size)
            if len(body) < size:
                raise _Dropped  # the client has gone
        if fault.hold:
            self.server.held.set()
            self.server.release.wait()
            raise _Dropped
        return body

    def _answer(self, request: Request, body: bytes) -> Answer:
        try:
            path = urlsplit(request.path).path
            for method, pattern, handler in _ROUTES:
                found = re.fullmatch(pattern, path)
                if found and request.method in method:
                    with self.server.store.lock:
                        return handler(self.server, request, body, *map(unquote, found.groups()))
            raise Refused(404, f"no such endpoint: {request.line}")
        except Refused as refused:
            headers = {"Content-Type": "application/json", "X-Error-Message": refused.message}
            headers |= {"X-Error-Code": refused.code} if refused.code else {}
            return refused.status, headers, json.dumps({"error": refused.message}).encode()

    def log_message(self, *_: Any) -> None:
        """Quiet."""


# ---- What a Hub keeps: repositories with commits and branches, and objects of large file storage --------------------

_LARGE = re.compile(r"\.(safetensors|bin|pt|pth|ckpt|zip|png|onnx|model)$")
_LARGE_BYTES = 10 << 20
_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_FRONT_MATTER = re.compile(r"^\s*---\n([\S\s]*?)\n---")
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


@dataclass
class File:
    """One file of a commit: its bytes, or a pointer to an object."""

    content: bytes = b""
    lfs: str = ""
    size: int = 0

    @property
    def git_hash(self) -> str:
        content = self.content
        if self.lfs:
            content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.lfs}\nsize {self.size}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Repo:
    """One repository."""

    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str) -> str:
        sha = self.branches.get(revision) or revision
        if sha not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def files(self, revision: str = "main") -> dict[str, File]:
        return self.commits[self.commit_of(revision)]

    def add_commit(self, branch: str, files: dict[str, File], message: str) -> str:
        sha = secrets.token_hex(20)
        self.commits[sha], self.messages[sha], self.branches[branch] = files, message, sha
        return sha


class Store:
    """All repositories and objects, and who may write where."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.writers = {TOKEN: USER}
        self.readers: set[str] = set()

    def user_of(self, token: str) -> str:
        if token not in self.writers and token not in self.readers:
            raise Refused(401, "Invalid credentials in Authorization header" if token else "Unauthorized")
        return self.writers.get(token, "reader")

    def check_write(self, token: str, namespace: str) -> None:
        if self.user_of(token) != namespace:
            raise Refused(403, f"You don't have the rights to write to the namespace {namespace}")

    def repo(self, repo_id: str, token: str, *, write: bool = False) -> Repo:
        if write:
            self.check_write(token, repo_id.split("/")[0])
        found = self.repos.get(repo_id)
        if found is None or (found.private and self.writers.get(token) != repo_id.split("/")[0]):
            raise Refused(404 if token else 401, "Repository not found", "RepoNotFound")
        return found

    def create(self, repo_id: str, *, private: bool) -> Repo:
        if repo_id in self.repos:
            raise Refused(409, "You already created this model repo")
        made = self.repos[repo_id] = Repo(private=private)
        made.add_commit("main", {".gitattributes": File(content=ATTRIBUTES, size=len(ATTRIBUTES))}, "initial commit")
        return made

    def content_of(self, file: File) -> bytes:
        return self.objects[file.lfs] if file.lfs else file.content


def card_errors(text: str) -> list[str]:
    found = _FRONT_MATTER.match(text)
    metadata = yaml.safe_load(found[1]) if found else {}
    if not isinstance(metadata, dict):
        return ["metadata must be an object"]
    named = {key: metadata.get(key) or [] for key in ("base_model", "datasets")}
    return [
        f'"{key}" with value "{name}" is not valid. Use an id from https://hf.co'
        for key, names in named.items()
        for name in (names if isinstance(names, list) else [names])
        if not _ID.match(str(name))
    ]


# ---- What the Hub on loopback answers: as much of the Hub's protocol as pushing and pulling of models needs --------


def _json(value: Any, status: int = 200) -> Answer:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _whoami(hub: LoopbackHub, request: Request, _: bytes) -> Answer:
    return _json({"type": "user", "name": hub.store.user_of(request.token), "orgs": []})


def _create(hub: LoopbackHub, request: Request, body: bytes) -> Answer:
    wanted = json.loads(body)
    namespace = wanted.get("organization") or hub.store.user_of(request.token)
    repo_id = f"{namespace}/{wanted['name']}"
    hub.store.check_write(request.token, namespace)
    said = {"url": f"{hub.url}/{repo_id}", "name": repo_id, "id": "1"}
    try:
        hub.store.create(repo_id, private=wanted.get("visibility") == "private")
    except Refused as refused:
        return _json(said | {"error": refused.message}, refused.status)
    return _json(said)


def _validate(hub: LoopbackHub, request: Request, body: bytes) -> Answer:
    errors = card_errors(json.loads(body)["content"])
    said = {"errors": [{"message": error} for error in errors], "warnings": []}
    return _json(said | ({"error": "Invalid metadata"} if errors else {}), 400 if errors else 200)


def _preupload(hub: LoopbackHub, request: Request, body: bytes, repo_id: str, revision: str) -> Answer:
    there, files = hub.store.repo(repo_id, request.token, write=True).files(revision), []
    for one in json.loads(body)["files"]:
        path, size, sample = one["path"], one["size"], base64.b64decode(one["sample"])
        large = size and (_LARGE.search(path) or size > _LARGE_BYTES or b"\0" in sample)
        known = there[path].lfs or there[path].git_hash if path in there else None
        files.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": known})
    return _json({"files": files})


def _batch(hub: LoopbackHub, request: Request, body: bytes, repo_id: str) -> Answer:
    hub.store.repo(repo_id, request.token, write=True)
    objects = [{"oid": one["oid"], "size": one["size"]} for one in json.loads(body)["objects"]]
    for one in objects:
        if one["oid"] not in hub.store.objects:
            href = f"{hub.cdn}/upload/{one['oid']}?X-Amz-Signature=signed"
            one["actions"] = {"upload": {"href": href, "header": {}}}
    return _json({"transfer": "basic", "objects": objects})


def _upload(hub: LoopbackHub, request: Request, body: bytes, oid: str) -> Answer:
    assert "authorization" not in request.headers, "a signed address got the token"
    hub.store.objects[oid] = hub.stored(oid, body)
    return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""


def _commit(hub: LoopbackHub, request: Request, body: bytes, repo_id: str, branch: str) -> Answer:
    repo = hub.store.repo(repo_id, request.token, write=True)
    header, *lines = (json.loads(line) for line in body.splitlines())
    files = dict(repo.files(branch))
    for line in lines:
        value, path = line["value"], line["value"]["path"]
        if line["key"] == "file":
            content = base64.b64decode(value["content"])
            if path == "README.md" and (errors := card_errors(content.decode())):
                raise Refused(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
            files[path] = File(content=hub.stored(path, content), size=len(content))
        elif line["key"] == "lfsFile":
            if value["oid"] not in hub.store.objects:
                raise Refused(400, f"LFS pointer pointed to a file that does not exist. path: {path}")
            files[path] = File(lfs=value["oid"], size=value["size"])
        elif line["key"] == "deletedFile":
            del files[path]
    sha = repo.add_commit(branch, files, header["value"]["summary"])
    return _json({"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{repo_id}/commit/{sha}"})


def _info(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, revision: str = "main") -> Answer:
    repo = hub.store.repo(repo_id, request.token)
    siblings = [{"rfilename": path} for path in repo.files(revision)]
    said = {"id": repo_id, "modelId": repo_id, "private": repo.private, "siblings": siblings, "tags": []}
    return _json(said | {"sha": repo.commit_of(revision)})


def _tree(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, revision: str) -> Answer:
    entries = []
    for path, file in hub.store.repo(repo_id, request.token).files(revision).items():
        lfs = {"lfs": {"oid": file.lfs, "size": file.size, "pointerSize": 130}} if file.lfs else {}
        entries.append({"type": "file", "path": path, "oid": file.git_hash, "size": file.size, **lfs})
    return _json(entries)


def _branch(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, name: str) -> Answer:
    repo = hub.store.repo(repo_id, request.token, write=True)
    if name in repo.branches:
        raise Refused(409, "Reference already exists")
    repo.branches[name] = repo.branches["main"]
    return _json({})


def _resolve(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, revision: str, path: str) -> Answer:
    repo = hub.store.repo(repo_id, request.token)
    sha, file = repo.commit_of(revision), repo.files(revision).get(path)
    if file is None:
        raise Refused(404, "Entry not found", "EntryNotFound")
    headers = {"X-Repo-Commit": sha, "ETag": f'"{file.git_hash}"', "Accept-Ranges": "bytes"}
    if not file.lfs:
        return 200, headers, file.content
    linked = {"X-Linked-Etag": f'"{file.lfs}"', "X-Linked-Size": str(file.size)}
    return 302, headers | linked | {"Location": f"{hub.cdn}/cdn/{file.lfs}"}, b""


def _cdn(hub: LoopbackHub, request: Request, _: bytes, oid: str) -> Answer:
    assert "authorization" not in request.headers, "another host got the token"
    return 200, {"ETag": f'"{oid}"', "Content-Type": "application/octet-stream"}, hub.store.objects[oid]


_REPO = r"([^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, str, Callable[..., Answer]], ...] = (
    ("GET", r"/api/whoami-v2", _whoami),
    ("POST", r"/api/repos/create", _create),
    ("POST", r"/api/validate-yaml", _validate),
    ("POST", rf"/api/models/{_REPO}/preupload/(.+)", _preupload),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", _batch),
    ("PUT", r"/upload/(\w+)", _upload),
    ("POST", rf"/api/models/{_REPO}/commit/(.+)", _commit),
    ("GET", rf"/api/models/{_REPO}/revision/(.+)", _info),
    ("GET", rf"/api/models/{_REPO}/tree/([^/]+)", _tree),
    ("POST", rf"/api/models/{_REPO}/branch/(.+)", _branch),
    ("GET", rf"/api/models/{_REPO}", _info),
    ("GET HEAD", rf"/{_REPO}/resolve/([^/]+)/(.+)", _resolve),
    ("GET", r"/cdn/(\w+)", _cdn),
)


# ---- this process talks to it, and directories as runs leave them -------------------------------------------


BASE = "/home/planted-user/models/Tiny Llama"
DATA = "/mnt/planted-disk/chats.jsonl"


def use(server: LoopbackHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let huggingface_hub in this process talk to a server, with its token."""
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)  # PEFT's, made when it is imported
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def clean_report(**changes: Any) -> dict[str, Any]:
    """A transfer report of a run in which nothing went wrong, with private names."""
    told = f"planted-user is not in the group render; {BASE}/x is slow"
    return report(**{"findings": [{"text": told}], **changes})


def write_run(out: Path, *, seed: int = 0, checkpoints: tuple[int, ...] = ()) -> Path:
    """What a run leaves whose base model and data are local, with their paths wherever upstream writes them."""
    out.mkdir(parents=True, exist_ok=True)
    write_model(out, seed=seed)
    (out / "transfer_report.json").write_text(json.dumps(clean_report(), indent=2) + "\n")
    (out / "training_args.bin").write_bytes(f"pickle {out} {TOKEN}".encode())
    settings = {"model_name_or_path": BASE, "dataset_name": DATA}
    (out / "run.json").write_text(json.dumps({"schema": 1, "settings": settings}))
    (out / "_run.lock").write_text("process 1 on planted-host")
    for step in checkpoints:
        write_checkpoint(out, step)
    listed = [n for n in names(out) if n not in ("run.json", "_run.lock", "integrity.json") and "/" not in n]
    manifest.write(out, run_id="run-1", step=8, status="final", files=listed, extra={"compared": True})
    return out


def write_model(folder: Path, *, seed: int) -> None:
    """An adapter, its tokenizer and a card."""
    weights = np.random.default_rng(seed).standard_normal((64, 512)).astype(np.float32)
    save_file(
        {"layer.lora_A.weight": weights, "layer.lora_B.weight": weights.T.copy()}, folder / "adapter_model.safetensors"
    )
    config = {"peft_type": "LORA", "r": 8, "base_model_name_or_path": BASE, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"/root": 1, "/home/x/y": 2}}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 256, "name_or_path": BASE}))
    (folder / "chat_template.jinja").write_text("{{ '<|im_start|>' }}")
    (folder / "README.md").write_text(
        f"---\nlibrary_name: peft\nbase_model: {BASE}\ndatasets:\n- {DATA}\ntags:\n- base_model:adapter:{BASE}\n"
        f"- lora\n---\n\n# Card\n\nTrained on `{DATA}` from `{BASE}`, written to {folder}.\n"
    )


def write_checkpoint(out: Path, step: int) -> Path:
    """``checkpoint-N`` with what a run needs to go on."""
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder, seed=step)
    (folder / "optimizer.pt").write_bytes(np.random.default_rng(step).bytes(70_000))
    (folder / "scheduler.pt").write_bytes(b"PK\0scheduler %d" % step)
    (folder / "rng_state.pth").write_bytes(b"PK\0rng %d" % step)
    state = {"global_step": step, "best_model_checkpoint": str(out / f"checkpoint-{step}")}
    (folder / "trainer_state.json").write_text(json.dumps(state, indent=2))
    (folder / "training_args.bin").write_bytes(f"pickle {out} {TOKEN}".encode())
    manifest.write(folder, run_id="run-1", step=step, status="checkpoint")
    return folder


def names(folder: Path) -> list[str]:
    """Files below a directory, relative, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {name: (folder / name).read_bytes() for name in names(folder)}


def on_hub(hub: LoopbackHub, repo_id: str, revision: str = "main") -> dict[str, bytes]:
    """Every file of a repository, but for the one that the Hub makes itself."""
    files = hub.store.repos[repo_id].files(revision)
    return {path: hub.store.content_of(file) for path, file in files.items() if path != ".gitattributes"}
