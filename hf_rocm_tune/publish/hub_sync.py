"""Brings files to the Hub, and shows that what the Hub serves afterwards is what was to be brought.

All files go into one commit, so a reader sees the old state or the new one. What is there with the same hash is not
sent: a push that was interrupted goes on where it was (files of Git LFS are stored one by one before the commit; a file
that was only half sent is sent again, except for the pieces that the Xet storage has).

The check after the commit, of exactly that commit: the hash of every file as the Hub states it (SHA-256 for files in
large file storage, Git's SHA-1 for others), then, unless only hashes are asked for, every byte, downloaded over plain
HTTP past all caches and digested. The hash of a file in large file storage is the one that the client stated when it
sent it, so only the download shows what the storage holds. Not covered: what the Hub serves later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.integrity import manifest
from hf_rocm_tune.integrity.manifest import MANIFEST_NAME, Manifest
from hf_rocm_tune.publish.hub_client import HubClient, add, delete
from hf_rocm_tune.publish.hub_errors import is_conflict, is_of_the_hub
from hf_rocm_tune.publish.upload_stage import Entry, Staged

if TYPE_CHECKING:
    from huggingface_hub import RepoFile

Verify = Literal["download", "hashes"]
_ROUNDS = 2  # a second push of what arrived wrong; more would hide a broken storage
_CONFLICTS = 5  # other commits that may come in between before this ends
_LARGEST_MANIFEST_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """A push that was checked.

    Attributes:
        repo_id: ``USER/NAME``.
        url: where people see it.
        commit: the commit that was checked.
        files: how many files were to be there.
        bytes: their size.
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


def bring(client: HubClient, staged: Sequence[Staged], *, message: str, verify: Verify) -> Pushed:
    """Bring the staged directories to the client's repository, in one commit, and check the result.

    Args:
        client: of a repository that `HubClient.open` has opened.
        staged: what is to be there; folders do not overlap.
        message: first line of the commit.
        verify: see the module's description.

    Raises:
        UsageError: the user can change what is wrong.
        HubError: the Hub does not take it.
        CorruptionError: it took it, and serves something else.
    """
    push = _Push(client, staged, message)
    wrong: list[str] = []
    for _ in range(_ROUNDS):
        commit = push.once()
        wrong = push.check(commit, download=verify == "download")
        if not wrong:
            return push.done(commit, verify)
    raise CorruptionError(
        f"{client.repo_id} on the Hub holds other bytes than were sent: {'; '.join(wrong[:3])} (commit {commit[:10]}). "
        "The files on this disk are sound: delete those on the Hub, or push to another repository"
    )


class _Push:
    """What is to be on the Hub, and what is known of it."""

    def __init__(self, client: HubClient, staged: Sequence[Staged], message: str) -> None:
        self._client, self._staged, self._message = client, staged, message
        self._wanted = {one.path_in_repo: one for each in staged for one in each.entries}
        self._earlier: set[str] | None = None
        self._sent: set[str] = set()
        self._deleted: set[str] = set()
        self._suspect: set[str] = set()
        self._git_hashes: dict[str, str] = {}

    def once(self) -> str:
        """Commit what the Hub lacks, through lost answers and commits of others; the commit that has it all."""
        client = self._client
        tries, conflicts = 0, 0
        while True:
            head = client.head()
            there = client.files(head) if head else {}
            if self._earlier is None:
                self._earlier = self._look_at_earlier(head, there)
            lacking = [p for p, one in self._wanted.items() if p in self._suspect or not self._same(one, there.get(p))]
            stale = sorted(self._stale(there))
            if head is not None and not lacking and not stale:
                return head
            operations = [add(path, str(self._wanted[path].source)) for path in lacking]
            try:
                commit = client.commit([*operations, *map(delete, stale)], message=self._message, parent=head)
            except Exception as error:
                if is_of_the_hub(error) and is_conflict(error) and conflicts < _CONFLICTS:
                    conflicts += 1
                    continue
                tries += 1
                # Had the commit been made and only its answer lost, the next look finds nothing lacking.
                client.retry(error, tries, f"the push to {client.repo_id}")
                continue
            self._suspect.clear()
            self._sent.update(lacking)
            self._deleted.update(stale)
            return commit

    def check(self, commit: str, *, download: bool) -> list[str]:
        """What the Hub serves otherwise than it should, in words; those files are sent again by the next `once`."""
        there = self._client.files(commit)
        wrong = {}
        for path, one in self._wanted.items():
            if path not in there:
                wrong[path] = f"{path} is not there"
            elif not self._same(one, there[path]):
                wrong[path] = f"{path} has another hash"
            elif download and not self._arrives(one, commit):
                wrong[path] = f"{path} arrives with other bytes, twice"
        self._suspect = set(wrong)
        return list(wrong.values())

    def done(self, commit: str, verify: Verify) -> Pushed:
        """The result."""
        return Pushed(
            repo_id=self._client.repo_id,
            url=self._client.url(),
            commit=commit,
            files=len(self._wanted),
            bytes=sum(one.bytes for one in self._wanted.values()),
            sent=len(self._sent),
            deleted=len(self._deleted),
            verify=verify,
        )

    def _look_at_earlier(self, head: str | None, there: Mapping[str, RepoFile]) -> set[str]:
        """The files that an earlier push of ours brought; its manifest stays where it says the same as the new one."""
        earlier: set[str] = set()
        for each in self._staged:
            path = each.prefix + MANIFEST_NAME
            if head is None or path not in there or there[path].size > _LARGEST_MANIFEST_BYTES:
                continue
            found = self._read_manifest(path, head)
            if found is None:
                continue
            content, old = found
            earlier.update(each.prefix + name for name in old.files)
            if replace(old, created="") == replace(each.manifest, created=""):
                source = each.root / MANIFEST_NAME
                source.write_bytes(content)
                digest = hashlib.sha256(content).hexdigest()
                self._wanted[path] = Entry(path_in_repo=path, source=source, bytes=len(content), sha256=digest)
        return earlier

    def _read_manifest(self, path: str, commit: str) -> tuple[bytes, Manifest] | None:
        content = self._client.content(path, commit)
        with TemporaryDirectory() as folder:
            (Path(folder) / MANIFEST_NAME).write_bytes(content)
            read = manifest.read(Path(folder))
        return (content, read) if isinstance(read, Manifest) else None

    def _stale(self, there: Mapping[str, RepoFile]) -> set[str]:
        """What an earlier push brought and this one does not have: beside the new files it would be used with them."""
        folders = tuple(each.prefix for each in self._staged if each.prefix)
        old = {path for path in there if path in (self._earlier or ()) or (folders and path.startswith(folders))}
        return old - self._wanted.keys()

    def _same(self, wanted: Entry, there: RepoFile | None) -> bool:
        """Whether the Hub states the hash of these bytes."""
        if there is None or there.size != wanted.bytes:
            return False
        if there.lfs is not None:
            return str(there.lfs.sha256) == wanted.sha256
        if wanted.path_in_repo not in self._git_hashes:
            content = wanted.source.read_bytes()
            self._git_hashes[wanted.path_in_repo] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return str(there.blob_id) == self._git_hashes[wanted.path_in_repo]

    def _arrives(self, wanted: Entry, commit: str) -> bool:
        """Whether a download gives these bytes; one that does not is made once more, for the way here may err too."""
        return any(self._client.sha256(wanted.path_in_repo, commit) == wanted.sha256 for _ in range(2))
