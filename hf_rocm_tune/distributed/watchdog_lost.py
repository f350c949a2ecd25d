"""A collective that fails because another rank has gone: one line instead of a traceback.

Only the text tells gloo's failures from bugs: they are plain ``RuntimeError`` (torch 2.13), and the messages of its
transport begin with the source file. RCCL/NCCL and the store raise types of their own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

import torch.distributed as dist

from hf_rocm_tune.distributed.watchdog_board import Standing
from hf_rocm_tune.errors import StallError

_GLOO = re.compile(r"gloo/transport/|connection (closed|reset) by peer|timed out waiting \d+ms", re.IGNORECASE)
_NCCL = re.compile(r"remote process exited|ncclRemoteError|ncclSystemError|communicator was aborted|timeout", re.I)
_LATE = re.compile(r"timed? ?out", re.IGNORECASE)
_WAIT_SECONDS = 1.0


class PeerLostError(StallError):
    """The connection to another rank broke, which ended for a reason of its own.

    Attributes:
        follows: whoever knows that reason says it instead of this.
    """

    follows = True


def is_lost_peer(error: BaseException) -> bool:
    """Whether an error is a broken connection to another rank, or a collective that did not return in time."""
    if isinstance(error, dist.DistBackendError):
        return _NCCL.search(str(error)) is not None
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return True
    return isinstance(error, RuntimeError) and _GLOO.search(str(error)) is not None


def lost_peer(error: BaseException, ranks: Sequence[Standing], *, where: str) -> PeerLostError:
    """What to tell of a broken connection.

    Args:
        error: see `is_lost_peer`.
        ranks: the other ranks of this machine, alive until a moment ago.
        where: what this rank is at: "in step 12".
    """
    deadline = time.monotonic() + _WAIT_SECONDS  # a connection breaks before its process is gone
    while ranks and all(each.alive for each in ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    gone = [f"rank {each.rank} (pid {each.pid})" for each in ranks if not each.alive]
    if gone:
        is_are = "is" if len(gone) == 1 else "are"
        cause = f"{', '.join(gone)} {is_are} gone without a word: killed (see `dmesg` for want of memory), or crashed"
    elif _LATE.search(str(error)):
        cause = "another rank did not come to a collective within --ddp_timeout"
    else:
        cause = "a rank on another machine is gone or cannot be reached; its own line says why"
    return PeerLostError(
        f"the connection to another rank broke {where}: {cause}. The checkpoints already written are intact: start "
        "the same command again to continue from the newest one"
    )
