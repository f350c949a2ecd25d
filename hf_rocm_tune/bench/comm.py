"""``bench comm``: what it costs to average gradients, by way and size, and what that makes of a training.

Two processes on this machine measure together (the second half of this file). First, averages of one tensor: by the
process group (RCCL or NCCL where there are two cards, gloo) and through the host, verified and not, cast and not; each
is compared with the right one. Then a small Llama with LoRA adapters trains on one rank and on two, every way in turns.

Not covered: several machines.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.utils import logging as transformers_logging

from hf_rocm_tune.bench import report
from hf_rocm_tune.bench.report import VOCABULARY, Figures, Spread, in_turns, ratios, show_bytes, small_llama, table
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.machine.child import Task, answer, run_together, step
from hf_rocm_tune.models.placement import place
from hf_rocm_tune.ranks.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.ranks.gradients import GradientCheck, watch
from hf_rocm_tune.transfer import Mover, TransferSettings
from hf_rocm_tune.transfer.damage import wait_for

SMALLEST = 1 << 10
GOAL = 1.05
"""Step time of verified averages through the host over plain ones that the project wants to stay below."""
_RANKS, _REFERENCE = 2, "gloo"
_ALONE, _DDP, _AGAIN, _HOST = "1 rank", "ddp", "ddp, again", "host"
_DEADLINE_S = 3600.0
_MODELS = {
    "cpu": {"hidden": 512, "layers": 8, "batch": 2, "seq": 128},
    "cuda": {"hidden": 2048, "layers": 12, "batch": 2, "seq": 1024},
}


def run(wanted: Namespace) -> None:
    """Measures, prints, writes. A process that dies or does not come to its end is a `StallError`."""
    device = report.choose_device(wanted.device)
    machine = report.describe(device)
    devices, left_out = _devices(device)
    chosen = {name: getattr(wanted, name) or value for name, value in _MODELS[device.type].items()}
    training = {**chosen, "turns": wanted.turns, "steps": wanted.steps} if wanted.turns else None
    report.progress(f"two processes on {', '.join(devices)}; this takes some minutes")
    found = _measure(devices, wanted, training)
    rows = [*_average_rows(found["all_reduce"]), *_training_rows(found["training"], chosen)]
    settings = {**chosen, "device": devices}
    report.publish(wanted, machine, settings, rows, _tables(rows), _notes(device, rows), left_out)


def _devices(device: torch.device) -> tuple[list[str], list[dict[str, str]]]:
    if device.type == "cpu":
        return ["cpu"] * _RANKS, [{"what": "RCCL or NCCL", "reason": "there is no accelerator, or --device cpu"}]
    if torch.cuda.device_count() >= _RANKS:
        return [f"cuda:{rank}" for rank in range(_RANKS)], []
    reason = "it takes no two processes on one card, and there is one"
    return [str(device)] * _RANKS, [{"what": "RCCL or NCCL", "reason": reason}]


def _measure(devices: Sequence[str], wanted: Namespace, training: Figures | None) -> dict[str, list[Figures]]:
    threads = max(1, len(os.sched_getaffinity(0)) // _RANKS)
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", ignore_cleanup_errors=True) as folder:
        tasks = [
            Task(
                module=__spec__.name,
                request={
                    "rank": rank,
                    "store": str(Path(folder) / "store"),
                    "device": device,
                    "nccl": len(set(devices)) == _RANKS,
                    "sizes": report.sizes(SMALLEST, wanted.max_size // 4 * 4),
                    "repeats": wanted.repeats,
                    "training": training,
                    "threads": threads,
                },
                environ={"OMP_NUM_THREADS": str(threads)},
            )
            for rank, device in enumerate(devices)
        ]
        outcomes = run_together(tasks, deadline_s=_DEADLINE_S)
    for rank, outcome in enumerate(outcomes):
        if outcome.result is None:
            raise StallError(f"process {rank} of the benchmark {outcome.how}: {outcome.error or 'see `doctor`'}")
    result = outcomes[0].result
    assert result is not None
    return result


def _average_rows(found: Sequence[Figures]) -> list[Figures]:
    reference = {row["bytes"]: row["seconds"] for row in found if row["way"] == _REFERENCE}
    return [
        {
            "part": "average",
            "bytes": row["bytes"],
            "way": row["way"],
            "seconds": Spread.of(row["seconds"]),
            "time_to_gloo": ratios(row["seconds"], reference[row["bytes"]]),
            "wrong": row["wrong"],
        }
        for row in found
    ]


def _training_rows(found: Sequence[Figures], size: dict[str, int]) -> list[Figures]:
    by_way = {row["way"]: row for row in found}
    tokens = size["batch"] * size["seq"]
    rows = []
    for way, row in by_way.items():
        reference = by_way[_DDP]
        seconds, sync = row["seconds"], row["sync"] or {}
        rows.append(
            {
                "part": "training",
                "way": way,
                "ranks": row["ranks"],
                "seconds": Spread.of(seconds),
                "tokens_per_second": Spread.of([row["ranks"] * tokens / each for each in seconds]),
                "time_to_ddp": ratios(seconds, reference["seconds"]),
                "processor_time_to_ddp": ratios(row["cpu_seconds"], reference["cpu_seconds"]),
                "bytes_between_ranks_per_step": sync.get("bytes_between_ranks_per_step"),
                "bytes_to_host_and_back_per_step": sync.get("bytes_to_host_and_back_per_step"),
                "wait_seconds_per_step": sync.get("wait_seconds_per_step"),
                "trainable_bytes": row["trainable_bytes"],
                "parameters": row["parameters"],
                "loss": row["loss"],
            }
        )
    return rows


def _notes(device: torch.device, rows: Sequence[Figures]) -> list[str]:
    notes = [
        "averages: seconds of one, the way of the result to the device included, on two processes; ratios are taken "
        "pair by pair in the same turn"
    ]
    wrong = sum(row.get("wrong", 0) for row in rows)
    if wrong:
        notes.append(f"{wrong} timings ended with a WRONG AVERAGE, see the column of that name: run the doctor")
    if device.type == "cpu":
        notes.append("no accelerator: the device is other host memory, and the processes share the processor's cores")
    training = {row["way"]: row for row in rows if row["part"] == "training"}
    if training:
        host, again = training[_HOST], training[_AGAIN]
        seen, noise = host["time_to_ddp"].median, again["time_to_ddp"].median
        work, rest = host["processor_time_to_ddp"].median, again["processor_time_to_ddp"].median
        verdict = report.verdict(seen, noise, GOAL)
        notes += [
            f"a Llama of {host['parameters'] / 1e6:.1f} M parameters, {host['trainable_bytes'] / 1e6:.2f} MB of them "
            "LoRA adapters; every step averages, there is no accumulation",
            f"goal: through the host, verified, within {100 * (GOAL - 1):.0f} % of plain DistributedDataParallel; seen "
            f"{100 * (seen - 1):+.1f} % of time, {verdict}, and {100 * (work - 1):+.1f} % of processor time; plain "
            f"against plain {100 * (noise - 1):+.1f} % and {100 * (rest - 1):+.1f} %",
        ]
    return notes


def _tables(rows: Sequence[Figures]) -> str:
    def to_ddp(name: str) -> Callable[[Figures], str]:
        return lambda row: "reference" if row["way"] == _DDP else row[name].show(3, quartiles=True)

    def each(name: str, scale: float, digits: int) -> Callable[[Figures], str]:
        return lambda row: "-" if row[name] is None else f"{scale * row[name]:.{digits}f}"

    averages = {
        "size": lambda row: show_bytes(row["bytes"]),
        "way": lambda row: row["way"],
        "ms (min .. max)": lambda row: row["seconds"].show(3, 1e3),
        "time to gloo": lambda row: "reference" if row["way"] == _REFERENCE else row["time_to_gloo"].show(2),
        "wrong": lambda row: row["wrong"],
    }
    training = {
        "training": lambda row: row["way"],
        "ranks": lambda row: row["ranks"],
        "ms a step (q1 .. q3)": lambda row: row["seconds"].show(1, 1e3, quartiles=True),
        "tokens/s": lambda row: f"{row['tokens_per_second'].median:,.0f}",
        "time to ddp (q1 .. q3)": to_ddp("time_to_ddp"),
        "processor time to ddp": to_ddp("processor_time_to_ddp"),
        "MB between ranks": each("bytes_between_ranks_per_step", 1e-6, 2),
        "ms waited": each("wait_seconds_per_step", 1e3, 1),
    }
    parts = {"average": averages, "training": training}
    drawn = (
        table(columns, here) for part, columns in parts.items() if (here := [r for r in rows if r["part"] == part])
    )
    return "\n\n".join(drawn)


# ---- one of the two processes: both measure the same in the same order; what the first saw is the result ----------

_PER_TIMING = 4 << 20
_MOST_PER_TIMING = 20
_EXACT = 64
"""Whole numbers up to this, and their averages over two ranks, are exact in bfloat16."""

_HOST_WAYS: dict[str, tuple[str, SyncSettings]] = {
    "host, unverified": ("off", SyncSettings(way="host")),
    "host": ("full", SyncSettings(way="host")),
    "host, fp16": ("full", SyncSettings(way="host", compression="fp16")),
    "host, bf16": ("full", SyncSettings(way="host", compression="bf16")),
}
"""What is verified, and how it is averaged."""

Average = Callable[[Tensor], Tensor]
"""Of the ranks' tensors; it may be written over its argument, and is there when the call returns."""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Join the other process and measure; see `_measure` for the request, of which ``store`` is a file that both see.

    Returns ``all_reduce``: rows by size and way, with ``seconds`` and ``wrong``; ``training``: rows by way.
    """
    device = torch.device(request["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(request["threads"])
    step("joining the other process over gloo")
    store = dist.FileStore(request["store"], _RANKS)  # type: ignore[attr-defined]  # not in torch's annotations
    dist.init_process_group("gloo", store=store, rank=request["rank"], world_size=_RANKS)
    rows = []
    with ExitStack() as stack:
        ways = _ways(device, request["nccl"], stack)
        for nbytes in request["sizes"]:
            step(f"averaging {nbytes:,} bytes")
            rows += _interleave(ways, nbytes, request["repeats"], request["rank"], device)
    training = request["training"]
    return {"all_reduce": rows, "training": (training and _train(training, device, rank=request["rank"])) or []}


def _ways(device: torch.device, nccl: bool, stack: ExitStack) -> dict[str, Average]:
    ways: dict[str, Average] = {}
    if nccl:
        ways["nccl"] = _of_group(dist.new_group(backend="nccl"))
    ways[_REFERENCE] = _of_group(None)
    for name, (verify, settings) in _HOST_WAYS.items():
        mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
        ways[name] = _through_host(HostAveraging(mover, settings))
    return ways


def _of_group(group: Any) -> Average:
    def average(local: Tensor) -> Tensor:
        dist.all_reduce(local.div_(_RANKS), group=group)
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
) -> list[dict[str, Any]]:
    """For each way ``seconds`` of one average, the way of the result to the device included, and how many timings ended
    with a wrong one.
    """
    taken: dict[str, list[tuple[float, bool]]] = {name: [] for name in ways}
    times = max(1, min(_MOST_PER_TIMING, _PER_TIMING // nbytes))
    for repeat, name in in_turns(ways, repeats):
        mine = [_numbers(nbytes, rank, repeat, device) for _ in range(times)]
        wait_for(*mine)
        dist.barrier()
        begun = time.perf_counter()
        averages = [ways[name](each) for each in mine]
        wait_for(*averages)
        seconds = (time.perf_counter() - begun) / times
        if repeat:
            right = torch.stack([_numbers(nbytes, each, repeat, device) for each in range(_RANKS)]).mean(0)
            taken[name].append((seconds, any(not torch.equal(average, right) for average in averages)))
    return [
        {"bytes": nbytes, "way": name, "seconds": [s for s, _ in timings], "wrong": sum(wrong for _, wrong in timings)}
        for name, timings in taken.items()
    ]


def _numbers(nbytes: int, rank: int, repeat: int, device: torch.device) -> Tensor:
    """Whole numbers as float32, so that averages are exact in every dtype and order."""
    index = torch.arange(nbytes // 4, device=device)
    return ((index * 7 + rank * 13 + repeat) % _EXACT).float()


# ---- training -------------------------------------------------------------------------------------------------

_WAYS: dict[str, tuple[str, SyncSettings]] = {
    _DDP: ("off", SyncSettings()),
    _AGAIN: ("off", SyncSettings()),
    "ddp, checked": ("full", SyncSettings()),
    **_HOST_WAYS,
}
"""What is verified, and how gradients are averaged. The second is the first once more: what cannot be told apart."""


@dataclass(kw_only=True, eq=False)
class _TrainedWay:
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
    One rank alone trains while the other waits. A row for each way has wall and processor seconds of each step.
    """
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    model = small_llama(request["hidden"], request["layers"], request["seq"])
    base = get_peft_model(model, LoraConfig(target_modules="all-linear", r=16, lora_alpha=32))
    with ExitStack() as stack:
        sides = {_ALONE: _side(base, None, stack, device, rank)}
        sides |= {name: _side(base, way, stack, device, rank) for name, way in _WAYS.items()}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for turn, name in in_turns(sides, request["turns"]):
            step(f"turn {turn}: training with {name}")
            seconds = _turn(sides[name], request, idle=name == _ALONE and rank > 0)
            taken[name] += seconds if turn else []  # the first rebuilds buckets and fills caches
        return [_row(name, sides[name], taken[name]) for name in sides]


def _side(
    base: nn.Module, way: tuple[str, SyncSettings] | None, stack: ExitStack, device: torch.device, rank: int
) -> _TrainedWay:
    verify, sync = way or ("off", SyncSettings())
    mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
    model = copy.deepcopy(base)
    place(model, mover)
    check = None
    if way is not None:
        model = DistributedDataParallel(model, forward_sync_buffers=False)
        check = watch(model, mover, None, sync)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    return _TrainedWay(
        model=model, mover=mover, optimizer=optimizer, check=check, draws=torch.Generator().manual_seed(rank)
    )


def _turn(side: _TrainedWay, request: Mapping[str, Any], *, idle: bool) -> list[tuple[float, float]]:
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


def _row(name: str, side: _TrainedWay, taken: list[tuple[float, float]]) -> dict[str, Any]:
    trainable = sum(weight.nbytes for weight in side.model.parameters() if weight.requires_grad)
    return {
        "way": name,
        "ranks": 1 if name == _ALONE else dist.get_world_size(),
        "seconds": [seconds for seconds, _ in taken],
        "cpu_seconds": [seconds for _, seconds in taken],
        "loss": side.loss,
        "parameters": sum(weight.numel() for weight in side.model.parameters()),
        "trainable_bytes": trainable,
        "sync": side.check.describe() if side.check is not None else None,
    }


if __name__ == "__main__":
    sys.exit(answer(measure))
