"""``bench comm``: what averaging gradients costs, by way and size, and in a training.

Two processes on this machine measure together (the second half of this file). First, averages of one tensor: by the
process group (RCCL or NCCL if there are two cards, gloo) and through the host, verified and not, cast and not; each
is compared with the exact one. Then a small Llama with LoRA adapters trains on one rank and on two, each way in turns.

Not covered: several machines.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hf_rocm_tune.cards.averaging import HostAveraging, SyncSettings
from hf_rocm_tune.cards.gradients import GradientCheck, watch
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.machine.child import Task, answer, run_together, step
from hf_rocm_tune.models.placement import place
from hf_rocm_tune.transfer import Mover, TransferSettings
from hf_rocm_tune.transfer.damage import wait_for

SMALLEST = 1 << 10
GOAL = 1.05
"""The project's goal: step time with verified averages through the host over that of plain ones."""
_RANKS, _REFERENCE = 2, "gloo"
_ALONE, _DDP, _AGAIN, _HOST = "1 rank", "ddp", "ddp, again", "host"
_DEADLINE_S = 3600.0
_MODELS = {
    "cpu": {"hidden": 512, "layers": 8, "batch": 2, "seq": 128},
    "cuda": {"hidden": 2048, "layers": 12, "batch": 2, "seq": 1024},
}


def run(wanted: Namespace) -> None:
    """Measures, prints, writes.

    Raises:
        StallError: a process died or did not end before the deadline.
    """
    device = report.choose_device(wanted.device)
    machine = report.describe(device)
    devices, left_out = _devices(device)
    size = {name: getattr(wanted, name) or value for name, value in _MODELS[device.type].items()}
    threads = max(1, len(os.sched_getaffinity(0)) // _RANKS)
    report.progress(f"two processes on {', '.join(devices)}; this takes some minutes")
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", ignore_cleanup_errors=True) as folder:
        request = {
            "store": str(Path(folder) / "store"),
            "nccl": len(set(devices)) == _RANKS,
            "sizes": report.sizes(SMALLEST, wanted.max_size // 4 * 4),
            "repeats": wanted.repeats,
            "training": {**size, "turns": wanted.turns, "steps": wanted.steps} if wanted.turns else None,
            "threads": threads,
        }
        tasks = [
            Task(
                module=__spec__.name,
                request={**request, "rank": rank, "device": device},
                environ={"OMP_NUM_THREADS": str(threads)},
            )
            for rank, device in enumerate(devices)
        ]
        outcomes = run_together(tasks, deadline_s=_DEADLINE_S)
    for rank, outcome in enumerate(outcomes):
        if outcome.result is None:
            raise StallError(f"process {rank} of the benchmark {outcome.how}: {outcome.error or 'see `doctor`'}")
    found = outcomes[0].result
    assert found is not None
    rows = [*_average_rows(found["averages"]), *_training_rows(found["training"], size["batch"] * size["seq"])]
    report.publish(wanted, machine, {**size, "device": devices}, rows, _tables(rows), _notes(device, rows), left_out)


def _devices(device: torch.device) -> tuple[list[str], list[dict[str, str]]]:
    if device.type == "cpu":
        return ["cpu"] * _RANKS, [{"what": "RCCL or NCCL", "reason": "there is no accelerator, or --device cpu"}]
    if torch.cuda.device_count() >= _RANKS:
        return [f"cuda:{rank}" for rank in range(_RANKS)], []
    reason = "it does not accept two processes on one card, and there is one"
    return [str(device)] * _RANKS, [{"what": "RCCL or NCCL", "reason": reason}]


def _average_rows(found: Sequence[Figures]) -> Iterator[Figures]:
    reference = {row["bytes"]: row["seconds"] for row in found if row["way"] == _REFERENCE}
    for row in found:
        seconds = row["seconds"]
        to_gloo = ratios(seconds, reference[row["bytes"]])
        yield {"part": "average", **row, "seconds": Spread.of(seconds), "time_to_gloo": to_gloo}


def _training_rows(found: Sequence[Figures], tokens: int) -> Iterator[Figures]:
    """A row for each way; ``tokens``: of one step on one rank."""
    ddp = next((row for row in found if row["way"] == _DDP), {})
    for row in found:
        seconds, cpu_seconds = row["seconds"], row["cpu_seconds"]
        yield {
            "part": "training",
            **{name: value for name, value in row.items() if name != "cpu_seconds"},
            "seconds": Spread.of(seconds),
            "tokens_per_second": Spread.of([row["ranks"] * tokens / each for each in seconds]),
            "time_to_ddp": ratios(seconds, ddp["seconds"]),
            "processor_time_to_ddp": ratios(cpu_seconds, ddp["cpu_seconds"]),
        }


def _notes(device: torch.device, rows: Sequence[Figures]) -> list[str]:
    notes = [
        "averages: time of one on two processes, the transfer of the result to the device included; ratios are taken "
        "in pairs of the same turn"
    ]
    if wrong := sum(row.get("wrong", 0) for row in rows):
        notes.append(f"{wrong} timings ended with a WRONG AVERAGE, see the column of that name: run the doctor")
    if device.type == "cpu":
        notes.append("no accelerator: the device is other host memory, and the processes share the processor's cores")
    training = {row["way"]: row for row in rows if row["part"] == "training"}
    if training:
        host, again = training[_HOST], training[_AGAIN]
        time_to, noise = host["time_to_ddp"].median, again["time_to_ddp"].median
        work, work_noise = host["processor_time_to_ddp"].median, again["processor_time_to_ddp"].median
        notes += [
            f"a Llama of {host['parameters'] / 1e6:.1f} M parameters, {host['trainable_bytes'] / 1e6:.2f} MB of them "
            "LoRA adapters; gradients are averaged in every step, without accumulation",
            f"goal: through the host, verified, within {100 * (GOAL - 1):.0f} % of plain DistributedDataParallel; "
            f"measured {100 * (time_to - 1):+.1f} % of time, {report.verdict(time_to, noise, GOAL)}, and "
            f"{100 * (work - 1):+.1f} % of processor time; plain against plain {100 * (noise - 1):+.1f} % and "
            f"{100 * (work_noise - 1):+.1f} %",
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


# ---- one of the two processes: both measure the same in the same order; the first one's figures are the result ------

_PER_TIMING = 4 << 20
_MOST_PER_TIMING = 20
_EXACT = 64
"""Whole numbers up to this, and their averages over two ranks, are exact in bfloat16."""

_HOST_WAYS: dict[str, tuple[str, SyncSettings]] = {
    "host, unverified": ("off", SyncSettings(way="host")),
    _HOST: ("full", SyncSettings(way="host")),
    "host, fp16": ("full", SyncSettings(way="host", compression="fp16")),
    "host, bf16": ("full", SyncSettings(way="host", compression="bf16")),
}
"""What is verified, and how gradients are averaged."""
_TRAINED_WAYS: dict[str, tuple[str, SyncSettings | None]] = {
    _ALONE: ("off", None),
    _DDP: ("off", SyncSettings()),
    _AGAIN: ("off", SyncSettings()),
    "ddp, checked": ("full", SyncSettings()),
    **_HOST_WAYS,
}
"""The same; None: one rank alone. `_AGAIN` repeats `_DDP`: their difference is the noise of the measurement."""
_TRAFFIC = ("bytes_between_ranks_per_step", "bytes_to_host_and_back_per_step", "wait_seconds_per_step")

Average = Callable[[Tensor], Tensor]
"""Averages a tensor over the ranks; may overwrite its argument, and returns when the result is there."""


def measure(request: Mapping[str, Any]) -> dict[str, Any]:
    """Join the other process and measure; see `run` for the request, of which ``store`` is a file that both see.

    Returns ``averages``: rows by size and way; ``training``: rows by way; with seconds of each.
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
        ways = {"nccl": _of_group(dist.new_group(backend="nccl"))} if request["nccl"] else {}
        ways[_REFERENCE] = _of_group(None)
        for name, (verify, settings) in _HOST_WAYS.items():
            mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
            ways[name] = _through_host(HostAveraging(mover, settings))
        for nbytes in request["sizes"]:
            step(f"averaging {nbytes:,} bytes")
            rows += _interleave(ways, nbytes, request["repeats"], request["rank"], device)
    training = request["training"]
    return {"averages": rows, "training": _train(training, device, rank=request["rank"]) if training else []}


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
    """For each way ``seconds`` of one average, the transfer of the result to the device included, and how many timings
    ended with a wrong one.
    """
    rows: dict[str, dict[str, Any]] = {name: {"bytes": nbytes, "way": name, "seconds": [], "wrong": 0} for name in ways}
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
            exact = torch.stack([_numbers(nbytes, each, repeat, device) for each in range(_RANKS)]).mean(0)
            rows[name]["seconds"].append(seconds)
            rows[name]["wrong"] += any(not torch.equal(average, exact) for average in averages)
    return list(rows.values())


def _numbers(nbytes: int, rank: int, repeat: int, device: torch.device) -> Tensor:
    """Whole numbers as float32, so that averages are exact in every dtype and order."""
    index = torch.arange(nbytes // 4, device=device)
    return ((index * 7 + rank * 13 + repeat) % _EXACT).float()


@dataclass(kw_only=True, eq=False)
class _Replica:
    """The model as it is trained in one way on this rank."""

    model: nn.Module
    mover: Mover
    optimizer: torch.optim.Optimizer
    check: GradientCheck | None
    samples: torch.Generator
    steps: int = 0
    loss: float = 0.0


def _train(request: Mapping[str, Any], device: torch.device, *, rank: int) -> list[dict[str, Any]]:
    """A small Llama with LoRA adapters, trained in several ways, in turns; each has its own copy of the model.

    A step is forward, backward with the averages in it, their verdict if there is one, clipping and the optimizer. One
    rank alone trains while the other waits. A row for each way has wall and processor seconds of each step.
    """
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    model = small_llama(request["hidden"], request["layers"], request["seq"])
    base = get_peft_model(model, LoraConfig(target_modules="all-linear", r=16, lora_alpha=32))
    with ExitStack() as stack:
        replicas = {name: _replica(base, *way, stack, device, rank) for name, way in _TRAINED_WAYS.items()}
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in replicas}
        for turn, name in in_turns(replicas, request["turns"]):
            step(f"turn {turn}: training with {name}")
            seconds = _turn(replicas[name], request, idle=name == _ALONE and rank > 0)
            taken[name] += seconds if turn else []  # the first rebuilds buckets and fills caches
        return [_row(name, replicas[name], taken[name]) for name in replicas]


def _replica(
    base: nn.Module, verify: str, sync: SyncSettings | None, stack: ExitStack, device: torch.device, rank: int
) -> _Replica:
    mover = stack.enter_context(Mover(device, settings=TransferSettings(verify=verify)))
    model = copy.deepcopy(base)
    place(model, mover)
    check = None
    if sync is not None:
        model = DistributedDataParallel(model, forward_sync_buffers=False)
        check = watch(model, mover, None, sync)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-3)
    samples = torch.Generator().manual_seed(rank)
    return _Replica(model=model, mover=mover, optimizer=optimizer, check=check, samples=samples)


def _turn(replica: _Replica, request: Mapping[str, Any], *, idle: bool) -> list[tuple[float, float]]:
    taken: list[tuple[float, float]] = []
    dist.barrier()
    for _ in range(0 if idle else request["steps"]):
        shape = (request["batch"], request["seq"])
        rows = torch.randint(2, VOCABULARY, shape, generator=replica.samples)
        tokens = replica.mover.move(rows, name="tokens", stage="batches")
        wait_for(tokens)
        begun = time.perf_counter(), time.process_time()
        loss = replica.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        replica.steps += 1
        if replica.check is not None:
            replica.check.settle(step=replica.steps)
        nn.utils.clip_grad_norm_(replica.model.parameters(), 1.0)
        replica.optimizer.step()
        replica.optimizer.zero_grad()
        replica.loss = loss.item()
        wait_for(tokens)
        taken.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    dist.barrier()
    return taken


def _row(name: str, replica: _Replica, taken: list[tuple[float, float]]) -> dict[str, Any]:
    traffic = replica.check.describe() if replica.check is not None else {}
    return {
        "way": name,
        "ranks": 1 if name == _ALONE else dist.get_world_size(),
        "seconds": [seconds for seconds, _ in taken],
        "cpu_seconds": [seconds for _, seconds in taken],
        **{key: traffic.get(key) for key in _TRAFFIC},
        "trainable_bytes": sum(weight.nbytes for weight in replica.model.parameters() if weight.requires_grad),
        "parameters": sum(weight.numel() for weight in replica.model.parameters()),
        "loss": replica.loss,
    }


if __name__ == "__main__":
    sys.exit(answer(measure))
