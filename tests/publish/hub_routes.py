"""What the Hub on loopback answers: as much of the Hub's protocol as pushing and pulling of models need.

Spoken: whoami, creation of repositories, check of cards, pre-upload, Git LFS (batch, basic uploads,
verify), commits (ndjson, with ``parentCommit``), branches, tags, refs, tree, paths-info, resolve with redirects of
large files to another host. Model cards whose ``base_model`` or ``datasets`` is a path are answered with 400, as the
Hub does (huggingface/trl#1873, huggingface/transformers#32212).

Not spoken: Xet, pull requests, datasets and spaces, gated repositories, pagination, the web pages.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.publish.hub_store import File, Refused, card_errors

if TYPE_CHECKING:
    from tests.publish.hub_server import LoopbackHub

Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Request:
    """One request that came in."""

    method: str
    path: str
    headers: dict[str, str]
    bytes: int = 0

    @property
    def line(self) -> str:
        return f"{self.method} {unquote(self.path)}"


def _json(value: Any, status: int = 200, **headers: str) -> Answer:
    return status, {"Content-Type": "application/json", **headers}, json.dumps(value).encode()


def route(hub: LoopbackHub, request: Request, body: bytes) -> Answer:
    """The answer to one request."""
    path = urlsplit(request.path).path
    for method, pattern, handler in _ROUTES:
        found = re.fullmatch(pattern, path)
        if found and request.method in method:
            with hub.store.lock:
                return handler(hub, request, body, *(unquote(one) for one in found.groups() if one is not None))
    raise Refused(404, f"no such endpoint: {request.line}")


def _token(request: Request) -> str | None:
    return request.headers.get("authorization", "").removeprefix("Bearer ") or None


def _whoami(hub: LoopbackHub, request: Request, _: bytes) -> Answer:
    return _json({"type": "user", "name": hub.store.user_of(_token(request)), "orgs": []})


def _create(hub: LoopbackHub, request: Request, body: bytes) -> Answer:
    wanted, token = json.loads(body), _token(request)
    namespace = wanted.get("organization") or hub.store.user_of(token)
    repo_id = f"{namespace}/{wanted['name']}"
    url = f"{hub.url}/{repo_id}"
    hub.store.check_write(token, namespace)
    try:
        hub.store.create(repo_id, private=wanted.get("visibility") == "private")
    except Refused as refused:
        return _json({"error": refused.message, "url": url}, refused.status)
    return _json({"url": url, "name": repo_id, "id": "1"})


def _validate(hub: LoopbackHub, request: Request, body: bytes) -> Answer:
    errors = card_errors(json.loads(body)["content"])
    said = {"errors": [{"message": error} for error in errors], "warnings": []}
    return _json(said | ({"error": "Invalid metadata"} if errors else {}), 400 if errors else 200)


def _preupload(hub: LoopbackHub, request: Request, body: bytes, repo_id: str, revision: str) -> Answer:
    hub.store.check_write(_token(request), repo_id.split("/")[0])
    there = hub.store.repo(repo_id, _token(request)).files(revision)
    files = []
    for one in json.loads(body)["files"]:
        large = hub.store.is_large(one["path"], one["size"], base64.b64decode(one["sample"]))
        known = there.get(one["path"])
        oid = None if known is None else known.lfs or known.git_hash
        files.append(
            {"path": one["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}
        )
    return _json({"files": files})


def _batch(hub: LoopbackHub, request: Request, body: bytes, repo_id: str) -> Answer:
    hub.store.check_write(_token(request), repo_id.split("/")[0])
    wanted, objects = json.loads(body), []
    for one in wanted["objects"]:
        entry: dict[str, Any] = {"oid": one["oid"], "size": one["size"]}
        if one["oid"] not in hub.store.objects:
            signed = f"{hub.cdn}/upload/{one['oid']}?X-Amz-Signature=signed"
            upload: dict[str, Any] = {"href": signed, "header": {}}
            entry["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/verify/{repo_id}"}}
        objects.append(entry)
    return _json({"transfer": "basic", "objects": objects})


def _upload(hub: LoopbackHub, request: Request, body: bytes, oid: str) -> Answer:
    assert "authorization" not in request.headers, "a signed address got the token"
    hub.store.objects[oid] = hub.stored(oid, body)
    return 200, {"ETag": f'"{hashlib.md5(body).hexdigest()}"'}, b""


def _verify(hub: LoopbackHub, request: Request, body: bytes, repo_id: str) -> Answer:
    wanted = json.loads(body)
    if len(hub.store.objects.get(wanted["oid"], b"")) != wanted["size"]:
        raise Refused(422, "the object is not there")
    return _json({})


def _commit(hub: LoopbackHub, request: Request, body: bytes, repo_id: str, branch: str) -> Answer:
    hub.store.check_write(_token(request), repo_id.split("/")[0])
    repo = hub.store.repo(repo_id, _token(request))
    files = dict(repo.files(branch))
    lines = [json.loads(line) for line in body.splitlines()]
    header = lines[0]["value"]
    if header.get("parentCommit", repo.branches[branch]) != repo.branches[branch]:
        raise Refused(412, "A commit has happened since. Please refresh and try again.")
    for line in lines[1:]:
        value = line["value"]
        path = value["path"]
        if line["key"] == "file":
            content = base64.b64decode(value["content"])
            if path == "README.md" and (errors := card_errors(content.decode())):
                raise Refused(400, f"Invalid metadata in README.md: {'; '.join(errors)}")
            content = hub.stored(path, content)
            files[path] = File(content=content, size=len(content))
        elif line["key"] == "lfsFile":
            if value["oid"] not in hub.store.objects:
                raise Refused(400, f"LFS pointer pointed to a file that does not exist. path: {path}")
            files[path] = File(lfs=value["oid"], size=value["size"])
        elif line["key"] == "deletedFile":
            del files[path]
    sha = repo.add_commit(branch, files, header["summary"])
    return _json({"success": True, "commitOid": sha, "commitUrl": f"{hub.url}/{repo_id}/commit/{sha}"})


def _info(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, revision: str = "main") -> Answer:
    repo = hub.store.repo(repo_id, _token(request))
    siblings = [{"rfilename": path} for path in repo.files(revision)]
    sha = repo.commit_of(revision)
    said = {"id": repo_id, "modelId": repo_id, "sha": sha, "private": repo.private, "siblings": siblings, "tags": []}
    return _json(said)


def _tree(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, revision: str, folder: str = "") -> Answer:
    files = hub.store.repo(repo_id, _token(request)).files(revision)
    if folder:
        files = {path: file for path, file in files.items() if path.startswith(f"{folder}/")}
        if not files:
            raise Refused(404, f"{folder} does not exist on {revision}", "EntryNotFound")
    return _json([file.stated(path) for path, file in files.items()])


def _paths_info(hub: LoopbackHub, request: Request, body: bytes, repo_id: str, revision: str) -> Answer:
    files = hub.store.repo(repo_id, _token(request)).files(revision)
    wanted = parse_qs(body.decode())["paths"]
    return _json([files[p].stated(p) for p in wanted if p in files])


def _branch(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, name: str) -> Answer:
    hub.store.check_write(_token(request), repo_id.split("/")[0])
    repo = hub.store.repo(repo_id, _token(request))
    if name in repo.branches:
        raise Refused(409, "Reference already exists")
    repo.branches[name] = repo.branches["main"]
    return _json({})


def _tag(hub: LoopbackHub, request: Request, body: bytes, repo_id: str, revision: str) -> Answer:
    hub.store.check_write(_token(request), repo_id.split("/")[0])
    repo, name = hub.store.repo(repo_id, _token(request)), json.loads(body)["tag"]
    if name in repo.tags:
        raise Refused(409, "Tag already exists")
    repo.tags[name] = repo.commit_of(revision)
    return _json({})


def _refs(hub: LoopbackHub, request: Request, _: bytes, repo_id: str) -> Answer:
    repo = hub.store.repo(repo_id, _token(request))
    heads = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": sha} for n, sha in repo.branches.items()]
    tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": sha} for n, sha in repo.tags.items()]
    return _json({"branches": heads, "converts": [], "tags": tags})


def _resolve(hub: LoopbackHub, request: Request, _: bytes, repo_id: str, revision: str, path: str) -> Answer:
    repo = hub.store.repo(repo_id, _token(request))
    sha, file = repo.commit_of(revision), repo.files(revision).get(path)
    if file is None:
        raise Refused(404, "Entry not found", "EntryNotFound")
    headers = {"X-Repo-Commit": sha, "ETag": f'"{file.git_hash}"', "Accept-Ranges": "bytes"}
    if not file.lfs:
        return 200, headers, file.content
    headers |= {
        "X-Linked-Etag": f'"{file.lfs}"',
        "X-Linked-Size": str(file.size),
        "Location": f"{hub.cdn}/cdn/{file.lfs}",
    }
    return 302, headers, b""


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
    ("POST", rf"/verify/{_REPO}", _verify),
    ("POST", rf"/api/models/{_REPO}/commit/(.+)", _commit),
    ("GET", rf"/api/models/{_REPO}/revision/(.+)", _info),
    ("GET", rf"/api/models/{_REPO}/tree/([^/]+)(?:/(.+))?", _tree),
    ("POST", rf"/api/models/{_REPO}/paths-info/(.+)", _paths_info),
    ("POST", rf"/api/models/{_REPO}/branch/(.+)", _branch),
    ("POST", rf"/api/models/{_REPO}/tag/(.+)", _tag),
    ("GET", rf"/api/models/{_REPO}/refs", _refs),
    ("GET", rf"/api/models/{_REPO}", _info),
    ("GET HEAD", rf"/{_REPO}/resolve/([^/]+)/(.+)", _resolve),
    ("GET", r"/cdn/(\w+)", _cdn),
)
