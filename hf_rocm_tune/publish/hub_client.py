"""The Hub's interface, with patience: every call is tried again where that may help, and no request waits for ever.

`huggingface_hub` itself retries uploads of single files (five times within some 20 seconds), not the creation of a
repository, not the listing of files, and not the commit, which might then be made twice. Here a commit names the commit
that it follows (``parent_commit``), so one whose answer was lost cannot be made twice, and whoever calls looks at the
state of the repository before trying again.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoFile, hf_hub_url
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

from hf_rocm_tune.errors import TuneError, UsageError
from hf_rocm_tune.publish.hub_errors import asked_wait, explain, is_of_the_hub, is_transient
from hf_rocm_tune.publish.hub_requests import guard_requests
from hf_rocm_tune.publish.privacy import Private
from hf_rocm_tune.version import __version__

T = TypeVar("T")
_PIECE_BYTES = 1 << 20
_LIBRARY = {"library_name": "hf-rocm-tune", "library_version": __version__}


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How often and how long to try again.

    Args:
        attempts: tries of one call in all.
        first_wait_s: seconds before the second try; doubled for each further one, with a random part of it less.
        longest_wait_s: the longest of these waits.
        longest_asked_wait_s: a longer wait that the Hub asks for is not kept; the call fails instead.
        answer_s: seconds without any byte sent or received after which a request has failed.
    """

    attempts: int = 6
    first_wait_s: float = 1.0
    longest_wait_s: float = 60.0
    longest_asked_wait_s: float = 600.0
    answer_s: float = 120.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or min(self.first_wait_s, self.longest_wait_s, self.longest_asked_wait_s) < 0:
            raise ValueError(f"attempts must be 1 or more and waits not negative, got {self}")
        if not self.answer_s > 0:
            raise ValueError(f"answer_s must be more than 0, got {self.answer_s}")

    def wait_s(self, tries: int, error: BaseException) -> float | None:
        """Seconds to wait after this many tries; None for giving up."""
        asked = asked_wait(error)
        if tries >= self.attempts or (asked or 0.0) > self.longest_asked_wait_s:
            return None
        backoff = min(self.first_wait_s * 2 ** (tries - 1), self.longest_wait_s)
        return max(asked or 0.0, backoff * random.uniform(0.5, 1.0))


@dataclass(kw_only=True)
class HubClient:
    """One repository of the Hub.

    Args:
        repo_id: ``USER/NAME``, or ``NAME`` for one of the token's owner; `open` completes it.
        token: None for the one that the user has logged in with, or HF_TOKEN.
        revision: branch to work on.
        private: what must not be in a message.
        patience: see `Patience`.
        say: takes a line for the user.
        endpoint: address of the Hub; HF_ENDPOINT or the public one unless given.
    """

    repo_id: str
    private: Private
    say: Callable[[str], None]
    token: str | None = field(default=None, repr=False)
    revision: str = "main"
    patience: Patience = field(default_factory=Patience)
    endpoint: str | None = None

    def __post_init__(self) -> None:
        guard_requests(self.patience.answer_s, self.private)
        self._api = HfApi(endpoint=self.endpoint, token=self.token, **_LIBRARY)
        self._headers = build_hf_headers(token=self.token, **_LIBRARY)

    def open(self, *, private: bool | None) -> str:
        """Make the repository and its branch where they are not there; returns the full id.

        Args:
            private: see `PushSettings`.

        Raises:
            UsageError: the token or the name is wrong, the token may not write there, or the repository is public and
                ``private`` is asked for.
            HubError: the Hub does not answer.
        """
        name, api = self.repo_id, self._api
        hidden = private is not False
        url = self._ask("the repository", lambda: api.create_repo(name, private=hidden, exist_ok=True))
        self.repo_id = url.repo_id
        if hidden and not self._ask("its settings", lambda: api.repo_info(self.repo_id)).private:
            if private:
                raise UsageError(
                    f"{self.repo_id} is there and public, and --private is asked for: make it private in its settings "
                    "on the Hub, or name another repository"
                )
            self.say(f"{self.repo_id} is there and public: everyone can read what is pushed to it")
        if self.revision != "main" and not self.revision.startswith("refs/"):
            self._ask("the branch", lambda: api.create_branch(self.repo_id, branch=self.revision, exist_ok=True))
        self._ask("the right to write", self._ask_to_write)
        return self.repo_id

    def _ask_to_write(self) -> None:
        """The first request of an upload, which sends nothing: for a repository that is there, upstream hides a 401 or
        a 403 of the one that makes it.
        """
        self._api.preupload_lfs_files(
            self.repo_id,
            additions=[CommitOperationAdd(path_in_repo="README.md", path_or_fileobj=b"#")],
            revision=self.revision,
        )

    def head(self) -> str | None:
        """The branch's newest commit; None for a repository without one."""

        def look() -> str | None:
            try:
                sha: str | None = self._api.repo_info(self.repo_id, revision=self.revision).sha
            except RevisionNotFoundError:
                return None
            return sha

        return self._ask("the state", look)

    def files(self, commit: str) -> dict[str, RepoFile]:
        """The files of a commit, by path, with the sizes and hashes that the Hub states."""

        def look() -> dict[str, RepoFile]:
            found = self._api.list_repo_tree(self.repo_id, recursive=True, revision=commit)
            return {one.path: one for one in found if isinstance(one, RepoFile)}

        return self._ask("the list of files", look)

    def commit(self, operations: Sequence[Any], *, message: str, parent: str | None) -> str:
        """One commit on ``parent``, tried once; returns its id.

        Raises:
            Exception: whatever the Hub, the network or the client raises; see `hub_errors`.
        """
        done = self._api.create_commit(
            self.repo_id,
            operations=operations,
            commit_message=message,
            revision=self.revision,
            parent_commit=parent,
        )
        return str(done.oid)

    def sha256(self, path: str, commit: str) -> str:
        """Digest of a file as the Hub serves it; see `content`."""

        def read() -> str:
            digest = hashlib.sha256()
            for piece in self._pieces(path, commit):
                digest.update(piece)
            return digest.hexdigest()

        return self._ask(f"the download of {path}", read)

    def content(self, path: str, commit: str) -> bytes:
        """A file as the Hub serves it over plain HTTP; no cache of this machine stands between."""
        return self._ask(f"the download of {path}", lambda: b"".join(self._pieces(path, commit)))

    def _pieces(self, path: str, commit: str) -> Iterator[bytes]:
        url = hf_hub_url(self.repo_id, path, revision=commit, endpoint=self._api.endpoint)
        headers = {**self._headers, "Accept-Encoding": "identity"}
        with http_stream_backoff("GET", url, headers=headers) as answer:
            hf_raise_for_status(answer)
            yield from answer.iter_bytes(_PIECE_BYTES)

    def tag(self, name: str, commit: str) -> None:
        """Give a commit a tag; one that it has already is kept.

        Raises:
            UsageError: another commit has it.
        """
        refs = self._ask("the tags", lambda: self._api.list_repo_refs(self.repo_id))
        target = next((one.target_commit for one in refs.tags if one.name == name), None)
        if target is None:
            self._ask("the tag", lambda: self._api.create_tag(self.repo_id, tag=name, revision=commit, exist_ok=True))
        elif target != commit:
            raise UsageError(f"the tag {name} of {self.repo_id} is at {target[:10]} already: choose another --tag")

    def url(self) -> str:
        """Where people see the repository."""
        return f"{self._api.endpoint}/{self.repo_id}"

    def explained(self, error: BaseException) -> TuneError:
        """See `explain`."""
        return explain(error, repo_id=self.repo_id, private=self.private)

    def retry(self, error: Exception, tries: int, what: str) -> None:
        """Wait before another try, and say so.

        Raises:
            TuneError: there is none; the line that explains the error.
            Exception: ``error`` itself, where it does not come from the Hub.
        """
        if not is_of_the_hub(error):
            raise error
        wait = self.patience.wait_s(tries, error) if is_transient(error) else None
        if wait is None:
            raise self.explained(error) from error
        reason = str(self.explained(error)).rpartition(": ")[0]
        self.say(f"{what}: {reason}; try {tries + 1} of {self.patience.attempts} in {wait:.0f} s")
        time.sleep(wait)

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        """A call that may be repeated without harm, until it succeeds or patience ends."""
        tries = 0
        while True:
            tries += 1
            try:
                return call()
            except Exception as error:
                self.retry(error, tries, f"{what} of {self.repo_id}")


def add(path_in_repo: str, source: str) -> CommitOperationAdd:
    """The operation that puts a local file into a commit."""
    return CommitOperationAdd(path_in_repo=path_in_repo, path_or_fileobj=source)


def delete(path_in_repo: str) -> CommitOperationDelete:
    """The operation that takes a file out."""
    return CommitOperationDelete(path_in_repo=path_in_repo, is_folder=False)
