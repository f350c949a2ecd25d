"""One rank of `test_host_sync.py`: the trainings of `gradient_rank`, averaged in other ways."""

from __future__ import annotations

import json
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.cards.averaging import Compression, HostAveraging, SyncSettings
from hf_rocm_tune.cards.gradients import watch
from hf_rocm_tune.transfer import Mover
from tests.cards.gradient_rank import CPU, Case, Net, main

LONG = 20
VIEWS = (("gradient_as_bucket_view", True),)
SMALL_SLOTS = 4096

TO_HOST, TO_DEVICE = "stage=buckets,tensor=*to host", "stage=buckets,tensor=*to device"


def _host(*faults: str, **more: object) -> Case:
    """On the host, with a fault on rank 1, or on both."""
    each = ("", faults[0]) if len(faults) == 1 else faults or ("", "")
    return Case(way="host", faults=(each[0], each[1]), **more)  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    "ddp": Case(checked=False),
    "ddp long": Case(checked=False, steps=LONG),
    "ddp bf16 weights": Case(checked=False, dtype=torch.bfloat16),
    "ddp no window": Case(checked=False, window=1),
    "host": _host(),
    "host long": _host(steps=LONG),
    "host bf16 weights": _host(dtype=torch.bfloat16),
    "host no window": _host(window=1),
    "host unverified": _host(checked=False),
    "host views": _host(options=VIEWS),
    "host pieces": _host(slot_bytes=SMALL_SLOTS),
    "host unused": _host(options=(("find_unused_parameters", True),)),
    "host not finite": _host(poison=2),
    # casts
    "ddp fp16": Case(compression="fp16", steps=LONG),
    "ddp fp16 unchecked": Case(compression="fp16", steps=LONG, checked=False),
    "host fp16": _host(compression="fp16", steps=LONG),
    "ddp bf16": Case(compression="bf16", steps=LONG),
    "host bf16": _host(compression="bf16", steps=LONG),
    "host bf16 pieces": _host(compression="bf16", steps=LONG, slot_bytes=SMALL_SLOTS),
    "host fp16, bf16 weights": _host(compression="fp16", dtype=torch.bfloat16),
    "fp16 overflow": Case(compression="fp16", scale=1e9),
    "ddp fp16, flip on one": Case(compression="fp16", steps=LONG, faults=("", "stage=gradients,kind=flip,count=3")),
    "ddp bf16, zero on both": Case(
        compression="bf16", steps=LONG, faults=("stage=gradients,kind=zero_range,count=2",) * 2
    ),
    "host fp16, to host": _host(f"{TO_HOST},kind=flip,count=2", compression="fp16", steps=LONG),
    # PowerSGD
    "powersgd": Case(compression="powersgd", steps=LONG),
    "powersgd unchecked": Case(compression="powersgd", steps=LONG, checked=False),
    "powersgd, flip on one": Case(
        compression="powersgd", steps=LONG, faults=("", "stage=gradients,kind=flip,first=20,count=1")
    ),
    # transfers that go wrong
    "to host, once": _host(f"{TO_HOST},kind=zero,count=1"),
    "to host, every one": _host(f"{TO_HOST},kind=flip", f"{TO_HOST},kind=zero_range"),
    "to host, pieces": _host(f"{TO_HOST},kind=swap,rate=0.5,seed=3", slot_bytes=SMALL_SLOTS),
    "to device, once": _host(f"{TO_DEVICE},kind=zero,count=1"),
    "to device, dropped": _host(f"{TO_DEVICE},kind=drop", f"{TO_DEVICE},kind=late"),
    "to device, after the verdict": _host(f"{TO_DEVICE},kind=after,count=1"),
    "average, on one": _host("stage=gradients,kind=flip,count=2"),
    "average, on both": _host("stage=gradients,kind=zero,count=1", "stage=gradients,kind=zero,count=1"),
    "average, views": _host("stage=gradients,kind=zero,count=1", options=VIEWS),
    "everything once": _host("kind=zero_range,rate=0.3,seed=4", "kind=flip,rate=0.3,seed=5"),
    # for good
    "to host, for good": _host(f"{TO_HOST},kind=zero,first=3,persist=1"),
    "to device, for good": _host(f"{TO_DEVICE},kind=zero,first=3,persist=1"),
    "to device, for good on both": _host(*[f"{TO_DEVICE},kind=zero,first=3,persist=1"] * 2),
    "average, for good": _host("stage=gradients,kind=zero,first=3,persist=1"),
    "to host, stop": _host(f"{TO_HOST},kind=zero,first=3,count=1", stop=True),
    "to device, stop": _host(f"{TO_DEVICE},kind=zero,first=3,count=1", stop=True),
}


def one_average(compression: Compression, rank: int) -> dict[str, float]:
    """How far the average of random gradients is from the true one, in units of the mean magnitude of an element."""
    draws = torch.Generator().manual_seed(rank)
    local = (0.5 + torch.rand(20_000, generator=draws)) * torch.logspace(-2, 3, 20_000)
    local *= torch.randint(2, local.shape, generator=draws) * 2 - 1
    everyone = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(everyone, local)
    truth, magnitude = (sum(each.double() for each in rows) / 2 for rows in (everyone, [g.abs() for g in everyone]))
    with Mover(CPU) as mover:
        averaging = HostAveraging(mover, SyncSettings(way="host", compression=compression))
        average = averaging.begin(local, name="one", number=0, is_last=True).wait()
    worst = ((average.double() - truth).abs() / magnitude).max()
    return {"worst": float(worst)}


def tell_averages(rank: int) -> None:
    """One line for each compression."""
    compressions: tuple[Compression, ...] = ("none", "fp16", "bf16")
    for compression in compressions:
        print(json.dumps({"case": f"average {compression}", **one_average(compression, rank)}), flush=True)


def die(rank: int, store: str) -> None:
    """Rank 1 is killed when its first bucket is about to come to the host; rank 0 prints how its step ends."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net = Net()
    net.unused.requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    with Mover(CPU) as mover:
        check = watch(model, mover, None, SyncSettings(way="host"))
        assert check is not None
        if rank:
            net.narrow.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            model(torch.ones(2, 64)).sum().backward()
            check.settle(step=1)
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    rank, store, *dying = sys.argv[1:]
    if dying:
        die(int(rank), store)
    else:
        main(int(rank), store, CASES, tell_averages)
