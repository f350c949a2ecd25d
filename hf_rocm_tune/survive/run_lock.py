"""Owning an output directory: one run at a time writes there, whatever the file system can do.

Where it has locks, the lock file is locked (``flock``: it belongs to the open file, so that neither another open file
of this process nor the end of one releases it). Where it has none (some network file systems), a lease is created that
names host, process and a random token. Its holder renews it; one that is not renewed has run out, so that a crash does
not block a directory for good. Either way `require_owned` is asked before each write of a checkpoint or a result.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import socket
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import UsageError
from hf_rocm_tune.foreign import read_object, visible
from hf_rocm_tune.machine.process import is_alive, start_ticks, state_of
from hf_rocm_tune.survive.atomic import open_in_place

LOCK_FILE = "_run.lock"
LEASE_FILE = "_run.lease"
LEASE_SECONDS = 120.0
"""How long a lease holds after it was renewed."""
_RENEWALS = 8  # within that time
_PATIENCE = 100  # attempts, ten a second
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def _place() -> str:
    """This machine since its start, and its processes as this one sees them: two containers have the same numbers."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()


class RunLock:
    """Exclusive ownership of an output directory, until `release` or the end of the process, however it ends.

    It belongs to this process alone: neither a forked worker that outlives it nor a pickled copy holds it.

    Raises:
        UsageError: another process, or another object of this one, owns the directory.
        OSError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK_FILE
        self._lease = directory / LEASE_FILE
        self._token = ""  # of the lease, where there are no locks
        self._ended = threading.Event()
        self._descriptor: int | None = open_in_place(self._path, os.O_RDWR)
        try:
            content = os.pread(self._descriptor, 400, 0)
            if content and not content.startswith(b"process "):
                raise OSError(errno.EINVAL, f"{LOCK_FILE} in it is not a lock file of this program: move it elsewhere")
            holder = visible(content.decode("utf-8", "replace")) or "another process"
            if self._has_locks(directory, holder):
                self._refuse_live_lease(directory)
            else:
                self._take_lease(directory)
            # Permission bits do not show whether a disk takes this (quotas, read-only mounts).
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
            os.fsync(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = None
            raise
        _held.add(self)

    def _has_locks(self, directory: Path, holder: str) -> bool:
        """Lock the file; False where the file system cannot."""
        assert self._descriptor is not None
        try:
            self._lock(holder)
            if not os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                raise FileNotFoundError  # another start has ended meanwhile
        except (BlockingIOError, PermissionError, FileNotFoundError) as error:
            raise _in_use(directory, holder) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return False
        return True

    def _lock(self, holder: str) -> None:
        """A worker that was just forked holds its dead parent's lock for a moment, until it has closed the file."""
        assert self._descriptor is not None
        for left in reversed(range(_PATIENCE)):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                named = re.fullmatch(rf"process (\d+) on {re.escape(socket.gethostname())}", holder)
                if not left or named is None or state_of(int(named[1])) not in ("", "Z", "X"):
                    raise
            time.sleep(0.1)

    # ---- the lease ----------------------------------------------------------------------------------------------

    def _refuse_live_lease(self, directory: Path) -> None:
        """Another machine may see the same directory without its locks."""
        lease = self._read_lease()
        if lease is None:
            return
        if self._is_live(lease):
            raise _in_use(directory, _holder(lease))
        self._lease.unlink(missing_ok=True)

    def _take_lease(self, directory: Path) -> None:
        token = secrets.token_hex(8)
        mine = {
            "token": token,
            "pid": os.getpid(),
            "started": start_ticks(os.getpid()),
            "host": socket.gethostname(),
            "place": _place(),
        }
        text = json.dumps(mine)
        for _ in range(3):
            lease = self._read_lease()
            if lease is not None:
                if self._is_live(lease):
                    raise _in_use(directory, _holder(lease))
                self._remove(lease)
            with suppress(FileExistsError):
                descriptor = os.open(self._lease, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                with open(descriptor, "w", encoding="utf-8") as file:
                    file.write(text)
                    file.flush()
                    os.fsync(descriptor)
                self._token = token
                break
        lease = self._read_lease()
        if not self._token or lease is None or lease.get("token") != self._token:
            raise _in_use(directory, "another process" if lease is None else _holder(lease))
        threading.Thread(target=self._renew, daemon=True, name="lease of the output directory").start()

    def _read_lease(self) -> dict[str, Any] | None:
        """The lease that is there; without entries if it is being written, or was not written to its end."""
        if not os.path.lexists(self._lease):
            return None
        try:
            return read_object(self._lease)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            return {}

    def _is_live(self, lease: dict[str, Any]) -> bool:
        """Whether its holder lives; one that this machine does not see, whether it was renewed in time."""
        pid = lease.get("pid")
        started = lease.get("started")
        if lease.get("place") == _place() and isinstance(pid, int) and isinstance(started, int):
            return is_alive(pid, started)
        probe = self._path.with_name(f"{LEASE_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            probe.touch(exist_ok=False)
            now = probe.stat().st_mtime  # by the clock of the file system
            return now - self._lease.stat().st_mtime < LEASE_SECONDS
        except FileNotFoundError:
            return False
        finally:
            probe.unlink(missing_ok=True)

    def _remove(self, stale: dict[str, Any]) -> None:
        """Take a lease that has run out away; only one of several processes succeeds."""
        aside = self._lease.with_name(f"{LEASE_FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        with suppress(FileNotFoundError):
            self._lease.rename(aside)
            with suppress(OSError, ValueError):
                if read_object(aside).get("token") != stale.get("token"):  # a new one, by a process that was faster
                    os.link(aside, self._lease)
            aside.unlink(missing_ok=True)

    def _renew(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / _RENEWALS):
            with suppress(OSError):
                if (self._read_lease() or {}).get("token") != self._token:
                    return
                os.utime(self._lease)

    # ---- while it is held ---------------------------------------------------------------------------------------

    def require_owned(self) -> None:
        """Raise a `UsageError` if another process has taken the directory: after a lease ran out, or by force."""
        if self._descriptor is None:
            return
        lease: dict[str, Any] = {}
        if self._token:
            lease = self._read_lease() or {}
            is_mine = lease.get("token") == self._token
        else:
            try:
                is_mine = os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path))
            except FileNotFoundError:
                is_mine = False
        if not is_mine:
            taker = _holder(lease) if lease else "another process"
            raise UsageError(
                f"{self._path.parent} has been taken by {taker}, or its {LOCK_FILE} was deleted: nothing more is "
                "written there. Look which run is meant to use it, and give the other one another --output_dir"
            )

    def owns(self, directory: Path) -> bool:
        with suppress(OSError):
            return self._descriptor is not None and os.path.samefile(self._path.parent, directory)
        return False

    def release(self) -> None:
        """Release the directory. May be called more than once."""
        self._ended.set()
        if self._descriptor is None:
            return
        with suppress(OSError):  # the disk is gone
            if self._token and (self._read_lease() or {}).get("token") == self._token:
                self._lease.unlink()
            if os.path.samestat(os.fstat(self._descriptor), os.lstat(self._path)):
                self._path.unlink()
        self._forget()

    def _forget(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._ended.set()
        _held.discard(self)

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_lease": self._lease, "_token": "", "_descriptor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _ended=threading.Event())


_held: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked process: the lock is its parent's, and would outlive it here."""
    for lock in list(_held):
        lock._forget()


os.register_at_fork(after_in_child=_forget_all)


def require_owned(directory: Path) -> None:
    """Raise a `UsageError` if this process owned a directory, and another one has taken it."""
    for lock in list(_held):
        if lock.owns(directory):
            lock.require_owned()


def _holder(lease: dict[str, Any]) -> str:
    return visible(f"process {lease.get('pid', '?')} on {lease.get('host', 'another machine')}")[:200]


def _in_use(directory: Path, holder: str) -> UsageError:
    return UsageError(f"{directory} is in use by {holder}: wait for that run, stop it, or choose another --output_dir")
