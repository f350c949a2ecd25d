"""What a Hub keeps: repositories with commits, branches and tags, and objects of large file storage."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from dataclasses import dataclass, field
from typing import Any

import yaml

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

    def stated(self, path: str) -> dict[str, Any]:
        """The file in an answer of ``tree`` or ``paths-info``."""
        entry: dict[str, Any] = {"type": "file", "path": path, "oid": self.git_hash, "size": self.size}
        if self.lfs:
            entry["lfs"] = {"oid": self.lfs, "size": self.size, "pointerSize": 130}
        return entry


@dataclass
class Repo:
    """One repository."""

    id: str
    private: bool
    commits: dict[str, dict[str, File]] = field(default_factory=dict)
    messages: dict[str, str] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str) -> str:
        """The commit of a branch, tag or commit id."""
        sha = self.branches.get(revision) or self.tags.get(revision) or revision
        if sha not in self.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return sha

    def files(self, revision: str = "main") -> dict[str, File]:
        """The files of a revision by path."""
        return self.commits[self.commit_of(revision)]

    def add_commit(self, branch: str, files: dict[str, File], message: str) -> str:
        """A new commit at the end of a branch."""
        sha = secrets.token_hex(20)
        self.commits[sha], self.messages[sha], self.branches[branch] = files, message, sha
        return sha


class Store:
    """All repositories and objects, and who may write where."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}
        self.writers: dict[str, str] = {}
        self.readers: set[str] = set()

    def user_of(self, token: str | None) -> str:
        """Whose token it is."""
        if token not in self.writers and token not in self.readers:
            raise Refused(401, "Invalid credentials in Authorization header" if token else "Unauthorized")
        return self.writers.get(token or "", "reader")

    def check_write(self, token: str | None, namespace: str) -> None:
        """Refuse a token that may not write there."""
        user = self.user_of(token)
        if token not in self.writers or user != namespace:
            raise Refused(403, f"You don't have the rights to write to the namespace {namespace}")

    def repo(self, repo_id: str, token: str | None = None) -> Repo:
        """A repository that the token may see."""
        found = self.repos.get(repo_id)
        if found is None or (found.private and self.writers.get(token or "") != repo_id.split("/")[0]):
            raise Refused(401 if not token else 404, "Repository not found", "RepoNotFound")
        return found

    def create(self, repo_id: str, *, private: bool) -> Repo:
        """A new repository, with a first commit as the Hub makes it."""
        if repo_id in self.repos:
            raise Refused(409, "You already created this model repo")
        made = self.repos[repo_id] = Repo(id=repo_id, private=private)
        made.add_commit("main", {".gitattributes": File(content=ATTRIBUTES, size=len(ATTRIBUTES))}, "initial commit")
        return made

    def is_large(self, path: str, size: int, sample: bytes) -> bool:
        """Whether a file goes to large file storage."""
        return bool(size and (_LARGE.search(path) or size > _LARGE_BYTES or b"\0" in sample))

    def content_of(self, file: File) -> bytes:
        """A file's bytes."""
        return self.objects[file.lfs] if file.lfs else file.content


def card_errors(text: str) -> list[str]:
    """What the Hub says of a card's metadata; empty for nothing."""
    found = _FRONT_MATTER.match(text)
    metadata = yaml.safe_load(found[1]) if found else {}
    if not isinstance(metadata, dict):
        return ["metadata must be an object"]
    errors = []
    for key, kind in (("base_model", "model"), ("datasets", "dataset")):
        names = metadata.get(key) or []
        for number, name in enumerate(names if isinstance(names, list) else [names]):
            if not _ID.match(str(name)):
                place = f"{key}[{number}]" if isinstance(names, list) else key
                errors.append(
                    f'"{place}" with value "{name}" is not valid. Use a {kind} id from https://hf.co/{kind}s.'
                )
    return errors
