"""A repository of the Hugging Face Hub: a push is one commit of bytes that were checked in memory.

A large file is read once, into memory that nobody can write to; that copy is compared with the manifest, and that copy
is uploaded. Files that the Hub has with the same hash are not sent again. After an error of the Hub or the network, or
another commit, the whole step is repeated from the new state of the repository. After the commit the hash of each file
in it is compared (SHA-256 for files in large file storage, Git's SHA-1 for others). Not covered: what the storage
serves later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard, RepoFile
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)

from hf_rocm_tune.errors import CorruptionError, TuneError, UsageError
from hf_rocm_tune.publish.card import CARD_NAME
from hf_rocm_tune.redaction import Private, redact, remember, scrub_text
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import MANIFEST_NAME, FileEntry, Manifest, read_once
from hf_rocm_tune.version import __version__

T = TypeVar("T")
Say = Callable[[str], None]

# Attempts of one step, in addition to those of huggingface_hub for a single request; the wait doubles.
_ATTEMPTS, _FIRST_WAIT_S = 5, 2.0
_TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_PASSING = (408, 409, 412, 425)  # busy, or another commit came in between


class HubError(TuneError):
    """The Hub did not accept an upload; it may at another time. The local files are unchanged."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A push that was checked."""

    url: str
    commit: str  # the one that was checked
    files: int
    bytes: int

    @property
    def summary(self) -> str:
        """The push in one line."""
        return (
            f"pushed to {self.url} (commit {self.commit[:10]}): {self.files} files, {self.bytes / 1e6:.3g} MB; all "
            "hashes on the Hub are correct"
        )


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One file of an upload: its bytes, or where it is if it is large."""

    entry: FileEntry  # of what is uploaded
    content: bytes | None = None
    source: Path | None = None

    @classmethod
    def of(cls, content: bytes) -> Piece:
        return cls(entry=FileEntry(bytes=len(content), sha256=hashlib.sha256(content).hexdigest()), content=content)

    def is_stored(self, there: RepoFile | None) -> bool:
        """Whether the Hub states the hash of these bytes."""
        if there is None or there.size != self.entry.bytes:
            return False
        if there.lfs is not None:
            return str(there.lfs.sha256) == self.entry.sha256
        content = self.content or b""
        return str(there.blob_id) == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A directory that is ready to be uploaded."""

    prefix: str  # the folder on the Hub, with a "/" at its end; "" for the top
    pieces: Mapping[str, Piece]  # by path on the Hub, the manifest among them
    lines: tuple[str, ...]  # what is uploaded, changed and left out, for the user


class Repository:
    """One repository of the Hub, and a branch of it; ``NAME`` alone is one of the token's owner, which `open` adds."""

    def __init__(
        self, repo_id: str, private: Private, say: Say, *, token: str | None = None, revision: str = "main"
    ) -> None:
        self.repo_id, self._private, self._say, self._revision = repo_id, private, say, revision
        remember({"secret": list(private.secrets)})
        for handler in logging.getLogger("huggingface_hub").handlers:
            handler.addFilter(_redact_record)  # adding it again changes nothing
        self._api = HfApi(token=token, library_name="hf-rocm-tune", library_version=__version__)

    @property
    def url(self) -> str:
        return f"{self._api.endpoint}/{self.repo_id}"

    def open(self, *, private: bool | None, attempts: int = _ATTEMPTS) -> None:
        """Create the repository and its branch where they do not exist; a public one where ``private`` is refused."""

        def make() -> bool:
            hidden = private is not False
            self.repo_id = self._api.create_repo(self.repo_id, private=hidden, exist_ok=True).repo_id
            public = hidden and not self._api.repo_info(self.repo_id).private
            if self._revision != "main" and not self._revision.startswith("refs/"):
                self._api.create_branch(self.repo_id, branch=self._revision, exist_ok=True)
            # The first request of an upload, which sends nothing: create_repo hides a 401 or a 403 where the repository
            # exists.
            card = CommitOperationAdd(path_in_repo=CARD_NAME, path_or_fileobj=b"#")
            self._api.preupload_lfs_files(self.repo_id, additions=[card], revision=self._revision)
            return public

        if self._retry("the repository", make, attempts):
            if private:
                raise UsageError(
                    f"{self.repo_id} exists and is public, but --private is given: make it private in its settings "
                    "on the Hub, or name another repository"
                )
            self._say(f"{self.repo_id} exists and is public: everyone can read what is pushed to it")

    def upload(self, staged: Sequence[Staged], *, message: str) -> Pushed:
        """Upload the staged directories, whose folders do not overlap, in one commit, and check it.

        A ``CorruptionError`` is a commit of which the Hub states other hashes.
        """
        pieces = {path: piece for each in staged for path, piece in each.pieces.items()}
        folders = tuple(each.prefix for each in staged if each.prefix)

        def commit() -> str:
            """The commit with all files; an earlier attempt may have made it although its response was lost."""
            head = str(self._api.repo_info(self.repo_id, revision=self._revision).sha)
            there = self._files(head)
            lacking = [path for path, piece in pieces.items() if not piece.is_stored(there.get(path))]
            # Remaining files of an earlier push would be loaded together with the new ones.
            earlier = self._of_earlier_push(staged, head, there)
            stale = [p for p in there if p not in pieces and (p in earlier or (folders and p.startswith(folders)))]
            if not lacking and not stale:
                return head
            if CARD_NAME in lacking:
                _validate((pieces[CARD_NAME].content or b"").decode())  # before hours of uploads
            operations: list[Any] = [self._addition(path, pieces[path]) for path in lacking]
            operations += [CommitOperationDelete(path_in_repo=path, is_folder=False) for path in stale]
            done = self._api.create_commit(
                self.repo_id, operations, commit_message=message, revision=self._revision, parent_commit=head
            )
            return str(done.oid)

        done = self._retry("the push", commit)
        there = self._retry("the check", lambda: self._files(done))
        if wrong := [path for path, piece in pieces.items() if not piece.is_stored(there.get(path))]:
            raise CorruptionError(
                f"{self.repo_id} on the Hub has another hash than was sent for {', '.join(wrong[:3])} (commit "
                f"{done[:10]}). The local files are correct: delete those on the Hub, or push to another repository"
            )
        size = sum(piece.entry.bytes for piece in pieces.values())
        return Pushed(url=self.url, commit=done, files=len(pieces), bytes=size)

    def _addition(self, path: str, piece: Piece) -> CommitOperationAdd:
        """The operation for one file, whose bytes are sent before it is returned if it is large."""
        if piece.source is None:
            return CommitOperationAdd(path_in_repo=path, path_or_fileobj=piece.content or b"")
        with read_once(piece.source) as (copy, entry):
            if entry != piece.entry:
                raise UsageError(f"{piece.source} has changed since it was checked: nothing is published")
            addition = CommitOperationAdd(path_in_repo=path, path_or_fileobj=str(copy))
            self._api.preupload_lfs_files(self.repo_id, additions=[addition], revision=self._revision)
        return addition

    def _files(self, commit: str) -> dict[str, RepoFile]:
        """The files of a commit, by path, with the sizes and hashes that the Hub states."""
        found = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
        return {one.path: one for one in found if isinstance(one, RepoFile)}

    def _of_earlier_push(self, staged: Sequence[Staged], head: str, there: Mapping[str, RepoFile]) -> set[str]:
        """The files that the manifests on the Hub list, of the folders that are pushed."""
        earlier: set[str] = set()
        for prefix in (each.prefix for each in staged if each.prefix + MANIFEST_NAME in there):
            with TemporaryDirectory() as folder:
                file = self._api.hf_hub_download(self.repo_id, prefix + MANIFEST_NAME, revision=head, local_dir=folder)
                old = manifest.read(Path(file).parent)
            if isinstance(old, Manifest):
                earlier.update(prefix + each for each in old.files)
        return earlier

    def _retry(self, what: str, step: Callable[[], T], attempts: int = 0) -> T:
        """Repeat an idempotent step while it fails with a `HubError`; errors of the Hub's client become ours here."""
        attempts, tries = attempts or _ATTEMPTS, 0
        while True:
            tries += 1
            try:
                return step()
            except (TuneError, AssertionError, AttributeError, NameError, TypeError):
                raise
            except Exception as error:
                explained = _explained(error, self.repo_id)
                message = scrub_text(str(explained), self._private, names=False)
                if not isinstance(explained, HubError) or tries >= attempts:
                    raise type(explained)(message) from error
                wait = _FIRST_WAIT_S * 2 ** (tries - 1)
                reason = message.rpartition(": ")[0]
                self._say(f"{what} of {self.repo_id}: {reason}; try {tries + 1} of {attempts} in {wait:.0f} s")
                time.sleep(wait)


def _validate(card: str) -> None:
    """Ask the Hub whether it accepts a model card; a ``UsageError`` if it does not."""
    try:
        ModelCard(card).validate()
    except ValueError as error:  # with the Hub's answer
        with suppress(ValueError, LookupError, TypeError):
            error = ValueError("; ".join(each["message"] for each in json.loads(str(error))["errors"]))
        message = " ".join(str(error).split())
        raise UsageError(f"the Hub refuses the model card: {message}; correct the metadata of README.md") from error


def _redact_record(record: logging.LogRecord) -> bool:
    """Remove secrets, and the query part of addresses (signatures of uploads), from a log record."""
    record.msg, record.args = re.sub(r"(://[^\s?]*)\?\S*", r"\1", redact(record.getMessage())), ()
    return True


_BY_STATUS = {
    401: "the Hub does not accept the token {info}: it is wrong, expired or revoked, or none was sent; make one with "
    "write access at {page}, then `hf auth login` or set HF_TOKEN",
    403: "the token may not write to {repo} {info}: give it write permission there at {page}, or name a repository of "
    "your own",
    404: "{repo} does not exist, or has no such branch, or the token has no access to it {info}: check the names, and "
    "that you are a member of the organisation",
}


def _explained(error: BaseException, repo_id: str) -> UsageError | HubError:
    """A ``UsageError`` if the user can fix it, a ``HubError`` if the same may succeed later."""
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:  # huggingface_hub wraps errors of uploads in a RuntimeError
        causes.append(cause)
    answer = next((one for one in causes if isinstance(one, HfHubHTTPError)), None)
    in_words = re.search(r"HTTP status (?:client|server) error \((\d{3})\b", str(error))  # of hf_xet
    if answer is not None or in_words:
        status = answer.response.status_code if answer is not None else int(in_words[1]) if in_words else 0
        info = f"({status}: {answer.server_message})" if answer is not None and answer.server_message else f"({status})"
        if status == 429:
            return HubError(f"the Hub asks for fewer requests {info}: try again in some minutes")
        if status >= 500 or status in _PASSING:
            return HubError(f"the Hub answers {info[1:-1]}: try again later")
        line = _BY_STATUS.get(status, "the Hub refuses it {info}")
        return UsageError(line.format(info=info, repo=repo_id, page=_TOKENS_PAGE))
    known = {
        LocalTokenNotFoundError: "no token for the Hub: run `hf auth login`, or set HF_TOKEN to one with write access "
        f"({_TOKENS_PAGE})",
        OfflineModeIsEnabled: "HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, so nothing can be pushed: unset it",
        HFValidationError: f"{repo_id!r} is not a valid repository name ({error}): write USER/NAME",
    }
    if said := next((known[kind] for kind in known for one in causes if isinstance(one, kind)), None):
        return UsageError(said)
    what = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split()).rstrip(": ")
    return HubError(f"the Hub cannot be reached ({what}): check the network, or use another huggingface_hub")
