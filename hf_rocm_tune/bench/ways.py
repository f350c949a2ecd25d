"""The ways of bringing bytes from one memory to another that `bench transfer` compares.

A way is prepared once for a size (buffers that a user would keep are allocated then) and then called many times. A call
returns what has arrived, and its bytes may be used when the device has been waited for.

Not among them: a verified way back to the host. Nothing that a run uses crosses there through the mover; checkpoints
are read back from their files and compared.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from accelerate.utils import send_to_device

if TYPE_CHECKING:
    from torch import Tensor

    from hf_rocm_tune.transfer import Mover

HOST = torch.device("cpu")
REFERENCES = ("raw pinned", "raw pageable", "raw peer")
"""Names of raw copies, best first: every direction is compared with the first of these that it has."""


@dataclass(frozen=True, kw_only=True)
class Direction:
    """From where to where.

    Args:
        name: ``host to device``, ``device to host`` or ``device to device``.
        source, target: the two devices; on a machine without an accelerator both are the CPU.
    """

    name: str
    source: torch.device
    target: torch.device

    @property
    def on_host(self) -> bool:
        """Whether no accelerator takes part."""
        return self.source.type == self.target.type == "cpu"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way of copying, ready for one source.

    Args:
        name: for the table.
        send: copies the source once and returns what has arrived.
    """

    name: str
    send: Callable[[], Tensor]


Movers = dict[str, "Mover"]


def directions(device: torch.device) -> tuple[list[Direction], list[dict[str, str]]]:
    """The directions that this machine has for `device`, and those that it has not, with the reason."""
    if device.type == "cpu":
        reason = "without an accelerator both ends are host memory: one direction says it all"
        missing = [{"what": name, "reason": reason} for name in ("device to host", "device to device")]
        return [Direction(name="host to device", source=HOST, target=HOST)], missing
    found = [
        Direction(name="host to device", source=HOST, target=device),
        Direction(name="device to host", source=device, target=HOST),
    ]
    count = torch.cuda.device_count()
    if count < 2:
        return found, [{"what": "device to device", "reason": "torch sees one accelerator"}]
    other = torch.device("cuda", (int(device.index or 0) + 1) % count)
    return [*found, Direction(name="device to device", source=device, target=other)], []


def missing_ways(direction: Direction) -> list[dict[str, str]]:
    """The ways that a direction has not, with the reason."""
    if direction.on_host:
        missing = {
            "raw pinned": "page-locked memory needs an accelerator",
            "send_to_device": "Accelerate copies nothing when the tensor is on its device already",
        }
    elif direction.source.type == "cpu":
        missing = {}
    else:
        missing = {"ours": "the mover brings tensors to the device only"}
    return [{"what": f"{direction.name}, {name}", "reason": reason} for name, reason in missing.items()]


def prepare(direction: Direction, source: Tensor, movers: Movers) -> list[Way]:
    """The ways of a direction for one source.

    Args:
        source: uint8[n] in ordinary (pageable) memory of the source device.
        movers: name and mover of each way of ours; their device is the direction's target.
    """
    target = direction.target

    def send_dict() -> Tensor:
        sent: Tensor = send_to_device({"bytes": source}, target)["bytes"]
        return sent

    ways = _raw(direction, source)
    # On the host `.to` returns the tensor itself unless it is told to copy.
    ways.append(Way(name="tensor.to", send=lambda: source.to(target, copy=True)))  # device: it is what is measured
    if not direction.on_host:
        ways.append(Way(name="send_to_device", send=send_dict))
    if direction.source.type == "cpu":
        ways += [Way(name=name, send=_ours(mover, source)) for name, mover in movers.items()]
    return ways


def wait_for(direction: Direction) -> None:
    """Wait until the devices of a direction have done what was queued."""
    for device in (direction.source, direction.target):
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _raw(direction: Direction, source: Tensor) -> list[Way]:
    """Copies between memory that is allocated once."""
    there = torch.empty_like(source, device=direction.target)
    if direction.source.type == direction.target.type == "cuda":
        return [Way(name="raw peer", send=_copy(there, source))]
    pageable = Way(name="raw pageable", send=_copy(there, source))
    if direction.on_host:
        return [pageable]
    if direction.source.type == "cpu":
        locked = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        locked[:] = source
        return [Way(name="raw pinned", send=_copy(there, locked)), pageable]
    locked = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
    return [Way(name="raw pinned", send=_copy(locked, source)), pageable]


def _copy(there: Tensor, source: Tensor) -> Callable[[], Tensor]:
    def send() -> Tensor:
        return there.copy_(source, non_blocking=True)  # device: the raw copy that ours is compared with

    return send


def _ours(mover: Mover, source: Tensor) -> Callable[[], Tensor]:
    return lambda: mover.move(source, name="bytes")
