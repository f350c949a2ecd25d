"""Directories and files that are written atomically.

Everything is written beside its destination under a name that says who is writing (``_staging.<final name>.<pid>-
<start>-<n>``; transformers does not upload ``_*``), flushed, and renamed into place. A killed process leaves only such
a name behind. Not covered: a file system that loses data after fsync, and writers on another host (the run's lock file
keeps them apart).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from hf_rocm_tune.machine.process import is_alive, start_ticks

_LEFTOVER = re.compile(r"^(?P<kind>_staging|_replaced|_deleted)\.(?P<final>.+)\.(?P<pid>\d+)-(?P<start>\d+)-\d+$")
_counter = itertools.count()


@contextlib.contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """An empty directory to write into that becomes ``final`` when the block ends without an exception."""
    staging = create_staging(final)
    try:
        yield staging
        replace_directory(staging, final)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def create_staging(final: Path) -> Path:
    """Make the empty directory in which ``final`` is prepared: a sibling, so that a rename is enough."""
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = _private_name("_staging", final)
    staging.mkdir()
    return staging


def replace_directory(staging: Path, final: Path) -> None:
    """Flush ``staging`` and rename it to ``final``; an older ``final`` is deleted after the new one is in place.

    A kill between the two renames leaves the older one under a name from which `clean_leftovers` restores it.
    """
    flush_tree(staging)
    older = final.rename(_private_name("_replaced", final)) if final.exists() else None
    try:
        staging.rename(final)
    except OSError:
        if older is not None:
            older.rename(final)
        raise
    flush(final.parent)
    if older is not None:
        shutil.rmtree(older, ignore_errors=True)


def move_files(staging: Path, final: Path) -> None:
    """Flush ``staging`` and rename each of its files over that of the same name in ``final``, which keeps the rest."""
    flush_tree(staging)
    names = [path.relative_to(staging) for path in staging.rglob("*") if path.is_file()]
    for name in names:
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(staging / name, final / name)
    for directory in {(final / name).parent for name in names} | {final}:
        flush(directory)


def delete_directory(path: Path) -> None:
    """Delete a directory so that a kill halfway leaves nothing under its name."""
    shutil.rmtree(path.rename(_private_name("_deleted", path)), ignore_errors=True)


def write_text_atomic(path: Path, text: str) -> None:
    """Write ``text`` (UTF-8) to ``path``: a reader sees the old content or the new, never a part of it."""
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise _not_plain(path)
    staging = _private_name("_staging", path)
    try:
        with open(staging, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staging, path)
    except BaseException:
        staging.unlink(missing_ok=True)
        raise
    flush(path.parent)


def open_in_place(path: Path, flags: int) -> int:
    """Open or create a file of a run that is written in place; it is not truncated."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _not_plain(path) from error
        raise
    details = os.fstat(descriptor)
    if not stat.S_ISREG(details.st_mode) or details.st_nlink > 1:
        os.close(descriptor)
        raise _not_plain(path)
    return descriptor


def _not_plain(path: Path) -> OSError:
    return OSError(errno.ELOOP, f"{path.name} is a symlink or not a regular file, and is not replaced: move it away")


def clean_leftovers(parent: Path) -> None:
    """Remove what killed processes left in ``parent``, and restore a directory that was being replaced.

    Names of live writers and all other names are kept.
    """
    for path in sorted(parent.iterdir()):
        match = _LEFTOVER.match(path.name)
        if match is None or is_alive(int(match["pid"]), int(match["start"])):
            continue
        final = parent / match["final"]
        if match["kind"] == "_replaced" and not final.exists():
            path.rename(final)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def flush_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory, topdown=False):
        for name in files:
            flush(Path(folder, name))
        flush(Path(folder))


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _private_name(kind: str, final: Path) -> Path:
    pid = os.getpid()
    return final.with_name(f"{kind}.{final.name}.{pid}-{start_ticks(pid)}-{next(_counter)}")
