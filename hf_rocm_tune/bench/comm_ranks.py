"""One of the two processes of ``bench comm``: ``python -m hf_rocm_tune.bench.comm_ranks``, the request on stdin.

Both measure the same things in the same order; what the first saw is the result.
"""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging as transformers_logging

from hf_rocm_tune.bench.report import VOCABULARY, small_llama
from hf_rocm_tune.machine.child import answer, step
from hf_rocm_tune.models.placement import place
from hf_rocm_tune.ranks.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.ranks.gradients import GradientCheck, watch
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
    """Of one way and size."""

    # of one average each, the way of the result to the device included
    seconds: list[float] = field(default_factory=list)
    wrong: int = 0  # how many of the timings ended with a wrong average


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Join the other process and measure.

    Args:
        request: ``rank``; ``store``: a file that both see; ``device``; ``nccl``: whether RCCL (NCCL) is to be measured;
            ``sizes`` in bytes; ``repeats``; ``training``: see `_train`, None for none; ``threads`` of
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
    training = request["training"]
    return {"all_reduce": rows, "training": (training and _train(training, device, rank=request["rank"])) or []}


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


# ---- training -------------------------------------------------------------------------------------------------

ALONE, DDP = "1 rank", "ddp"
WAYS: dict[str, tuple[str, SyncSettings]] = {
    DDP: ("off", SyncSettings()),
    "ddp, again": ("off", SyncSettings()),
    "ddp, checked": ("full", SyncSettings()),
    **HOST_WAYS,
}
"""What is verified, and how gradients are averaged. The second is the first once more: what cannot be told apart."""


@dataclass(kw_only=True, eq=False)
class _Side:
    """One way of training, on this rank."""

    model: nn.Module
    mover: Mover
    optimizer: torch.optim.Optimizer
    check: GradientCheck | None
    draws: torch.Generator
    done: int = 0
    loss: float = 0.0


def _train(request: Mapping[str, Any], device: torch.device, *, rank: int) -> list[dict[str, Any]]:
    """A small Llama with LoRA adapters, trained in several ways, turn by turn; each has its own copy of the model.

    A step is forward, backward with the averages in it, their verdict where there is one, clipping and the optimizer.
    One rank alone trains while the other waits.

    Args:
        request: ``hidden``, ``layers``, ``batch``, ``seq``; ``turns``, and ``steps`` in each.
        device: of this rank.
        rank: its number.

    Returns:
        A row for each way: ``seconds`` and ``cpu_seconds`` (processor time of this process) of each step, the last
        ``loss``, ``trainable_bytes`` and, for several ranks, what `GradientCheck.describe` says.
    """
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    model = small_llama(request["hidden"], request["layers"], request["seq"])
    base = get_peft_model(model, LoraConfig(target_modules="all-linear", r=16, lora_alpha=32))
    with ExitStack() as stack:
        sides = {ALONE: _side(base, None, stack, device, rank)}
        sides |= {name: _side(base, way, stack, device, rank) for name, way in WAYS.items()}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        names = list(sides)
        for turn in range(request["turns"] + 1):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                step(f"turn {turn}: training with {name}")
                seconds = _turn(sides[name], request, idle=name == ALONE and rank > 0)
                taken[name] += seconds if turn else []  # the first rebuilds buckets and fills caches
        return [_row(name, sides[name], taken[name]) for name in names]


def _side(
    base: nn.Module, way: tuple[str, SyncSettings] | None, stack: ExitStack, device: torch.device, rank: int
) -> _Side:
    verify, sync = way or ("off", SyncSettings())
    mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
    model = copy.deepcopy(base)
    place(model, mover)
    check = None
    if way is not None:
        model = DistributedDataParallel(model, forward_sync_buffers=False)
        check = watch(model, mover, None, sync)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    return _Side(model=model, mover=mover, optimizer=optimizer, check=check, draws=torch.Generator().manual_seed(rank))


def _turn(side: _Side, request: Mapping[str, Any], *, idle: bool) -> list[tuple[float, float]]:
    """Seconds and processor seconds of each step."""
    taken: list[tuple[float, float]] = []
    dist.barrier()
    for _ in range(0 if idle else request["steps"]):
        shape = (request["batch"], request["seq"])
        rows = torch.randint(2, VOCABULARY, shape, generator=side.draws)
        tokens = side.mover.move(rows, name="tokens", stage="batches")
        wait_for(tokens)
        begun = time.perf_counter(), time.process_time()
        loss = side.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        side.done += 1
        if side.check is not None:
            side.check.settle(step=side.done)
        nn.utils.clip_grad_norm_(side.model.parameters(), 1.0)
        side.optimizer.step()
        side.optimizer.zero_grad()
        side.loss = loss.item()
        wait_for(tokens)
        taken.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    dist.barrier()
    return taken


def _row(name: str, side: _Side, taken: list[tuple[float, float]]) -> dict[str, Any]:
    trainable = sum(weight.nbytes for weight in side.model.parameters() if weight.requires_grad)
    return {
        "way": name,
        "ranks": 1 if name == ALONE else dist.get_world_size(),
        "seconds": [seconds for seconds, _ in taken],
        "cpu_seconds": [seconds for _, seconds in taken],
        "loss": side.loss,
        "parameters": sum(weight.numel() for weight in side.model.parameters()),
        "trainable_bytes": trainable,
        "sync": side.check.describe() if side.check is not None else None,
    }


if __name__ == "__main__":
    sys.exit(answer(measure))
