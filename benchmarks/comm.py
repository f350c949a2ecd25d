"""Two processes: what averaging gradients costs, by way and size, and in a training.

    python benchmarks/comm.py [--max_mib 64] [--repeats 7] [--turns 8] [--steps 3] [--device cpu] [--json FILE]

Averages of one tensor by gloo, RCCL or NCCL (with two cards) and through the host, verified and not; each is compared
with the exact one, and its time taken in turns with gloo's. Then a small Llama with LoRA adapters trains on two ranks,
each way in turns with plain DistributedDataParallel, which runs twice: their difference is the noise of the machine.
Not covered: several machines.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_rocm_tune.cards.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.cards.gradients import watch
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.models.placement import place
from hf_rocm_tune.transfer import Mover, TransferSettings
from hf_rocm_tune.transfer.damage import wait_for

RANKS, REFERENCE, DEADLINE_S = 2, "gloo", 3600
EXACT = 64  # whole numbers up to this, and their averages over two ranks, are exact in bfloat16
HOST = {"host, unverified": "off", "host": "full"}
TRAINED = {"ddp": ("off", "ddp"), "ddp, again": ("off", "ddp"), "ddp, checked": ("full", "ddp")} | {
    name: (verify, "host") for name, verify in HOST.items()
}
SIZES = {
    "cpu": {"hidden": 512, "layers": 8, "batch": 2, "seq": 128},
    "cuda": {"hidden": 2048, "layers": 12, "batch": 2, "seq": 1024},
}


def run(wanted: Namespace) -> common.Figures:
    cards = torch.cuda.device_count() if wanted.device.type == "cuda" else 0
    devices = [f"cuda:{rank % cards}" if cards else "cpu" for rank in range(RANKS)]
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-") as folder:
        request = {
            "store": f"{folder}/store", "devices": devices, "nccl": cards >= RANKS, "max": wanted.max_mib << 20,
            "repeats": wanted.repeats, "turns": wanted.turns, "steps": wanted.steps, "out": f"{folder}/out",
            "size": {name: getattr(wanted, name) or value for name, value in SIZES[wanted.device.type].items()},
        }  # fmt: skip
        threads = str(max(1, len(os.sched_getaffinity(0)) // RANKS))
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--one", json.dumps({**request, "rank": rank})],
                env={**os.environ, "OMP_NUM_THREADS": threads},
            )
            for rank in range(RANKS)
        ]
        try:
            codes = [rank.wait(DEADLINE_S) for rank in ranks]
        except subprocess.TimeoutExpired:
            raise StallError(f"the two processes did not end within {DEADLINE_S} s") from None
        finally:
            for rank in ranks:
                rank.kill()
        if any(codes):
            raise StallError(f"the two processes ended with {codes}; what they printed is above")
        found = json.loads(Path(request["out"]).read_text())
    of_gloo = {row["bytes"]: row["seconds"] for row in found["averages"] if row["way"] == REFERENCE}
    averages = [
        {**row, "seconds": common.spread(row["seconds"]),
         "time_to_gloo": common.ratios(row["seconds"], of_gloo[row["bytes"]])}
        for row in found["averages"]
    ]  # fmt: skip
    common.print_table(
        ("average", "KiB", "ms", "time to gloo", "wrong"),
        (
            (row["way"], row["bytes"] >> 10, common.show(row["seconds"], 3, 1e3), common.show(row["time_to_gloo"]),
             row["wrong"])
            for row in averages
        ),
    )  # fmt: skip
    trained = [
        {"way": name, "seconds": common.spread(seconds), "time_to_ddp": common.ratios(seconds, found["trained"]["ddp"])}
        for name, seconds in found["trained"].items()
    ]
    if trained:
        print()
        rows = (
            (row["way"], common.show(row["seconds"], 1, 1e3), common.show(row["time_to_ddp"], 3)) for row in trained
        )
        common.print_table(("training", "ms a step", "time to ddp"), rows)
    return {"benchmark": "comm", "devices": devices, "averages": averages, "training": trained}


def _one(request: common.Figures) -> None:
    """One of the two processes: both measure the same in the same order; the first writes its figures."""
    rank, device = request["rank"], torch.device(request["devices"][request["rank"]])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(request["store"], RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    with ExitStack() as stack:
        ways = {REFERENCE: _of_group(None)}
        ways |= {"nccl": _of_group(dist.new_group(backend="nccl"))} if request["nccl"] else {}
        for name, verify in HOST.items():
            mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
            ways[name] = _through_host(HostAveraging(mover, SyncSettings(method="host")))
        averages, nbytes = [], 1 << 10
        while nbytes <= request["max"]:
            averages += _averages(ways, nbytes, request["repeats"], rank, device)
            nbytes *= 4
    trained = _train(request, device, rank) if request["turns"] else {}
    if rank == 0:
        Path(request["out"]).write_text(json.dumps({"averages": averages, "trained": trained}))


def _of_group(group: Any) -> Callable[[Tensor], Tensor]:
    def average(local: Tensor) -> Tensor:
        dist.all_reduce(local.div_(RANKS), group=group)
        return local

    return average


def _through_host(averaging: HostAveraging) -> Callable[[Tensor], Tensor]:
    def average(local: Tensor) -> Tensor:
        averaging.step_begins()
        found = averaging.begin(local, name="bucket", number=0).wait()
        averaging.check()
        return found

    return average


def _averages(
    ways: dict[str, Callable[[Tensor], Tensor]], nbytes: int, repeats: int, rank: int, device: torch.device
) -> list[common.Figures]:
    """Seconds of one average by each way, its result on the device included, and how many were wrong."""
    rows: dict[str, Any] = {name: {"bytes": nbytes, "way": name, "seconds": [], "wrong": 0} for name in ways}
    times = max(1, min(20, (4 << 20) // nbytes))
    for repeat, name in common.in_turns(ways, repeats):
        mine = [_numbers(nbytes, rank, repeat, device) for _ in range(times)]
        wait_for(*mine)
        dist.barrier()
        begun = time.perf_counter()
        found = [ways[name](each) for each in mine]
        wait_for(*found)
        seconds = (time.perf_counter() - begun) / times
        if repeat:
            exact = torch.stack([_numbers(nbytes, each, repeat, device) for each in range(RANKS)]).mean(0)
            rows[name]["seconds"].append(seconds)
            rows[name]["wrong"] += any(not torch.equal(each, exact) for each in found)
    return list(rows.values())


def _numbers(nbytes: int, rank: int, repeat: int, device: torch.device) -> Tensor:
    """Whole numbers as float32, so that averages are exact in every dtype and order."""
    return ((torch.arange(nbytes // 4, device=device) * 7 + rank * 13 + repeat) % EXACT).float()


def _train(request: common.Figures, device: torch.device, rank: int) -> dict[str, list[float]]:
    """Seconds of each step, by way; each way has its own copy of the model."""
    size = request["size"]
    torch.manual_seed(0)
    model = common.small_llama(size["hidden"], size["layers"], size["seq"])
    base = get_peft_model(model, LoraConfig(target_modules="all-linear", r=16, lora_alpha=32))
    samples = torch.Generator().manual_seed(rank)
    with ExitStack() as stack:
        replicas = {}
        for name, (verify, way) in TRAINED.items():
            mover, sync = (
                stack.enter_context(Mover(device, settings=TransferSettings(verify=verify))),
                SyncSettings(method=way),
            )
            copied = copy.deepcopy(base)
            place(copied, mover)
            parallel = DistributedDataParallel(copied, forward_sync_buffers=False)
            optimizer = torch.optim.AdamW([each for each in copied.parameters() if each.requires_grad], lr=1e-3)
            replicas[name] = (parallel, mover, optimizer, watch(parallel, mover, None, sync))
        taken: dict[str, list[float]] = {name: [] for name in replicas}
        for turn, name in common.in_turns(replicas, request["turns"]):
            parallel, mover, optimizer, check = replicas[name]
            dist.barrier()
            for number in range(request["steps"]):
                rows = torch.randint(2, common.VOCABULARY, (size["batch"], size["seq"]), generator=samples)
                tokens = mover.move(rows, name="tokens", stage="batches")
                wait_for(tokens)
                begun = time.perf_counter()
                loss = parallel(input_ids=tokens, labels=tokens).loss
                loss.backward()
                if check is not None:
                    check.wait_verified(step=turn * request["steps"] + number + 1)
                nn.utils.clip_grad_norm_(parallel.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                wait_for(loss)
                taken[name] += [time.perf_counter() - begun] if turn else []  # the first turn rebuilds buckets
    return taken


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        _one(json.loads(sys.argv[2]))
        sys.exit()
    common.main(
        run,
        __doc__,
        {
            **{name: {"type": int} for name in ("hidden", "layers", "batch", "seq")},
            "max_mib": {"type": int, "default": 64, "help": "largest average in MiB (default: 64)"},
            "repeats": {"type": int, "default": 7, "help": "timings of each way and size (default: 7)"},
            "turns": {"type": int, "default": 8, "help": "turns of each training; 0: none (default: 8)"},
            "steps": {"type": int, "default": 3, "help": "steps a turn (default: 3)"},
        },
    )
