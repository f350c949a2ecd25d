"""One repository of the Hugging Face Hub: what is brought to it in one commit, and the check that the Hub serves it.

`huggingface_hub` uploads in one commit, so a reader sees the old state or the new one; what is there with the same hash
is not sent again. Where the Hub, the network or another commit came in between, the whole step is tried again from the
state that the repository is in then; a commit names the one that it follows (``parent_commit``), so one whose answer
was lost is not made twice.

The check after the commit, of exactly that commit: the hash of every file as the Hub states it (SHA-256 for files in
large file storage, Git's SHA-1 for others), then, unless only hashes are asked for, every byte, downloaded over plain
HTTP past all caches and digested: the hash of a file in large file storage is the one that the client stated when it
sent it, so only the download shows what the storage holds. Not covered: what the Hub serves later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, hf_hub_url, set_client_factory
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http as upstream_http
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from hf_rocm_tune.errors import CorruptionError, TuneError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_rocm_tune.redaction import Private, redact, remember, scrub_text
from hf_rocm_tune.version import __version__

T = TypeVar("T")
Verify = Literal["download", "hashes"]
Say = Callable[[str], None]

_LIBRARY = {"library_name": "hf-rocm-tune", "library_version": __version__}
_ROUNDS = 2  # a second push of what arrived wrong; more would hide a broken storage
_LARGEST_MANIFEST_BYTES = 64 << 20

# Tries of one step in all, beside those that huggingface_hub makes of a single request; the wait before the second is
# doubled for each further one, with a random part of it less.
_ATTEMPTS, _FIRST_WAIT_S, _LONGEST_WAIT_S, _LONGEST_ASKED_WAIT_S = 6, 1.0, 60.0, 600.0
_ANSWER_S = 120.0  # without any byte sent or received after which a request has failed


class HubError(TuneError):
    """The Hub did not take an upload, although it may at another time. What is on this disk is as it was."""


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A push that was checked."""

    url: str  # where people see it
    commit: str  # the one that was checked
    files: int  # that were to be there
    bytes: int  # of them
    sent: int  # files that the Hub did not have
    deleted: int  # files of an earlier push of ours that this one does not have
    verify: Verify

    @property
    def summary(self) -> str:
        """The push in one line."""
        deleted = f", {self.deleted} of an earlier push deleted" if self.deleted else ""
        downloaded = self.verify == "download"
        how = "every byte downloaded again and compared" if downloaded else "the hashes that it states compared"
        return (
            f"pushed to {self.url} (commit {self.commit[:10]}): {self.files} files, {self.bytes / 1e6:.3g} MB; "
            f"{self.sent} sent, {self.files - self.sent} there already{deleted}; the Hub serves what was trained: {how}"
        )


@dataclass(frozen=True, kw_only=True)
class Staged:
    """A directory that is ready to be uploaded."""

    root: Path  # where its files are
    prefix: str  # the folder on the Hub, with a "/" at its end; "" for the top
    manifest: Manifest  # the one that is uploaded
    changed: Mapping[str, str]  # what was rewritten, by file
    not_listed: tuple[str, ...]  # files of the directory that stay here because no manifest lists them

    @property
    def files(self) -> dict[str, tuple[Path, FileEntry]]:
        """Where the bytes are, their number and their SHA-256, by path on the Hub; the manifest is one of them."""
        entries = {**self.manifest.files, MANIFEST_NAME: manifest.entry_of(self.root / MANIFEST_NAME)}
        return {self.prefix + name: (self.root / name, entry) for name, entry in entries.items()}

    def described(self) -> list[str]:
        """What the user should know, in lines."""
        where = f" in {self.prefix}" if self.prefix else ""
        lines = [f"to be uploaded{where}: {', '.join((*self.manifest.files, MANIFEST_NAME))}"]
        lines += [f"{name}{where} is published without what is local: {what}" for name, what in self.changed.items()]
        if self.not_listed:
            lines.append(f"not uploaded, no manifest lists them: {', '.join(self.not_listed)}")
        return lines

    def drop(self) -> None:
        """Delete the copy."""
        shutil.rmtree(self.root, ignore_errors=True)


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
        _bound_requests()
        remember({"secret": list(private.secrets)})
        for handler in logging.getLogger("huggingface_hub").handlers:
            handler.addFilter(_redact_record)  # adding it again changes nothing
        self._api = HfApi(token=token, **_LIBRARY)
        self._headers = build_hf_headers(token=token, **_LIBRARY)

    @property
    def url(self) -> str:
        """Where people see it."""
        return f"{self._api.endpoint}/{self.repo_id}"

    def open(self, *, private: bool | None, attempts: int | None = None) -> None:
        """Make the repository and its branch where they are not there.

        Raises:
            UsageError: the token or the name is wrong, the token may not write there, or the repository is public and
                ``private`` is asked for.
            HubError: the Hub does not answer.
        """

        def make() -> bool:
            hidden = private is not False
            self.repo_id = self._api.create_repo(self.repo_id, private=hidden, exist_ok=True).repo_id
            public = hidden and not self._api.repo_info(self.repo_id).private
            if self._revision != "main" and not self._revision.startswith("refs/"):
                self._api.create_branch(self.repo_id, branch=self._revision, exist_ok=True)
            # The first request of an upload, which sends nothing: for a repository that is there, upstream hides a 401
            # or a 403 of the one that makes it.
            card = CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=b"#")
            self._api.preupload_lfs_files(self.repo_id, additions=[card], revision=self._revision)
            return public

        if self._retry("the repository", make, attempts):
            if private:
                raise UsageError(
                    f"{self.repo_id} is there and public, and --private is asked for: make it private in its settings "
                    "on the Hub, or name another repository"
                )
            self._say(f"{self.repo_id} is there and public: everyone can read what is pushed to it")

    def bring(self, staged: Sequence[Staged], *, message: str, verify: Verify) -> Pushed:
        """Bring the staged directories, whose folders do not overlap, to the repository in one commit, and check it.

        Raises:
            UsageError: the user can change what is wrong.
            HubError: the Hub does not take it.
            CorruptionError: it took it, and serves something else.
        """
        wanted = {path: file for each in staged for path, file in each.files.items()}
        folders = tuple(each.prefix for each in staged if each.prefix)
        sent: set[str] = set()
        deleted: set[str] = set()
        earlier: set[str] | None = None

        def commit() -> str:
            """The commit that has it all, which an earlier try may have made although its answer was lost."""
            nonlocal earlier
            head, there = self._head()
            if earlier is None:
                earlier = self._brought_earlier(staged, wanted, head, there)
            lacking = [path for path in wanted if not _same(*wanted[path], there.get(path))]
            # What an earlier push brought and this one does not have would be used together with the new files.
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

        for _ in range(_ROUNDS):
            done = self._retry("the push", commit)
            wrong = self._retry("the check", partial(self._check, wanted, done, download=verify == "download"))
            if not wrong:
                return Pushed(
                    url=self.url,
                    commit=done,
                    files=len(wanted),
                    bytes=sum(entry.bytes for _, entry in wanted.values()),
                    sent=len(sent),
                    deleted=len(deleted),
                    verify=verify,
                )
        raise CorruptionError(
            f"{self.repo_id} on the Hub holds other bytes than were sent: {'; '.join(wrong[:3])} (commit "
            f"{done[:10]}). The files on this disk are sound: delete those on the Hub, or push to another repository"
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

    def _content(self, path: str, commit: str) -> Iterator[bytes]:
        """A file as the Hub serves it over plain HTTP, in pieces; no cache of this machine stands between."""
        url = hf_hub_url(self.repo_id, path, revision=commit, endpoint=self._api.endpoint)
        headers = {**self._headers, "Accept-Encoding": "identity"}
        with http_stream_backoff("GET", url, headers=headers) as answer:
            hf_raise_for_status(answer)
            yield from answer.iter_bytes(1 << 20)

    def _brought_earlier(
        self,
        staged: Sequence[Staged],
        wanted: dict[str, tuple[Path, FileEntry]],
        head: str | None,
        there: Mapping[str, RepoFile],
    ) -> set[str]:
        """The files that an earlier push of ours brought; its manifest stays where it says the same as the new one."""
        earlier: set[str] = set()
        for each in staged:
            path, source = each.prefix + MANIFEST_NAME, each.root / MANIFEST_NAME
            if head is None or path not in there or there[path].size > _LARGEST_MANIFEST_BYTES:
                continue
            with TemporaryDirectory() as folder:
                content = b"".join(self._content(path, head))
                (Path(folder) / MANIFEST_NAME).write_bytes(content)
                old = manifest.read(Path(folder))
            if isinstance(old, Manifest):
                earlier.update(each.prefix + name for name in old.files)
                if replace(old, created="") == replace(each.manifest, created=""):
                    source.write_bytes(content)
                    wanted[path] = source, manifest.entry_of(source)
        return earlier

    def _check(self, wanted: Mapping[str, tuple[Path, FileEntry]], commit: str, *, download: bool) -> list[str]:
        """What the Hub serves otherwise than it should, in words."""
        there = self._files(commit)
        wrong = []
        for path, (source, entry) in wanted.items():
            if path not in there:
                wrong.append(f"{path} is not there")
            elif not _same(source, entry, there[path]):
                wrong.append(f"{path} has another hash")
            elif download and not any(self._sha256(path, commit) == entry.sha256 for _ in range(2)):
                wrong.append(f"{path} arrives with other bytes, twice")
        return wrong

    def _sha256(self, path: str, commit: str) -> str:
        digest = hashlib.sha256()
        for piece in self._content(path, commit):
            digest.update(piece)
        return digest.hexdigest()

    def _retry(self, what: str, step: Callable[[], T], attempts: int | None = None) -> T:
        """A step that may be repeated without harm, until it succeeds or patience ends: the one place where errors of
        the Hub's client become ours.
        """
        attempts, tries = attempts or _ATTEMPTS, 0
        while True:
            tries += 1
            try:
                return step()
            except (TuneError, AssertionError, AttributeError, NameError, TypeError):
                raise
            except Exception as error:
                explained = _explained(error, self.repo_id)
                said = scrub_text(str(explained), self._private, names=False)
                wait = _wait_s(tries, error)
                if not isinstance(explained, HubError) or tries >= attempts or wait > _LONGEST_ASKED_WAIT_S:
                    raise type(explained)(said) from error
                reason = said.rpartition(": ")[0]
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


def _wait_s(tries: int, error: BaseException) -> float:
    """Seconds to wait after so many tries: as the Hub asks (Retry-After), or doubled each time."""
    answer = _answer(error)
    said = answer.response.headers.get("Retry-After", "") if answer is not None else ""
    asked = float(said) if said.strip().isdigit() else 0.0
    return max(asked, min(_FIRST_WAIT_S * 2 ** (tries - 1), _LONGEST_WAIT_S) * random.uniform(0.5, 1.0))


@cache
def _bound_requests() -> None:
    """Requests of huggingface_hub end when no byte comes, where the user's own client sets no limit: upstream's waits
    for ever. Once a process: changing the client while another thread uses it would close it under its feet.
    """
    inner: Callable[[], httpx2.Client] = upstream_http._GLOBAL_CLIENT_FACTORY

    def bounded() -> httpx2.Client:
        client = inner()
        if client.timeout == httpx2.Timeout(None):
            client.timeout = httpx2.Timeout(_ANSWER_S)
        return client

    set_client_factory(bounded)


def _redact_record(record: logging.LogRecord) -> bool:
    """Takes secrets, and the query part of addresses (signatures of uploads), out of a log record."""
    record.msg, record.args = re.sub(r"(://[^\s?]*)\?\S*", r"\1", redact(record.getMessage())), ()
    return True


# ---- what went wrong, in words --------------------------------------------------------------------------------------

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
    """One line that says what is wrong and what to do: a ``UsageError`` for what the user can change, a ``HubError``
    where the same may succeed later.
    """
    answer, causes, text = _answer(error), tuple(_causes(error)), str(error)
    in_words = _STATUS_OF_XET.search(text)  # hf_xet has the status in words only
    status = answer.response.status_code if answer is not None else int(in_words[1]) if in_words else None
    if "nvalid metadata in README.md" in text:  # found before the upload, or by the commit itself
        said = text.partition("README.md")[2].strip(" .:\n")
        return UsageError(f"the Hub refuses the model card: {said}; mend the metadata of README.md")
    if status == 404 and answer is None:
        return UsageError("this Hub has no Xet storage (404): set HF_HUB_DISABLE_XET=1, and it is pushed by Git LFS")
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
            return UsageError(f"{repo_id!r} is no name for a repository ({one}): write USER/NAME")
    if "LFS batch API" in text:
        said = " ".join(text.split("\n")[1:]) or text
        return UsageError(f"the Hub refuses a file: {said}; leave it out, or make it smaller")
    what = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split()).rstrip(": ")
    # A proxy's or a load balancer's own page is no JSON; hf_xet's failures are RuntimeErrors.
    network = httpx2.TransportError | json.JSONDecodeError | RuntimeError | ConnectionError | TimeoutError
    if any(isinstance(one, network) for one in causes):
        return HubError(f"the Hub cannot be reached ({what}): check the network")
    return HubError(f"the Hub's client failed ({what}): try again, and if it stays, with another huggingface_hub")


def _of_status(status: int, message: str | None, repo_id: str) -> UsageError | HubError:
    """The line for an answer of the Hub or of its storage."""
    said = f"({status}: {message})" if message else f"({status})"
    if status == 429:
        return HubError(f"the Hub asks for fewer requests {said}: try again in some minutes")
    if status >= 500 or status in _PASSING:
        return HubError(f"the Hub answers {said[1:-1]}: try again later")
    lines = {
        401: f"the Hub does not accept the token {said}: it is wrong, expired or revoked, or none was sent; make one "
        f"with write access at {_TOKENS_PAGE}, then `hf auth login` or set HF_TOKEN",
        403: f"the token may not write to {repo_id} {said}: give it write permission there at {_TOKENS_PAGE}, or name "
        "a repository of your own",
        404: f"{repo_id} is not there, or the token may not see it {said}: check the name, and that the organisation "
        "exists and you are in it",
    }
    return UsageError(lines.get(status, f"the Hub refuses it {said}: change what it names"))
