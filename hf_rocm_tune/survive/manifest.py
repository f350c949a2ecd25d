"""``integrity.json``: which files belong to a checkpoint or a finished run, their sizes and SHA-256 digests.

Each digest is of the file as it lies on disk: flushed, dropped from the page cache where the system allows it, and read
again. What the bytes *should* be is compared in `saved_state`, with those of the same reading. A manifest may hold
anything: reading and checking never raise on what they find.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

from hf_rocm_tune.foreign import RefusedName, check_printable, checked_name, file_in, read_object
from hf_rocm_tune.page_cache import open_from_disk
from hf_rocm_tune.survive.atomic import write_text_atomic

MANIFEST_NAME = "integrity.json"
SCHEMA = 1
Status = Literal["checkpoint", "final"]

_CHUNK_BYTES = 1 << 20
_Written = TypeVar("_Written")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size in bytes and SHA-256 (64 hexadecimal digits) of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What one ``integrity.json`` says."""

    run_id: str
    step: int  # optimizer steps done when it was written
    status: Status  # "checkpoint" in the middle of a run, "final" for its result
    created: str  # UTC time, ISO 8601
    files: Mapping[str, FileEntry]  # by name relative to the directory, with "/" between folders
    tensors: Mapping[str, str] = field(default_factory=dict)  # digests by tensor name, where the writer had them
    extra: Mapping[str, Any] = field(default_factory=dict)  # whatever else the writer wanted to keep


class FileProblem(NamedTuple):
    """One thing that is wrong: the file, "missing", "truncated", "changed", "unreadable", "refused" or "damaged"."""

    file: str
    kind: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file} is {self.kind} ({self.detail})"


class Inspection(NamedTuple):
    """The outcome of `inspect`."""

    problems: list[FileProblem]
    manifest: Manifest | None  # None where it cannot be read


def write(
    directory: Path,
    *,
    run_id: str,
    step: int,
    status: Status,
    files: Iterable[str] | None = None,
    entries: Mapping[str, FileEntry] | None = None,
    tensors: Mapping[str, str] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Digest the files of ``directory`` as they lie on disk and write its ``integrity.json``, last and atomically."""
    names = sorted(set(files)) if files is not None else list_files(directory)
    known = entries or {}
    manifest = Manifest(
        run_id=run_id,
        step=step,
        status=status,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files={name: known.get(name) or entry_of(directory / name) for name in names},
        tensors=dict(tensors or {}),
        extra=dict(extra or {}),
    )
    write_text_atomic(directory / MANIFEST_NAME, to_json(manifest))


def read(directory: Path) -> Manifest | FileProblem:
    """The manifest of ``directory``, or what is wrong with it. Never raises on its content."""
    try:
        return _from_json(read_object(file_in(directory, MANIFEST_NAME)))
    except FileNotFoundError:
        return FileProblem(MANIFEST_NAME, "missing", "the directory was never completed, or not by us")
    except RefusedName as error:
        return FileProblem(MANIFEST_NAME, "refused", str(error))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return FileProblem(MANIFEST_NAME, "damaged", f"{type(error).__name__}: {error}")


def run_of(directory: Path) -> str | None:
    """The id of the run that has written ``directory``; None without a manifest that can be read."""
    written = read(directory)
    return written.run_id if isinstance(written, Manifest) else None


def inspect(directory: Path) -> Inspection:
    """Compare every listed file with its entry."""
    manifest = read(directory)
    if isinstance(manifest, FileProblem):
        return Inspection([manifest], None)
    return Inspection(compare(directory, manifest.files), manifest)


def compare(directory: Path, entries: Mapping[str, FileEntry]) -> list[FileProblem]:
    problems = [_check(directory, name, entry) for name, entry in entries.items()]
    return [problem for problem in problems if problem is not None]


def verify(directory: Path) -> list[FileProblem]:
    """All problems of ``directory`` against its manifest; empty means that every listed file is as it was written."""
    return inspect(directory).problems


def _check(directory: Path, name: str, entry: FileEntry) -> FileProblem | None:
    try:
        path = file_in(directory, name)
        size = path.stat().st_size
        if size != entry.bytes:
            kind = "truncated" if size < entry.bytes else "changed"
            return FileProblem(name, kind, f"{size} bytes, {entry.bytes} were written")
        with open(path, "rb") as file:
            there = _digest(file)
    except FileNotFoundError:
        return FileProblem(name, "missing", f"{entry.bytes} bytes were written")
    except RefusedName as error:
        return FileProblem(name, "refused", str(error))
    except (OSError, ValueError) as error:
        return FileProblem(name, "unreadable", str(error))
    if there != entry:
        return FileProblem(name, "changed", "its bytes are not those that were written")
    return None


def list_files(directory: Path) -> list[str]:
    """Names of the files below ``directory`` but its manifest, relative, in the order of folders and names; not of
    links, pipes and files whose names a manifest may not have."""
    names = sorted(path.relative_to(directory) for path in directory.rglob("*"))
    return [path.as_posix() for path in names if path.as_posix() != MANIFEST_NAME and _is_listed(directory, path)]


def _is_listed(directory: Path, name: Path) -> bool:
    try:
        file_in(directory, name.as_posix())
    except (OSError, ValueError):
        return False
    return True


def entry_of(path: Path, copy: BinaryIO | None = None) -> FileEntry:
    """Size and SHA-256 of a file as it lies on disk; its content is written to ``copy``, too."""
    with open_from_disk(path) as file:
        return _digest(file, copy)


@contextmanager
def read_once(path: Path) -> Iterator[tuple[Path, FileEntry]]:
    """A file as it lies on disk, read once: the path of a sealed copy in this process's memory, size and SHA-256."""
    with _sealed(path.name, lambda copy: entry_of(path, copy)) as sealed:
        yield sealed


@contextmanager
def _sealed(name: str, write: Callable[[BinaryIO], _Written]) -> Iterator[tuple[Path, _Written]]:
    """A file in this process's memory that nobody can write to any more: its path, and what ``write`` gave."""
    descriptor = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(descriptor, "wb", closefd=False) as copy:
            written = write(copy)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
        yield Path(f"/proc/{os.getpid()}/fd/{descriptor}"), written
    finally:
        os.close(descriptor)


class PrivateCopy:
    """The files of a directory as they were read once; `directory` shows the copies, and nobody can write to them."""

    def __init__(self, directory: Path, names: Iterable[str], entries: Mapping[str, FileEntry] | None = None) -> None:
        self._open = ExitStack()
        self.entries: dict[str, FileEntry] = {}
        weakref.finalize(self, self._open.close)
        self.directory = Path(self._open.enter_context(TemporaryDirectory(prefix="hf-rocm-tune-")))
        for name in names:
            wanted = (entries or {}).get(name)
            copy, self.entries[name] = self._open.enter_context(read_once(file_in(directory, name)))
            if wanted not in (None, self.entries[name]):
                raise ValueError(f"{name} is changed (its bytes are not those that were written)")
            (self.directory / name).parent.mkdir(exist_ok=True)
            (self.directory / name).symlink_to(copy)

    def set_content(self, name: str, content: bytes) -> None:
        """Show other content for a file; `entries` stay those of the file that was read."""
        copy, _ = self._open.enter_context(_sealed(name, lambda file: file.write(content)))
        (self.directory / name).unlink()
        (self.directory / name).symlink_to(copy)


def _digest(file: BinaryIO, copy: BinaryIO | None = None) -> FileEntry:
    """Of a file's content, which is written to ``copy``, too."""
    digest = hashlib.sha256()
    size = 0
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
        size += len(chunk)
        if copy is not None:
            copy.write(chunk)
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def to_json(manifest: Manifest) -> str:
    """The content of ``integrity.json``."""
    body: dict[str, Any] = {"schema": SCHEMA, **asdict(manifest)}
    return json.dumps({**body, "digest": _own_digest(body)}, indent=1)


def _from_json(body: dict[str, Any]) -> Manifest:
    recorded = body.pop("digest")
    if recorded != _own_digest(body):
        raise ValueError("its own digest does not match: the manifest was changed after it was written")
    if body["schema"] != SCHEMA:
        raise ValueError(f"schema {body['schema']!r}, this version reads {SCHEMA}")
    status, step = body["status"], body["step"]
    if status not in ("checkpoint", "final") or not isinstance(step, int):
        raise ValueError(f"status {status!r} and step {step!r}")
    run_id, created = str(body["run_id"]), str(body["created"])
    check_printable([run_id, created])
    return Manifest(
        run_id=run_id,
        step=step,
        status=status,
        created=created,
        files={checked_name(name): _entry(given) for name, given in body["files"].items()},
        tensors=dict(body["tensors"]),
        extra=dict(body["extra"]),
    )


def _entry(given: Mapping[str, Any]) -> FileEntry:
    return FileEntry(bytes=int(given["bytes"]), sha256=str(given["sha256"]))


def _own_digest(body: Mapping[str, Any]) -> str:
    """SHA-256 of everything else in the manifest, so that a flipped bit in a name or a step is seen as well."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
