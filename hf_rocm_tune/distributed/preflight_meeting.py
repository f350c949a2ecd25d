"""What the ranks of a job tell each other before there is a process group: over the launcher's own store.

It is the store in which the process group will meet (``env://``): hosted by torchrun's agent where there is one, else
by rank 0 on MASTER_PORT. torch lets several stores of one process share a server (``multi_tenant``), so the one made
here is in nobody's way; it must be kept until the process group is up. Nothing waits in it without a limit.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from hf_rocm_tune.errors import StallError

_POLL_SECONDS = 0.05
_END_SECONDS = 5.0
_PREFIX = "hf_rocm_tune_preflight"
_DEFAULT_PORT = "29500"  # Accelerate's, for launchers that set none


class Meeting:
    """The ranks of a job, as one of them sees it.

    Args:
        environ: of a rank, as its launcher has filled it.
        limit_s: seconds to find the store.

    Attributes:
        rank, world: of this process, and how many there are.

    Raises:
        StallError: the store is not there.
    """

    def __init__(self, environ: Mapping[str, str], *, limit_s: float) -> None:
        import torch.distributed as dist
        from torch._C._distributed_c10d import PrefixStore, TCPStore  # torch's annotations do not export them

        self.rank, self.world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        host, port = environ["MASTER_ADDR"], int(environ.get("MASTER_PORT", _DEFAULT_PORT))
        hosted = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            store = TCPStore(
                host,
                port,
                is_master=self.rank == 0 and not hosted,
                timeout=timedelta(seconds=limit_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (dist.DistError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise StallError(
                f"rank {self.rank} could not meet the other ranks at {host}:{port} ({first}): see whether rank 0 runs "
                "there, and whether the port is free"
            ) from error
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self._hosts = self.rank == 0 and not hosted
        self._store = PrefixStore(f"{_PREFIX}/{attempt}", store)

    def tell(self, key: str, said: Mapping[str, Any]) -> None:
        """Say something to all ranks."""
        self._store.set(key, json.dumps(said))

    def hear(
        self, keys: Sequence[str], *, limit_s: float, missing: Callable[[list[str]], str], gone: Callable[[], str]
    ) -> list[dict[str, Any]]:
        """Wait for what others say.

        Args:
            keys: what they say it under.
            limit_s: seconds to wait.
            missing: the message when some keys are not there in time, given these.
            gone: looked at while waiting: why there is no use in it, or an empty text.

        Raises:
            StallError: they did not say it in time, or are gone.
        """
        listening = _Listening(self._store, keys)
        ends_at = time.monotonic() + limit_s
        try:
            while listening.goes_on(_POLL_SECONDS):
                if why := gone():
                    raise StallError(why)
                if time.monotonic() >= ends_at:
                    raise StallError(missing(listening.missing or list(keys)))
        except KeyboardInterrupt:
            # A launcher whose rank has died asks the others to end: what they waited for says why.
            if why := gone():
                raise StallError(why) from None
            raise
        finally:
            listening.end()
        if listening.error is not None:
            raise StallError(
                gone()
                or f"rank {self.rank} lost the launcher's store while it waited in it: rank 0 or its launcher ended"
            ) from listening.error
        return listening.heard

    def part(self, *, limit_s: float) -> None:
        """Have heard all. The rank that hosts the store stays until the others have too, but not beyond the limit."""
        self._store.set(f"parted/{self.rank}", "")
        everyone = [f"parted/{rank}" for rank in range(self.world)]
        ends_at = time.monotonic() + limit_s
        while self._hosts and not self._store.check(everyone) and time.monotonic() < ends_at:
            time.sleep(_POLL_SECONDS)


class _Listening:
    """Waits for keys of a store in a thread: a store whose host is stopped answers nothing, however it is asked."""

    def __init__(self, store: Any, keys: Sequence[str]) -> None:
        self.missing = list(keys)
        self.heard: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self._store, self._keys, self._over = store, keys, False
        self._thread = threading.Thread(target=self._listen, name="preflight", daemon=True)
        self._thread.start()

    def goes_on(self, seconds: float) -> bool:
        """Whether it still waits after so many seconds."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self) -> None:
        """Listen no more. It waits for the thread: one that comes out of torch's store while the interpreter is taken
        down aborts the process. One that hangs in it, because its host is stopped, never comes out."""
        self._over = True
        self._thread.join(_END_SECONDS)

    def _listen(self) -> None:
        try:
            while self.missing and not self._over:
                self.missing = [key for key in self.missing if not self._store.check([key])]
                if self.missing:
                    time.sleep(_POLL_SECONDS)
            if not self.missing:
                self.heard = [json.loads(self._store.get(key)) for key in self._keys]
        except Exception as error:  # torch's DistNetworkError: who hosts the store is gone; the other thread tells
            self.error = error


def boot_of_this_machine() -> str:
    """What tells this machine, as it was last started, from others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that nobody has reaped yet does not."""
    if not Path("/proc/self/stat").exists():
        try:
            os.kill(pid, 0)
        except OSError:
            return False
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")
