"""``hf-rocm-tune push DIR REPO``: push a finished run to the Hugging Face Hub, and show that the Hub serves it.

A directory that is not what its run wrote, and a run that ended with wrong bytes, are refused before anything is sent,
and a copy without this machine's paths is prepared (`staging`). `huggingface_hub` uploads it in one commit, so a reader
sees the old state or the new one; what is there with the same hash is not sent again. Where the Hub, the network or
another commit came in between, the whole step is tried again from the state that the repository is in then; a commit
names the one that it follows (``parent_commit``), so one whose answer was lost is not made twice.

The check after the commit, of exactly that commit: the hash of every file as the Hub states it (SHA-256 for files in
large file storage, Git's SHA-1 for others), then, unless only hashes are asked for, every byte, downloaded over plain
HTTP past all caches and digested: the hash of a file in large file storage is the one that the client stated when it
sent it, so only the download shows what the storage holds. Not covered: what the Hub serves later.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypeVar, get_args

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    RepoFile,
    get_token,
    hf_hub_url,
    set_client_factory,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RevisionNotFoundError,
)
from huggingface_hub.utils import _http as upstream_http
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from hf_rocm_tune.errors import CommandParser, CorruptionError, Interrupted, TuneError, UsageError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.manifest import MANIFEST_NAME, FileEntry, Manifest
from hf_rocm_tune.publish import say
from hf_rocm_tune.publish.history import checkpoints
from hf_rocm_tune.publish.staging import Staged, check_directory, is_hub_id, stage
from hf_rocm_tune.redaction import Private, redact, remember, scrub_text
from hf_rocm_tune.version import __version__

T = TypeVar("T")
Checkpoints = Literal["none", "last", "all"]
Verify = Literal["download", "hashes"]
Say = Callable[[str], None]

LAST_CHECKPOINT = "last-checkpoint/"
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
class PushSettings:
    """How to push.

    Args:
        private: of the repository: True refuses one that is public, False makes a new one public; None makes a new
            one private and takes one that is there as it is.
        revision: branch; it is made where it is not there.
        tags: tags for the commit.
        message: first line of the commit.
        base_model_id: the base model's id on the Hub, where it was loaded from a directory.
        verify: "download" checks every byte that the Hub serves afterwards, "hashes" only what it states of the files.
        checkpoints: what to push beside the result: nothing, the newest one as ``last-checkpoint``, or all.
    """

    private: bool | None = None
    revision: str = "main"
    tags: tuple[str, ...] = ()
    message: str = "Upload with hf-rocm-tune"
    base_model_id: str | None = None
    verify: Verify = "download"
    checkpoints: Checkpoints = "none"

    def __post_init__(self) -> None:
        if self.base_model_id is not None and not is_hub_id(self.base_model_id):
            raise ValueError(f"base_model_id must be an id on the Hub such as ORG/NAME, got {self.base_model_id!r}")
        for name, allowed in (("verify", get_args(Verify)), ("checkpoints", get_args(Checkpoints))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if not self.message.strip() or not self.revision:
            raise ValueError("message and revision must not be empty")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A push that was checked.

    Attributes:
        repo_id: ``USER/NAME``.
        url: where people see it.
        commit: the commit that was checked.
        files, bytes: how many files were to be there, and their size.
        sent: how many of them the Hub did not have.
        deleted: files of an earlier push of ours that this one does not have.
        verify: how the check was made.
    """

    repo_id: str
    url: str
    commit: str
    files: int
    bytes: int
    sent: int
    deleted: int
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


def push(
    directory: str | Path,
    repo_id: str,
    *,
    settings: PushSettings | None = None,
    token: str | None = None,
    say: Say = print,
) -> Pushed:
    """Push a finished run, a checkpoint or a merged model. The local directory is only read.

    Args:
        directory: with the ``integrity.json`` of ours.
        repo_id: ``USER/NAME``, or ``NAME`` for one of the token's owner.
        settings: see `PushSettings`.
        token: with write access; None for HF_TOKEN or the one of `hf auth login`. It is never shown or stored.
        say: takes lines for the user.

    Returns:
        What is now on the Hub, checked.

    Raises:
        UsageError: the directory, the name, the token or the card is wrong.
        CorruptionError: the run ended with wrong bytes, or the Hub serves others than were sent.
        HubError: the Hub does not take it now.
    """
    settings, directory = settings or PushSettings(), Path(directory)
    base = settings.base_model_id
    check_directory(directory)
    private = private_here(directory, repo_id=repo_id, base_model_id=base, token=token)
    repository = Repository(repo_id, private, say, token=token, revision=settings.revision)
    with TemporaryDirectory(prefix="hf-rocm-tune-push-") as scratch:
        staged = []
        for prefix, source in [("", directory), *_checkpoints(directory, settings.checkpoints)]:
            folder = Path(scratch, prefix or "top")
            folder.mkdir()
            written = check_directory(source)
            staged.append(stage(source, written, folder, private=private, prefix=prefix, base_model_id=base))
        amount = sum(entry.bytes for each in staged for _, entry in each.files.values())
        say(f"push to {repo_id}, branch {settings.revision}: {amount / 1e6:.3g} MB")
        for each in staged:
            for line in each.described():
                say(line)
        repository.open(private=settings.private)
        done = repository.bring(staged, message=settings.message, verify=settings.verify)
    for tag in settings.tags:
        repository.tag(tag, done.commit)
    return done


def private_here(
    directory: Path,
    *,
    repo_id: str,
    base_model_id: str | None,
    token: str | None,
    others: Mapping[str, str] | None = None,
) -> Private:
    """What is private of a run: this machine's own, and the paths that the run was given, by what stands for them in
    public ("" for their last name); ``repo_id`` stands for the directory, ``base_model_id`` for the base model's.
    """
    paths = dict(others or {})
    for place in (directory, directory.parent):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            settings = json.loads((place / "run.json").read_text(encoding="utf-8"))["settings"]
            for key, value in settings.items():
                if isinstance(value, str) and os.path.isabs(value):
                    paths.setdefault(value, (base_model_id or "") if key == "model_name_or_path" else "")
    with suppress(OSError, ValueError, AttributeError):
        config = json.loads((directory / "adapter_config.json").read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        if isinstance(base, str) and os.path.isabs(base):
            paths[base] = base_model_id or ""
    paths[str(directory.absolute())] = repo_id
    logged_in = get_token() if token is None else None
    return Private.of_this_machine(os.environ, paths=paths, secrets=[token, logged_in])


def _checkpoints(directory: Path, which: Checkpoints) -> list[tuple[str, Path]]:
    """Folder on the Hub and directory here of each checkpoint to push."""
    if which == "none":
        return []
    paths = checkpoints(directory)
    if not paths:
        raise UsageError(f"--checkpoints {which}: there is no checkpoint-N in {directory}; leave the flag away")
    return [(LAST_CHECKPOINT, paths[-1])] if which == "last" else [(f"{path.name}/", path) for path in paths]


# ---- the repository on the Hub ----------------------------------------------------------------------------------


class Repository:
    """One repository of the Hub.

    Args:
        repo_id: ``USER/NAME``, or ``NAME`` for one of the token's owner; `open` completes it.
        private: what must not be in a message.
        say: takes a line for the user.
        token: None for the one that the user has logged in with, or HF_TOKEN.
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
                    repo_id=self.repo_id,
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
        """Give a commit a tag; one that it has already is kept.

        Raises:
            UsageError: another commit has it.
        """
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


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from; huggingface_hub wraps the errors of uploads in a RuntimeError."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


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


# ---- the command ----------------------------------------------------------------------------------------------------

_AGAIN = "The same command goes on where it stopped"


def main(argv: Sequence[str]) -> int:
    """Run ``hf-rocm-tune push``."""
    wanted = vars(_parser().parse_args(list(argv)))
    directory, repo_id = wanted.pop("directory"), wanted.pop("repo_id")
    try:
        settings = PushSettings(**{**wanted, "tags": tuple(wanted["tags"])})
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    try:
        done = push(directory, repo_id, settings=settings, say=say)
    except HubError as error:
        raise HubError(f"{error}. {_AGAIN}") from error
    except KeyboardInterrupt as stop:
        raise Interrupted(f"the push was stopped. {_AGAIN}") from stop
    print(done.summary)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="hf-rocm-tune push",
        description="Upload a finished run to the Hugging Face Hub, without this machine's paths, and verify that the "
        "Hub serves what was trained. The token is the one of `hf auth login` or HF_TOKEN.",
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="a finished run, a checkpoint or a merged model")
    parser.add_argument("repo_id", metavar="REPO", help="USER/NAME, or NAME for one of your own")
    visibility = parser.add_mutually_exclusive_group()
    visibility.add_argument("--private", action="store_true", default=None, help="refuse a repository that is public")
    visibility.add_argument(
        "--public", action="store_false", dest="private", default=None, help="make a new repository public, not private"
    )
    parser.add_argument("--revision", default="main", metavar="BRANCH", help="made where it is not there")
    parser.add_argument(
        "--tag", dest="tags", action="append", default=[], metavar="TAG", help="tag the commit; may be repeated"
    )
    parser.add_argument("--message", default=PushSettings.message, help="first line of the commit")
    parser.add_argument(
        "--base_model_id", metavar="ORG/NAME", help="the base model on the Hub, where it was loaded from a directory"
    )
    parser.add_argument(
        "--checkpoints",
        choices=get_args(Checkpoints),
        default="none",
        help="push checkpoints too: the newest as last-checkpoint, or all (default: none)",
    )
    parser.add_argument(
        "--verify",
        choices=get_args(Verify),
        default="download",
        help="afterwards compare every byte, downloaded, or only the hashes that the Hub states (default: download)",
    )
    return parser
