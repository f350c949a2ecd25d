"""What ended a job for good, passed between its machines.

A record of an ending is a local file (``exits``), so a rank that refused wrong input on one machine would be unknown on
the others: their agents would start it again, or wait for it as long as a collective may take. So the ending is put
into the store at which the machines meet, which machine 0's agent keeps as long as it runs, and every process of the
job looks there every two seconds.

The launcher names the store (`MEETING_VARIABLE`); started in another way (``torchrun``, plain ``accelerate launch``)
the machines hear nothing of each other's endings. Not covered either: machine 0 gone before the others have looked.
"""

from __future__ import annotations

import atexit
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore  # torch's annotations do not export it

#: ``host:port`` of the store at which the machines of a job meet.
MEETING_VARIABLE = "HF_ROCM_TUNE_MEETING"

LOOK_SECONDS = 2.0
_CONNECT_SECONDS = 5.0
_TELL_SECONDS = 20.0
_KEY = "hf_rocm_tune/ending"


def several_machines(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of a job on several machines, by what torch's agent says."""
    return environ.get("GROUP_WORLD_SIZE", "1") not in ("", "1")


def tell(ending: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Put an ending into the store, unless one is there; nothing where there is no store."""
    with suppress(RuntimeError):  # of torch's store: it is gone, and with it whoever would have listened
        if (store := _store(environ, timeout_s=_TELL_SECONDS)) is not None:
            store.compare_set(_KEY, "", json.dumps({**ending, "host": os.uname().nodename}))


def heard(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The ending that some process has put into the store, or None."""
    with suppress(RuntimeError):
        if (store := _store(environ)) is not None:
            return _look(store)
    return None


def listen(hear: Callable[[dict[str, Any]], None], environ: Mapping[str, str]) -> None:
    """Call ``hear`` with the ending from a thread as soon as there is one. Returns at once.

    Imports torch, so call it where torch has been imported.
    """
    if MEETING_VARIABLE in environ and several_machines(environ):
        over = threading.Event()
        thread = threading.Thread(target=_listen, args=(hear, dict(environ), over), name="endings", daemon=True)
        thread.start()
        atexit.register(_end, thread, over)


def _end(thread: threading.Thread, over: threading.Event) -> None:
    """A thread that comes out of torch's store while the interpreter is taken down aborts the process."""
    if not over.is_set():
        over.set()
        thread.join(_CONNECT_SECONDS + 1)


def _listen(hear: Callable[[dict[str, Any]], None], environ: Mapping[str, str], over: threading.Event) -> None:
    store = None
    while not over.is_set():
        try:
            store = store or _store(environ)
            ending = _look(store) if store is not None else None
        except RuntimeError:  # of torch's store: machine 0 is too busy to answer, or gone
            store = ending = None
        if ending is not None:
            over.set()
            hear(ending)
            return
        over.wait(LOOK_SECONDS)


def _look(store: TCPStore) -> dict[str, Any] | None:
    if not store.check([_KEY]):
        return None
    found: dict[str, Any] = json.loads(store.get(_KEY))
    return found


def _store(environ: Mapping[str, str], *, timeout_s: float = _CONNECT_SECONDS) -> TCPStore | None:
    host, _, port = environ.get(MEETING_VARIABLE, "").rpartition(":")
    if not (host and port.isdecimal() and several_machines(environ)):
        return None
    try:  # torch's store tries for all of its time where nobody listens any more
        socket.create_connection((host, int(port)), timeout_s).close()
    except OSError:
        return None
    from torch._C._distributed_c10d import TCPStore  # torch's annotations do not export it

    return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))
