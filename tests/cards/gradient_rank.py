"""One rank of `test_gradients.py`: trains small models under DistributedDataParallel and prints a JSON line a case."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.cards.averaging import Compression, HostAveraging, SyncSettings
from hf_rocm_tune.cards.gradients import watch
from hf_rocm_tune.cards.preflight import GradSync
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferReport, TransferSettings, digest

CPU = torch.device("cpu")


VIEWS, UNUSED = ("gradient_as_bucket_view", True), ("find_unused_parameters", True)
TO_HOST, TO_DEVICE = "stage=buckets,tensor=*to host", "stage=buckets,tensor=*to device"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Args:
        like: the case that has the same weights, bit for bit; for those without one: plain averages, unchecked.
        way, compression: how gradients are averaged.
        faults: specification for each rank; a single one is rank 1's.
        checked: whether anything is verified at all.
        slot_bytes: of the mover's ring; None for its default.
        scale: of the loss.
        stop: whether the first wrong one is to end it.
        said: in rank 1's error, where every rank has to stop at step 2.
        dtype: of the weights and their gradients.
        poison: at this step rank 1's loss is NaN.
        option: of DistributedDataParallel.
    """

    like: str = ""
    way: GradSync = "ddp"
    compression: Compression = "none"
    faults: tuple[str, ...] = ()
    checked: bool = True
    slot_bytes: int | None = None
    scale: float = 1.0
    stop: bool = False
    said: str = ""
    dtype: torch.dtype = torch.float32
    poison: int | None = None
    option: tuple[str, Any] | None = None


def _both(fault: str, **more: Any) -> Case:
    return Case(like=more.pop("like", "plain"), faults=(f"stage=gradients,{fault}",) * 2, **more)


def _host(*faults: str, **more: Any) -> Case:
    return Case(like=more.pop("like", "plain"), way="host", faults=faults, **more)


PLAIN: dict[str, Case] = {
    "plain": Case(checked=False),
    "plain bf16 weights": Case(checked=False, dtype=torch.bfloat16),
    "plain fp16": Case(checked=False, compression="fp16"),
    "plain bf16": Case(checked=False, compression="bf16"),
    "plain powersgd": Case(checked=False, compression="powersgd"),
}
CLEAN: dict[str, Case] = {
    "ddp": Case(like="plain"),
    "ddp views": Case(like="plain", option=VIEWS),
    "ddp unused": Case(like="plain", option=UNUSED),
    "ddp bf16 weights": Case(like="plain bf16 weights", dtype=torch.bfloat16),
    "ddp fp16": Case(like="plain fp16", compression="fp16"),
    "ddp powersgd": Case(like="plain powersgd", compression="powersgd"),
    "ddp, a fault of copies": _both("kind=drop"),
    "host": _host(),
    "host bf16 weights": _host(like="plain bf16 weights", dtype=torch.bfloat16, compression="fp16"),
    "host views": _host(option=VIEWS),
    "host, larger than a slot": _host(slot_bytes=4096),
    "host unused": _host(option=UNUSED),
    "host unverified": _host(checked=False),
    "host fp16": _host(like="plain fp16", compression="fp16"),
    "host bf16": _host(like="plain bf16", compression="bf16", slot_bytes=4096),
}
SENT_AGAIN: dict[str, Case] = {
    "to host, once": _host(f"{TO_HOST},kind=zero,count=1"),
    "to host, every one": _host(f"{TO_HOST},kind=flip", f"{TO_HOST},kind=zero_range"),
    "to host, fp16": _host(f"{TO_HOST},kind=flip,count=2", like="plain fp16", compression="fp16"),
    "to device, once": _host(f"{TO_DEVICE},kind=zero,count=1"),
    "to device, dropped": _host(f"{TO_DEVICE},kind=drop", f"{TO_DEVICE},kind=late"),
}
MADE_AGAIN: dict[str, Case] = {
    "zero on one": Case(like="plain", faults=("stage=gradients,kind=zero,first=2,count=1",)),
    "flip on one": Case(like="plain", faults=("stage=gradients,kind=flip,rate=0.5,seed=5",)),
    "zero on both": _both("kind=zero,first=2,count=1"),
    "zero_range on both": _both("kind=zero_range,first=2,count=1,seed=3"),
    "swap on both": _both("kind=swap,first=2,count=1,seed=1"),
    "stale on both": _both("kind=stale,first=4,count=1"),
    "every bucket of both": _both("kind=zero"),
    "views, zero on both": _both("kind=zero,count=2", option=VIEWS),
    "bf16 weights, zero on both": _both("kind=zero,count=2", like="plain bf16 weights", dtype=torch.bfloat16),
    "fp16, flip on one": Case(like="plain fp16", compression="fp16", faults=("stage=gradients,kind=flip,count=3",)),
    "host, flip on one": _host("stage=gradients,kind=flip,count=2"),
    "host, after the verdict": _host(f"{TO_DEVICE},kind=after,count=1"),
    "host, everything once": _host("kind=zero_range,rate=0.3,seed=4", "kind=flip,rate=0.3,seed=5"),
    "way back": Case(like="plain", faults=("kind=zero,count=2",)),
}
AGAIN_FAILED = "averaging it again through the host failed too"
STOPS: dict[str, Case] = {
    "persistent on both": _both("kind=zero,first=3,persist=1", said=AGAIN_FAILED),
    "persistent on one": Case(faults=("stage=gradients,kind=flip,first=3,persist=1",), said=AGAIN_FAILED),
    "persistent everywhere": Case(faults=("kind=zero,first=3,persist=1",), said="from cpu arrived wrong on the host"),
    "asked to stop": Case(
        faults=("stage=gradients,kind=zero,first=3,count=1",), stop=True, said="--on_corruption stop"
    ),
    "to host": _host(f"{TO_HOST},kind=zero,first=3,persist=1", said="from cpu arrived wrong on the host"),
    "to device": _host(f"{TO_DEVICE},kind=zero,first=3,persist=1", said="could not be copied back to cpu"),
    "to device on both": _host(*[f"{TO_DEVICE},kind=zero,first=3,persist=1"] * 2, said="copied back to cpu"),
    "to host, stop": _host(f"{TO_HOST},kind=zero,first=3,count=1", stop=True, said="--on_corruption stop"),
}
NOT_FINITE: dict[str, Case] = {
    "not finite": Case(poison=2),
    "host not finite": _host(poison=2),
    "fp16 overflow": Case(compression="fp16", scale=1e9),
}
POWERSGD = {
    "powersgd, flip on one": Case(compression="powersgd", faults=("stage=gradients,kind=flip,first=7,count=1",))
}
CASES = PLAIN | CLEAN | SENT_AGAIN | MADE_AGAIN | STOPS | NOT_FINITE | POWERSGD
STEPS, WINDOW = 4, 2  # optimizer steps; micro-batches of each, all but the last under ``no_sync``


class Net(nn.Module):
    """Weights in several buckets, one of which is frozen and one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 96)
        self.narrow = nn.Linear(96, 8)
        self.turned = nn.Parameter(torch.randn(96, 96) / 10)
        self.frozen = nn.Parameter(torch.randn(96), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x)) @ self.turned + self.frozen)


def train(case: Case, rank: int) -> dict[str, Any]:
    """Trains and tells what came out."""
    torch.manual_seed(0)
    options = dict([case.option] if case.option else [])
    net = Net().to(case.dtype)
    net.unused.requires_grad_("find_unused_parameters" in options)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    settings = TransferSettings(
        verify="full" if case.checked else "off",
        on_corruption="stop" if case.stop else "recover",
        slot_bytes=case.slot_bytes,
    )
    sync = SyncSettings(method=case.way, compression=case.compression, powersgd_after=2)
    fault = dict(zip((1, 0), reversed(case.faults), strict=False)).get(rank)
    faults = FaultSpec.parse(fault) if fault else None
    draws = torch.Generator().manual_seed(rank)
    outcome: dict[str, Any] = {"done": 0}
    with Mover(CPU, settings=settings, faults=faults) as mover:
        check = watch(model, mover, None, sync)
        assert check is None or watch(model, mover, check, sync) is check
        try:
            for step in range(1, STEPS + 1):
                for micro in range(WINDOW):
                    batch = torch.randn(4, 64, generator=draws).to(case.dtype)
                    with nullcontext() if micro == WINDOW - 1 else model.no_sync():
                        loss = model(batch).float().square().mean() / WINDOW
                        (loss * (torch.nan if rank and step == case.poison else case.scale)).backward()
                if check is not None:
                    check.wait_verified(step=step)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
                outcome["done"] = step
        except CorruptionError as error:
            outcome["error"] = str(error)
        outcome["sync"] = check and check.describe()
        found = mover.report.to_dict()
        injected = mover.fault_injection()
    outcome |= {"weights": {name: digest(weight.detach()).hex() for name, weight in net.named_parameters()}}
    outcome |= {name: found[name] for name in ("gradients", "incidents", "buckets")}
    return outcome | {"injected": injected and injected["injected"]}


def one_average(compression: Compression, rank: int) -> float:
    """How far the average of random gradients is from the true one, in units of the mean magnitude of an element."""
    draws = torch.Generator().manual_seed(rank)
    local = (0.5 + torch.rand(20_000, generator=draws)) * torch.logspace(-2, 3, 20_000)
    local *= torch.randint(2, local.shape, generator=draws) * 2 - 1
    everyone = [torch.empty_like(local) for _ in range(2)]
    dist.all_gather(everyone, local)
    truth, magnitude = (sum(each.double() for each in rows) / 2 for rows in (everyone, [g.abs() for g in everyone]))
    with Mover(CPU) as mover:
        averaging = HostAveraging(mover, SyncSettings(method="host", compression=compression))
        average = averaging.begin(local, name="one", number=0).wait()
    return float(((average.double() - truth).abs() / magnitude).max())


class _NoMemory(TransferReport):
    """Fails once, while the first bucket is on its way to the host, as a host without memory does."""

    failed = False

    def add(self, stage: str, **increments: float) -> None:
        if stage == "buckets" and not self.failed:
            self.failed = True
            raise MemoryError("no memory for a bucket")
        super().add(stage, **increments)


def two_averages(compression: Compression, rank: int) -> tuple[float, str]:
    """The second of two averages, the first of which fails on rank 1, and the error that `check` raises there."""
    with Mover(CPU, report=_NoMemory() if rank else None) as mover:
        averaging = HostAveraging(mover, SyncSettings(method="host", compression=compression))
        values = ((10.0, 1.0), (7.0, 0.0))[rank]
        both = [averaging.begin(torch.full((9,), value), name="one", number=at) for at, value in enumerate(values)]
        until = time.monotonic() + 30
        while not both[1].done():
            if time.monotonic() > until:
                return math.nan, "the second average did not come"
            time.sleep(0.01)
        average = both[1].value()
        try:
            averaging.check()
        except MemoryError as error:
            return float(average.min()), str(error)
    return float(average.min()), ""


def main(rank: int, store: str) -> None:
    """Runs every case on this rank of two, and averages of one tensor."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, case in CASES.items():
        print(json.dumps({"case": name, **train(case, rank)}), flush=True)
    compressions: tuple[Compression, ...] = ("none", "fp16", "bf16")
    for compression in compressions:
        print(json.dumps({"case": f"average {compression}", "worst": one_average(compression, rank)}), flush=True)
        second, error = two_averages(compression, rank)
        print(json.dumps({"case": f"two averages {compression}", "second": second, "error": error}), flush=True)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads outlive the group, and the interpreter's end was seen to abort


def die(rank: int, store: str) -> None:
    """Rank 1 is killed when its first bucket is about to come to the host; rank 0 prints how its step ends."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    net = Net()
    net.unused.requires_grad_(False)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02)
    with Mover(CPU) as mover:
        check = watch(model, mover, None, SyncSettings(method="host"))
        assert check is not None
        if rank:
            net.narrow.weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        try:
            model(torch.ones(2, 64)).sum().backward()
            check.wait_verified(step=1)
        except RuntimeError as error:
            print(f"{type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    (die if sys.argv[3:] else main)(int(sys.argv[1]), sys.argv[2])
