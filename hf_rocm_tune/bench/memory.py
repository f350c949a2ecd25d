"""Peak memory of this process while something runs."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_EVERY_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of resident memory; None where the system does not say (only Linux does).

    Args:
        anonymous: memory that no file backs (``RssAnon``).
        resident: all of it, mapped files included (``VmRSS``, its peak ``VmHWM``).
    """

    anonymous: int | None
    resident: int | None


class PeakMemory:
    """Watches the peaks within a ``with`` block.

    ``resident`` is the kernel's own peak. ``anonymous`` is looked at every 10 ms, because the kernel keeps no peak of
    it: a shorter peak may be missed.
    """

    def __init__(self) -> None:
        self.before = HostMemory(anonymous=_read("RssAnon"), resident=_read("VmRSS"))
        self._anonymous = self.before.anonymous
        self._done = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="memory-watch", daemon=True)

    @property
    def peak(self) -> HostMemory:
        """The peaks so far."""
        return HostMemory(anonymous=self._anonymous, resident=_read("VmHWM"))

    def __enter__(self) -> PeakMemory:
        # Where it is refused, the peak is that of the process so far, which imports alone have not raised much.
        with contextlib.suppress(OSError):
            _CLEAR.write_text("5", encoding="ascii")  # the kernel's peak starts anew, see proc(5)
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._watcher.join()
        self._look()

    def _watch(self) -> None:
        while not self._done.wait(_EVERY_SECONDS):
            self._look()

    def _look(self) -> None:
        now = _read("RssAnon")
        if now is not None:
            self._anonymous = max(now, self._anonymous or 0)


def _read(name: str) -> int | None:
    """A field of this process's status, in bytes; None where there is none."""
    try:
        lines = _STATUS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    row = next((line for line in lines if line.startswith(f"{name}:")), None)
    return None if row is None else int(row.split()[1]) * 1024
