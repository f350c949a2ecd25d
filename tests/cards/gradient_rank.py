"""One rank of `test_gradients.py`: trains small models under DistributedDataParallel and prints a JSON line a case."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.cards.averaging import Compression, SyncSettings, Way
from hf_rocm_tune.cards.gradients import watch
from hf_rocm_tune.errors import CorruptionError
from hf_rocm_tune.transfer import FaultSpec, Mover, TransferSettings, digest

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training.

    Args:
        way, compression: how gradients are averaged.
        faults: specification for each rank, "" for none.
        checked: whether anything is verified at all.
        slot_bytes: of the mover's ring; None for its default.
        scale: of the loss.
        stop: whether the first wrong one is to end it.
        dtype: of the weights and their gradients.
        steps: optimizer steps.
        window: micro-batches a step; all but the last under ``no_sync``.
        poison: at this step rank 1's loss is NaN.
        spoil_copy: rank 1's kept copy of its gradients changes in memory once the averages are made.
        options: of DistributedDataParallel.
    """

    way: Way = "ddp"
    compression: Compression = "none"
    faults: tuple[str, str] = ("", "")
    checked: bool = True
    slot_bytes: int | None = None
    scale: float = 1.0
    stop: bool = False
    dtype: torch.dtype = torch.float32
    steps: int = 4
    window: int = 2
    poison: int | None = None
    spoil_copy: bool = False
    options: tuple[tuple[str, Any], ...] = ()


def _both(fault: str, **more: Any) -> Case:
    return Case(faults=(f"stage=gradients,{fault}",) * 2, **more)


CASES: dict[str, Case] = {
    "unchecked": Case(checked=False),
    "clean": Case(),
    "clean long": Case(steps=50),
    "clean long unchecked": Case(steps=50, checked=False),
    "clean bf16": Case(dtype=torch.bfloat16, steps=20),
    "clean views": Case(options=(("gradient_as_bucket_view", True),)),
    "clean unused": Case(options=(("find_unused_parameters", True),)),
    "zero on one": Case(faults=("", "stage=gradients,kind=zero,first=2,count=1")),
    "flip on one": Case(faults=("", "stage=gradients,kind=flip,rate=0.5,seed=5")),
    "zero on both": _both("kind=zero,first=2,count=1"),
    "zero_range on both": _both("kind=zero_range,first=2,count=1,seed=3"),
    "swap on both": _both("kind=swap,first=2,count=1,seed=1"),
    "stale on both": _both("kind=stale,first=4,count=1"),
    "every bucket of both": _both("kind=zero"),
    "views, zero on both": _both("kind=zero,count=2", options=(("gradient_as_bucket_view", True),)),
    "bf16, zero on both": _both("kind=zero,count=2", dtype=torch.bfloat16),
    "bf16, unchecked": Case(dtype=torch.bfloat16, checked=False),
    "way back": Case(faults=("", "kind=zero,count=2"), steps=1),
    "persistent on both": _both("kind=zero,first=3,persist=1"),
    "persistent on one": Case(faults=("stage=gradients,kind=flip,first=3,persist=1", "")),
    "persistent everywhere on one": Case(faults=("", "kind=zero,first=3,persist=1")),
    "asked to stop": Case(faults=("", "stage=gradients,kind=zero,first=3,count=1"), stop=True),
    "copy spoilt": _both("kind=zero,count=1", spoil_copy=True),
    "not finite": Case(poison=2),
    "kind of a copy": _both("kind=drop"),
}


class Net(nn.Module):
    """Weights in several buckets, one of them transposed in memory, one that is frozen and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(64, 96)
        self.narrow = nn.Linear(96, 8)
        self.turned = nn.Parameter(torch.randn(96, 96).t() / 10)
        self.frozen = nn.Parameter(torch.randn(96), requires_grad=False)
        self.unused = nn.Parameter(torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.tanh(self.wide(x)) @ self.turned + self.frozen)


def train(case: Case, rank: int) -> dict[str, Any]:
    """Trains and tells what came out."""
    torch.manual_seed(0)
    options = dict(case.options)
    net = Net().to(case.dtype)
    net.unused.requires_grad_("find_unused_parameters" in options)
    model = DistributedDataParallel(net, bucket_cap_mb=0.02, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    settings = TransferSettings(
        verify="full" if case.checked else "off",
        on_corruption="stop" if case.stop else "recover",
        slot_bytes=case.slot_bytes,
    )
    sync = SyncSettings(way=case.way, compression=case.compression, powersgd_after=2)
    faults = FaultSpec.parse(case.faults[rank]) if case.faults[rank] else None
    draws = torch.Generator().manual_seed(rank)
    outcome: dict[str, Any] = {"done": 0}
    with Mover(CPU, settings=settings, faults=faults) as mover:
        check = watch(model, mover, None, sync)
        assert check is None or watch(model, mover, check, sync) is check
        try:
            for step in range(1, case.steps + 1):
                for micro in range(case.window):
                    batch = torch.randn(4, 64, generator=draws).to(case.dtype)
                    with nullcontext() if micro == case.window - 1 else model.no_sync():
                        loss = model(batch).float().square().mean() / case.window
                        (loss * (torch.nan if rank and step == case.poison else case.scale)).backward()
                if case.spoil_copy and rank and check is not None:
                    check._pending[0].sent[3] *= 1.0001  # so little that its average would pass
                if check is not None:
                    check.settle(step=step)
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


def main(rank: int, store: str, cases: Mapping[str, Case], then: Callable[[int], None] = lambda _: None) -> None:
    """Runs every case on this rank of two, and what comes then."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, case in cases.items():
        print(json.dumps({"case": name, **train(case, rank)}), flush=True)
    then(rank)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as in `fsdp_rank`: gloo's threads outlive the group, and the interpreter's end was seen to abort


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], CASES)
