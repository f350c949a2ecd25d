"""One of the two processes of ``bench comm``: ``python -m hf_rocm_tune.bench.comm_ranks``, the request on stdin.

Both measure the same things in the same order; what the first saw is the result.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hf_rocm_tune.hardware.child_main import answer, step
from hf_rocm_tune.ranks.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.transfer import Mover, TransferSettings
from hf_rocm_tune.transfer.raw_copies import wait_for

RANKS = 2
REFERENCE = "gloo"
HOST_WAYS: dict[str, tuple[str, SyncSettings]] = {
    "host, unverified": ("off", SyncSettings(way="host")),
    "host": ("full", SyncSettings(way="host")),
    "host, fp16": ("full", SyncSettings(way="host", compression="fp16")),
    "host, bf16": ("full", SyncSettings(way="host", compression="bf16")),
}
"""What is verified, and how it is averaged."""
_PER_TIMING = 4 << 20
_MOST_PER_TIMING = 20
_EXACT = 64
"""Whole numbers up to this, and their averages over two ranks, are exact in bfloat16."""

Average = Callable[[Tensor], Tensor]
"""Of the ranks' tensors; it may be written over its argument, and is there when the call returns."""


@dataclass
class Timings:
    """Of one way and size.

    Attributes:
        seconds: of one average each, the way of the result to the device included.
        wrong: how many of the timings ended with a wrong average.
    """

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Join the other process and measure.

    Args:
        request: ``rank``; ``store``: a file that both see; ``device``; ``nccl``: whether RCCL (NCCL) is to be measured;
            ``sizes`` in bytes; ``repeats``; ``training``: see `comm_training.measure`, None for none; ``threads`` of
            torch.

    Returns:
        ``all_reduce``: rows by size and way, with ``seconds`` and ``wrong``; ``training``: rows by way.
    """
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(request["threads"])
    step("joining the other process over gloo")
    store = dist.FileStore(request["store"], RANKS)  # type: ignore[attr-defined]  # not in torch's annotations
    dist.init_process_group("gloo", store=store, rank=request["rank"], world_size=RANKS)
    rows = []
    with ExitStack() as stack:
        ways = _ways(device, request["nccl"], stack)
        for nbytes in request["sizes"]:
            step(f"averaging {nbytes:,} bytes")
            for name, timings in _interleave(ways, nbytes, request["repeats"], request["rank"], device).items():
                rows.append({"bytes": nbytes, "way": name, "seconds": timings.seconds, "wrong": timings.wrong})
    training = []
    if request["training"] is not None:
        from hf_rocm_tune.bench import comm_training

        training = comm_training.measure(request["training"], device, rank=request["rank"])
    return {"all_reduce": rows, "training": training}


def _ways(device: torch.device, nccl: bool, stack: ExitStack) -> dict[str, Average]:
    ways: dict[str, Average] = {}
    if nccl:
        ways["nccl"] = _of_group(dist.new_group(backend="nccl"))
    ways[REFERENCE] = _of_group(None)
    for name, (verify, settings) in HOST_WAYS.items():
        mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
        ways[name] = _through_host(HostAveraging(mover, settings))
    return ways


def _of_group(group: Any) -> Average:
    def average(local: Tensor) -> Tensor:
        dist.all_reduce(local.div_(RANKS), group=group)
        return local

    return average


def _through_host(averaging: HostAveraging) -> Average:
    def average(local: Tensor) -> Tensor:
        averaging.step_begins()
        found = averaging.begin(local, name="bucket", number=0, is_last=True).wait()
        averaging.check()
        return found

    return average


def _interleave(
    ways: Mapping[str, Average], nbytes: int, repeats: int, rank: int, device: torch.device
) -> dict[str, Timings]:
    """All ways in turn, so that none is always the one after another; the first round is thrown away."""
    taken = {name: Timings() for name in ways}
    names = list(ways)
    times = max(1, min(_MOST_PER_TIMING, _PER_TIMING // nbytes))
    for repeat in range(repeats + 1):
        shift = repeat % len(names)
        for name in names[shift:] + names[:shift]:
            mine = [_numbers(nbytes, rank, repeat, device) for _ in range(times)]
            wait_for(*mine)
            dist.barrier()
            begun = time.perf_counter()
            averages = [ways[name](each) for each in mine]
            wait_for(*averages)
            seconds = (time.perf_counter() - begun) / times
            if repeat:
                right = torch.stack([_numbers(nbytes, each, repeat, device) for each in range(RANKS)]).mean(0)
                taken[name].seconds.append(seconds)
                taken[name].wrong += any(not torch.equal(average, right) for average in averages)
    return taken


def _numbers(nbytes: int, rank: int, repeat: int, device: torch.device) -> Tensor:
    """Whole numbers as float32, so that averages are exact in every dtype and order."""
    index = torch.arange(nbytes // 4, device=device)
    return ((index * 7 + rank * 13 + repeat) % _EXACT).float()


if __name__ == "__main__":
    sys.exit(answer(measure))
