"""The child's half of ``bandwidth``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_rocm_tune.machine.child import device_of, step
from hf_rocm_tune.machine.pci import read_upward
from hf_rocm_tune.machine.sysfs import LiveTree
from hf_rocm_tune.transfer import gb_per_s
from hf_rocm_tune.transfer.raw_copies import RawCopies, wait_for

_ROUNDS = 5
_QUEUED = 4
_SLOWED = 3


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Copy page-locked memory both ways, and read the state of the link while copies are on their way.

    Args:
        request: ``device``, ``address``; ``mib``: of one copy; ``root``: what stands for ``/`` where the link is read;
            ``fault``: ``slow``.

    Returns:
        ``to_device`` and ``from_device``: 10^9 bytes a second, the median of some rounds; ``links``: of each link up to
        the processor ``device``, ``speed``, ``width``, ``max_speed`` under load, None where a value was not read.
    """
    device = device_of(request)
    slow = (request.get("fault") or {}).get("kind") == "slow"
    nbytes = request["mib"] << 20
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    address, root = request.get("address"), Path(request.get("root", "/"))
    rates: dict[str, list[float]] = {"to_device": [], "from_device": []}
    links: list[dict[str, Any]] = []
    for _ in range(_ROUNDS + 1):
        for way, target, source in (("to_device", there, host), ("from_device", host, there)):
            step(f"copying {request['mib']} MiB {way.replace('_', ' ')}, {device}")
            began = time.perf_counter()
            _queue(target, source)
            if address is not None:
                links = _links(address, root)  # copies are on their way: an idle link may be slower
            wait_for(there)
            if slow:
                time.sleep((_SLOWED - 1) * (time.perf_counter() - began))
            rates[way].append(gb_per_s(_QUEUED * nbytes, time.perf_counter() - began))
    # The first round wakes the link and is left out.
    return {**{way: statistics.median(all_of[1:]) for way, all_of in rates.items()}, "links": links}


def _queue(target: Tensor, source: Tensor) -> None:
    for _ in range(_QUEUED):
        RawCopies().copy(target, source, what="", non_blocking=True)


def _links(address: str, root: Path) -> list[dict[str, Any]]:
    return [
        {
            "device": link.device,
            "speed": link.speed.value,
            "width": link.width.value,
            "max_speed": link.max_speed.value,
        }
        for link in read_upward(LiveTree(root), address).links
    ]
