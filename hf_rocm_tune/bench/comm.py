"""``bench comm``: what it costs to average gradients, by way and size, and what that makes of a training.

Two processes on this machine measure together (`comm_ranks`). First, averages of one tensor: by the process group (RCCL
or NCCL where there are two cards, gloo) and through the host, verified and not, cast and not; each is compared with the
right one. Then a small Llama with LoRA adapters trains on one rank and on two, every way in turns in one run.

Not covered: several machines.
"""

from __future__ import annotations

import os
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from hf_rocm_tune.bench import report
from hf_rocm_tune.bench.report import Row, Spread, ratios, show_bytes, table
from hf_rocm_tune.errors import StallError
from hf_rocm_tune.machine.child import Task, run_together

SMALLEST = 1 << 10
GOAL = 1.05
"""Step time of verified averages through the host over plain ones that the project wants to stay below."""
_MODULE = "hf_rocm_tune.bench.comm_ranks"
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
        UsageError: the device is not there.
        StallError: a process died or did not come to its end.
    """
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


def _measure(devices: Sequence[str], wanted: Namespace, training: Row | None) -> dict[str, list[Row]]:
    threads = max(1, len(os.sched_getaffinity(0)) // _RANKS)
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", ignore_cleanup_errors=True) as folder:
        tasks = [
            Task(
                module=_MODULE,
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


def _average_rows(found: Sequence[Row]) -> list[Row]:
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


def _training_rows(found: Sequence[Row], size: dict[str, int]) -> list[Row]:
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


def _notes(device: torch.device, rows: Sequence[Row]) -> list[str]:
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


def _tables(rows: Sequence[Row]) -> str:
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
            Spread(**row["seconds"]).show(1, 1e3, quartiles=True),
            f"{row['tokens_per_second']['median']:,.0f}",
            Spread(**row["time_to_ddp"]).show(3, quartiles=True) if row["way"] != _DDP else "reference",
            Spread(**row["processor_time_to_ddp"]).show(3, quartiles=True) if row["way"] != _DDP else "reference",
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
