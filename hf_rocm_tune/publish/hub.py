"""A repository of the Hugging Face Hub: a push is one commit, whose hashes are compared with those of the files.

Files that the Hub has with the same hash are not sent again. After an error of the Hub or the network, or another
commit, the whole step is repeated from the new state of the repository; a commit names its parent (``parent_commit``),
so a commit whose response was lost is not made twice.

After the commit the hash of each file in it is compared (SHA-256 for files in large file storage, Git's SHA-1 for
others). Not covered: what the storage serves later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)

from hf_rocm_tune.errors import CorruptionError, TuneError, UsageError
from hf_rocm_tune.redaction import Private, redact, remember, scrub_text
from hf_rocm_tune.survive import manifest
from hf_rocm_tune.survive.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_rocm_tune.version import __version__

T = TypeVar("T")
Say = Callable[[str], None]

# Attempts of one step, in addition to those of huggingface_hub for a single request; the wait doubles.
_ATTEMPTS, _FIRST_WAIT_S = 5, 2.0


class HubError(TuneError):
    """The Hub did not accept an upload; it may at another time. The local files are unchanged."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A push that was checked."""

    repo_id: str  # with its owner
    url: str
    commit: str  # the one that was checked
    files: int
    bytes: int
    sent: int  # files that the Hub did not have
    deleted: int  # files of an earlier push of ours that this one does not have

    @property
    def summary(self) -> str:
        """The push in one line."""
        deleted = f", {self.deleted} of an earlier push deleted" if self.deleted else ""
        return (
            f"pushed to {self.url} (commit {self.commit[:10]}): {self.files} files, {self.bytes / 1e6:.3g} MB; "
            f"{self.sent} sent, {self.files - self.sent} already present{deleted}; all hashes on the Hub are correct"
        )


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A directory that is ready to be uploaded."""

    root: Path  # where its files are
    prefix: str  # the folder on the Hub, with a "/" at its end; "" for the top
    manifest: Manifest  # the one that is uploaded
    changed: Mapping[str, str]  # what was rewritten, by file
    not_listed: tuple[str, ...]  # files that are not uploaded because no manifest lists them

    @property
    def files(self) -> dict[str, tuple[Path, FileEntry]]:
        """Local path, size and SHA-256 of each file, by path on the Hub; the manifest is one of them."""
        entries = {**self.manifest.files, MANIFEST_NAME: manifest.entry_of(self.root / MANIFEST_NAME)}
        return {self.prefix + name: (self.root / name, entry) for name, entry in entries.items()}

    def described(self) -> list[str]:
        """Lines for the user."""
        where = f" in {self.prefix}" if self.prefix else ""
        lines = [f"to be uploaded{where}: {', '.join((*self.manifest.files, MANIFEST_NAME))}"]
        lines += [f"{name}{where} is published without local names: {what}" for name, what in self.changed.items()]
        if self.not_listed:
            lines.append(f"not uploaded, no manifest lists them: {', '.join(self.not_listed)}")
        return lines


class Repository:
    """One repository of the Hub.

    Args:
        repo_id: ``USER/NAME``, or ``NAME`` for one of the token's owner; `open` completes it.
        private: what must not be in a message.
        say: takes a line for the user.
        token: None for HF_TOKEN or the one of `hf auth login`.
        revision: branch to work on.
    """

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

    def open(self, *, private: bool | None, attempts: int | None = None) -> None:
        """Create the repository and its branch where they do not exist.

        Raises:
            UsageError: the token or the name is wrong, the token may not write there, or the repository is public and
                ``private`` is set.
            HubError: the Hub does not answer.
        """

        def make() -> bool:
            hidden = private is not False
            self.repo_id = self._api.create_repo(self.repo_id, private=hidden, exist_ok=True).repo_id
            public = hidden and not self._api.repo_info(self.repo_id).private
            if self._revision != "main" and not self._revision.startswith("refs/"):
                self._api.create_branch(self.repo_id, branch=self._revision, exist_ok=True)
            # The first request of an upload, which sends nothing: create_repo hides a 401 or a 403 where the repository
            # exists.
            card = CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=b"#")
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

        Raises:
            UsageError: the user can change what is wrong.
            HubError: the Hub does not accept it.
            CorruptionError: it accepted it and states another hash.
        """
        wanted = {path: file for each in staged for path, file in each.files.items()}
        folders = tuple(each.prefix for each in staged if each.prefix)
        sent: set[str] = set()
        deleted: set[str] = set()

        def commit() -> str:
            """The commit with all files; an earlier attempt may have made it although its response was lost."""
            head, there = self._head()
            lacking = [path for path in wanted if not _same(*wanted[path], there.get(path))]
            # Remaining files of an earlier push would be loaded together with the new ones.
            earlier = self._of_earlier_push(staged, head, there)
            old = {path for path in there if path in earlier or (folders and path.startswith(folders))}
            stale = sorted(old - wanted.keys())
            if head is not None and not lacking and not stale:
                return head
            done = self._api.create_commit(
                self.repo_id,
                operations=[
                    *(CommitOperationAdd(path_in_repo=p, path_or_fileobj=str(wanted[p][0])) for p in lacking),
                    *(CommitOperationDelete(path_in_repo=path, is_folder=False) for path in stale),
                ],
                commit_message=message,
                revision=self._revision,
                parent_commit=head,
            )
            sent.update(lacking)
            deleted.update(stale)
            return str(done.oid)

        done = self._retry("the push", commit)
        there = self._retry("the check", lambda: self._files(done))
        if wrong := [path for path, file in wanted.items() if not _same(*file, there.get(path))]:
            raise CorruptionError(
                f"{self.repo_id} on the Hub has another hash than was sent for {', '.join(wrong[:3])} (commit "
                f"{done[:10]}). The local files are correct: delete those on the Hub, or push to another repository"
            )
        return Pushed(
            repo_id=self.repo_id,
            url=self.url,
            commit=done,
            files=len(wanted),
            bytes=sum(entry.bytes for _, entry in wanted.values()),
            sent=len(sent),
            deleted=len(deleted),
        )

    def tag(self, name: str, commit: str) -> None:
        """Give a commit a tag. A tag that another commit has is a `UsageError`."""
        refs = self._retry("the tags", lambda: self._api.list_repo_refs(self.repo_id))
        target = next((one.target_commit for one in refs.tags if one.name == name), None)
        if target is None:
            make = partial(self._api.create_tag, self.repo_id, tag=name, revision=commit, exist_ok=True)
            self._retry("the tag", make)
        elif target != commit:
            raise UsageError(f"the tag {name} of {self.repo_id} is at {target[:10]} already: choose another --tag")

    def _head(self) -> tuple[str | None, dict[str, RepoFile]]:
        """The branch's newest commit (None for a repository without one), and its files."""
        try:
            sha = self._api.repo_info(self.repo_id, revision=self._revision).sha
        except RevisionNotFoundError:
            return None, {}
        return sha, self._files(sha) if sha else {}

    def _files(self, commit: str) -> dict[str, RepoFile]:
        """The files of a commit, by path, with the sizes and hashes that the Hub states."""
        found = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
        return {one.path: one for one in found if isinstance(one, RepoFile)}

    def _of_earlier_push(self, staged: Sequence[Staged], head: str | None, there: Mapping[str, RepoFile]) -> set[str]:
        """The files that the manifests on the Hub list, of the folders that are pushed."""
        earlier: set[str] = set()
        for each in staged:
            if head is not None and each.prefix + MANIFEST_NAME in there:
                with TemporaryDirectory() as folder:
                    name = each.prefix + MANIFEST_NAME
                    file = self._api.hf_hub_download(self.repo_id, name, revision=head, local_dir=folder)
                    old = manifest.read(Path(file).parent)
                if isinstance(old, Manifest):
                    earlier.update(each.prefix + name for name in old.files)
        return earlier

    def _retry(self, what: str, step: Callable[[], T], attempts: int | None = None) -> T:
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


def _same(source: Path, entry: FileEntry, there: RepoFile | None) -> bool:
    """Whether the Hub states the hash of these bytes."""
    if there is None or there.size != entry.bytes:
        return False
    if there.lfs is not None:
        return str(there.lfs.sha256) == entry.sha256
    content = source.read_bytes()
    return str(there.blob_id) == hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _redact_record(record: logging.LogRecord) -> bool:
    """Remove secrets, and the query part of addresses (signatures of uploads), from a log record."""
    record.msg, record.args = re.sub(r"(://[^\s?]*)\?\S*", r"\1", redact(record.getMessage())), ()
    return True


# ---- errors of the client -------------------------------------------------------------------------------------------

_TOKENS_PAGE = "https://huggingface.co/settings/tokens"
_PASSING = (408, 409, 412, 425)  # busy, or another commit came in between
_STATUS_OF_XET = re.compile(r"HTTP status (?:client|server) error \((\d{3})\b")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it was raised from; huggingface_hub wraps the errors of uploads in a RuntimeError."""
    while error is not None:
        yield error
        error = error.__cause__


def _answer(error: BaseException) -> HfHubHTTPError | None:
    return next((one for one in _causes(error) if isinstance(one, HfHubHTTPError)), None)


def _explained(error: BaseException, repo_id: str) -> UsageError | HubError:
    """A ``UsageError`` if the user can fix it, a ``HubError`` if the same may succeed later."""
    answer, causes, text = _answer(error), tuple(_causes(error)), str(error)
    in_words = _STATUS_OF_XET.search(text)  # hf_xet has the status in words only
    status = answer.response.status_code if answer is not None else int(in_words[1]) if in_words else None
    if "nvalid metadata in README.md" in text:  # found before the upload, or by the commit itself
        message = text.partition("README.md")[2].strip(" .:\n")
        return UsageError(f"the Hub refuses the model card: {message}; correct the metadata of README.md")
    if status == 404 and answer is None:
        return UsageError("this Hub has no Xet storage (404): set HF_HUB_DISABLE_XET=1 to push by Git LFS")
    if isinstance(answer, RevisionNotFoundError):
        return UsageError(f"{repo_id} has no such revision (404: {answer.server_message}): name a branch")
    if status is not None:
        return _of_status(status, answer.server_message if answer else "", repo_id)
    for one in causes:
        if isinstance(one, LocalTokenNotFoundError):
            return UsageError(
                f"no token for the Hub: run `hf auth login`, or set HF_TOKEN to one with write access ({_TOKENS_PAGE})"
            )
        if isinstance(one, OfflineModeIsEnabled):
            return UsageError("HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, so nothing can be pushed: unset it")
        if isinstance(one, HFValidationError):
            return UsageError(f"{repo_id!r} is not a valid repository name ({one}): write USER/NAME")
    if "LFS batch API" in text:
        message = " ".join(text.split("\n")[1:]) or text
        return UsageError(f"the Hub refuses a file: {message}; leave it out, or make it smaller")
    what = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split()).rstrip(": ")
    # The page of a proxy or load balancer is not JSON; hf_xet's failures are RuntimeErrors.
    network = httpx2.TransportError | json.JSONDecodeError | RuntimeError | ConnectionError | TimeoutError
    if any(isinstance(one, network) for one in causes):
        return HubError(f"the Hub cannot be reached ({what}): check the network")
    return HubError(f"the Hub's client failed ({what}): try again, and if it fails again, use another huggingface_hub")


def _of_status(status: int, message: str | None, repo_id: str) -> UsageError | HubError:
    """The line for an answer of the Hub or of its storage."""
    info = f"({status}: {message})" if message else f"({status})"
    if status == 429:
        return HubError(f"the Hub asks for fewer requests {info}: try again in some minutes")
    if status >= 500 or status in _PASSING:
        return HubError(f"the Hub answers {info[1:-1]}: try again later")
    lines = {
        401: f"the Hub does not accept the token {info}: it is wrong, expired or revoked, or none was sent; make one "
        f"with write access at {_TOKENS_PAGE}, then `hf auth login` or set HF_TOKEN",
        403: f"the token may not write to {repo_id} {info}: give it write permission there at {_TOKENS_PAGE}, or name "
        "a repository of your own",
        404: f"{repo_id} does not exist, or the token has no access to it {info}: check the name, and that you are a "
        "member of the organisation",
    }
    return UsageError(lines.get(status, f"the Hub refuses it {info}"))
