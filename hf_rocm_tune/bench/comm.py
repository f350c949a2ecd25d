"""``bench comm``: what it costs to average gradients, by way and size, and what that makes of a training.

Two processes on this machine measure together (`comm_ranks`). First, averages of one tensor: by the process group (RCCL
or NCCL where there are two cards, gloo) and through the host, verified and not, cast and not; each is compared with the
right one. Then a small Llama with LoRA adapters trains on one rank and on two (`comm_training`), every way in turns in
one run.

Not covered: several machines; averages after backward instead of in it, as a trainer makes them that steps down when
memory is short.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hf_rocm_tune.bench import machine
from hf_rocm_tune.bench.figures import Spread, ratios, show_bytes, table
from hf_rocm_tune.bench.result import Result, progress, publish
from hf_rocm_tune.errors import StallError, UsageError
from hf_rocm_tune.machine.child import Task, run_together

SMALLEST = 1 << 10
GOAL = 1.05
"""Step time of verified averages through the host over plain ones that the project wants to stay below."""
_MODULE = "hf_rocm_tune.bench.comm_ranks"
_RANKS, _REFERENCE = 2, "gloo"
_ALONE, _DDP, _AGAIN, _HOST = "1 rank", "ddp", "ddp, again", "host"
_DEADLINE_S = 3600.0
_HEAD = 64


@dataclass(frozen=True, kw_only=True)
class CommBench:
    """Settings of ``bench comm``; None: chosen for the device.

    Args:
        device: cpu or cuda; None for accelerators where there are any. With one card, both processes share it.
        max_size: bytes of the largest average.
        repeats: timings of each way and size.
        hidden, layers: size of the Llama that is trained; hidden is a multiple of 64.
        batch, seq: rows of a rank's batch, tokens of a row.
        turns: stretches of each training; 0: no training.
        steps: of a stretch.
    """

    device: str | None = None
    max_size: int = 64 << 20
    repeats: int = 7
    hidden: int | None = None
    layers: int | None = None
    batch: int | None = None
    seq: int | None = None
    turns: int = 8
    steps: int = 3

    def __post_init__(self) -> None:
        for name in ("repeats", "hidden", "layers", "batch", "seq", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}; give a whole number from 1 on")
        if self.turns < 0:
            raise UsageError(f"--turns is {self.turns}; give 0 (no training) or more")
        if self.hidden is not None and self.hidden % _HEAD:
            raise UsageError(f"--hidden is {self.hidden}; give a multiple of {_HEAD}")
        if self.max_size < SMALLEST:
            raise UsageError(f"--max_size is {self.max_size} bytes; give at least {show_bytes(SMALLEST)}")


_MODELS = {
    "cpu": {"hidden": 512, "layers": 8, "batch": 2, "seq": 128},
    "cuda": {"hidden": 2048, "layers": 12, "batch": 2, "seq": 1024},
}


def run(bench: CommBench, command: str, *, json_file: Path | None) -> None:
    """Measures, prints, writes.

    Raises:
        UsageError: the device is not there.
        StallError: a process died or did not come to its end.
    """
    device = machine.choose_device(bench.device)
    about = machine.describe(device)
    devices, left_out = _devices(device)
    nccl = len(set(devices)) == _RANKS
    chosen = {name: getattr(bench, name) or value for name, value in _MODELS[device.type].items()}
    training = {**chosen, "turns": bench.turns, "steps": bench.steps} if bench.turns else None
    progress(f"two processes on {', '.join(devices)}; this takes some minutes")
    found = _measure(devices, nccl, bench, training)
    rows = [*_average_rows(found["all_reduce"]), *_training_rows(found["training"], chosen)]
    result = Result(
        bench="comm",
        command=command,
        machine=about,
        settings={**asdict(bench), **chosen, "device": devices},
        rows=rows,
        notes=_notes(device, rows),
        left_out=left_out,
    )
    publish(result, _tables(rows), json_file)


def sizes(largest: int) -> list[int]:
    """1 KiB, 4 KiB, 16 KiB ... up to `largest`, which is the last whatever it is, in whole float32."""
    found, nbytes = [], SMALLEST
    while nbytes < largest:
        found.append(nbytes)
        nbytes *= 4
    return [*found, largest // 4 * 4]


def _devices(device: torch.device) -> tuple[list[str], list[dict[str, str]]]:
    if device.type == "cpu":
        return ["cpu"] * _RANKS, [{"what": "RCCL or NCCL", "reason": "there is no accelerator, or --device cpu"}]
    if torch.cuda.device_count() >= _RANKS:
        return [f"cuda:{rank}" for rank in range(_RANKS)], []
    reason = "it takes no two processes on one card, and there is one"
    return [str(device)] * _RANKS, [{"what": "RCCL or NCCL", "reason": reason}]


def _measure(
    devices: Sequence[str], nccl: bool, bench: CommBench, training: dict[str, Any] | None
) -> dict[str, list[dict[str, Any]]]:
    threads = max(1, len(os.sched_getaffinity(0)) // _RANKS)
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", ignore_cleanup_errors=True) as folder:
        tasks = [
            Task(
                module=_MODULE,
                request={
                    "rank": rank,
                    "store": str(Path(folder) / "store"),
                    "device": device,
                    "nccl": nccl,
                    "sizes": sizes(bench.max_size),
                    "repeats": bench.repeats,
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


def _average_rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    reference = {row["bytes"]: row["seconds"] for row in found if row["way"] == _REFERENCE}
    return [
        {
            "part": "average",
            "bytes": row["bytes"],
            "way": row["way"],
            "seconds": Spread.of(row["seconds"]).to_dict(),
            "time_to_gloo": ratios(row["seconds"], reference[row["bytes"]]).to_dict(),
            "wrong": row["wrong"],
        }
        for row in found
    ]


def _training_rows(found: Sequence[dict[str, Any]], size: dict[str, int]) -> list[dict[str, Any]]:
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
                "seconds": Spread.of(seconds).to_dict(),
                "tokens_per_second": Spread.of([row["ranks"] * tokens / each for each in seconds]).to_dict(),
                "time_to_ddp": ratios(seconds, reference["seconds"]).to_dict(),
                "processor_time_to_ddp": ratios(row["cpu_seconds"], reference["cpu_seconds"]).to_dict(),
                "bytes_between_ranks_per_step": sync.get("bytes_between_ranks_per_step"),
                "bytes_to_host_and_back_per_step": sync.get("bytes_to_host_and_back_per_step"),
                "wait_seconds_per_step": sync.get("wait_seconds_per_step"),
                "trainable_bytes": row["trainable_bytes"],
                "parameters": row["parameters"],
                "loss": row["loss"],
            }
        )
    return rows


def _notes(device: torch.device, rows: Sequence[dict[str, Any]]) -> list[str]:
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
        seen, noise = host["time_to_ddp"]["median"], again["time_to_ddp"]["median"]
        work, rest = host["processor_time_to_ddp"]["median"], again["processor_time_to_ddp"]["median"]
        verdict = "reached" if seen <= GOAL else "not reached"
        if abs(noise - 1) > GOAL - 1:
            verdict = "which says nothing on a machine this restless"
        notes += [
            f"a Llama of {host['parameters'] / 1e6:.1f} M parameters, {host['trainable_bytes'] / 1e6:.2f} MB of them "
            "LoRA adapters; every step averages, there is no accumulation",
            f"goal: through the host, verified, within {100 * (GOAL - 1):.0f} % of plain DistributedDataParallel; seen "
            f"{100 * (seen - 1):+.1f} % of time, {verdict}, and {100 * (work - 1):+.1f} % of processor time; plain "
            f"against plain {100 * (noise - 1):+.1f} % and {100 * (rest - 1):+.1f} %",
        ]
    return notes


def _tables(rows: Sequence[dict[str, Any]]) -> str:
    averages = [
        [
            f"{show_bytes(row['bytes'])}",
            row["way"],
            Spread(**row["seconds"]).show(3, 1e3),
            Spread(**row["time_to_gloo"]).show(2) if row["way"] != _REFERENCE else "reference",
            str(row["wrong"]),
        ]
        for row in rows
        if row["part"] == "average"
    ]
    text = table(["size", "way", "ms (min .. max)", "time to gloo", "wrong"], averages)
    training = [
        [
            row["way"],
            str(row["ranks"]),
            Spread(**row["seconds"]).show_quartiles(1, 1e3),
            f"{row['tokens_per_second']['median']:,.0f}",
            Spread(**row["time_to_ddp"]).show_quartiles(3) if row["way"] != _DDP else "reference",
            Spread(**row["processor_time_to_ddp"]).show_quartiles(3) if row["way"] != _DDP else "reference",
            "-" if row["bytes_between_ranks_per_step"] is None else f"{row['bytes_between_ranks_per_step'] / 1e6:.2f}",
            "-" if row["wait_seconds_per_step"] is None else f"{1e3 * row['wait_seconds_per_step']:.1f}",
        ]
        for row in rows
        if row["part"] == "training"
    ]
    if not training:
        return text
    header = ["training", "ranks", "ms a step (q1 .. q3)", "tokens/s", "time to ddp (q1 .. q3)"]
    header += ["processor time to ddp", "MB between ranks", "ms waited"]
    return f"{text}\n\n{table(header, training)}"
