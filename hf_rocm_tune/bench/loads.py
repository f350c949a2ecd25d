"""``bench load``: a checkpoint in an 8B shape, loaded by stock ``from_pretrained`` and by ours, up to the end of the
first ``forward``.

Up to the ``forward``, because on a CPU stock loading returns views of the mapped file and the reading comes later. Each
load is a process of its own, so that one's peak memory is not the other's; the two sides alternate.

Not covered: reading from a network; several processes that load at once.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch

from hf_rocm_tune.bench import checkpoint, machine, pagecache, plots
from hf_rocm_tune.bench.figures import Spread, ratios, table
from hf_rocm_tune.bench.load_spec import SIDES, LoadSpec
from hf_rocm_tune.bench.result import Result, progress, publish
from hf_rocm_tune.errors import CorruptionError, OutOfMemoryError, SeamError, StallError, UsageError
from hf_rocm_tune.transfer import gb_per_s

CACHES = ("warm", "cold")
_CPU_DEFAULT_BYTES = 1.2e9
"""Without an accelerator a gigabyte is enough to see the rates, and done in a few minutes on two cores."""
_DEADLINE_SECONDS = 1800
_KILLED = -9


@dataclass(frozen=True, kw_only=True)
class LoadBench:
    """Settings of ``bench load``.

    Args:
        device: cpu, cuda, cuda:1; None for the first accelerator, else the CPU.
        scale: share of the 8B model's parameters; None for what the machine has room for.
        caches: states of the page cache: ``warm``, ``cold``.
        repeats: loads of each side and state.
        verify: what ours verifies: full, sample, off.
        load_in_4bit: NF4 by bitsandbytes, on both sides.
        directory: where the checkpoint is built and removed again; None for the system's temporary directory.
    """

    device: str | None = None
    scale: float | None = None
    caches: tuple[str, ...] = CACHES
    repeats: int = 3
    verify: str = "full"
    load_in_4bit: bool = False
    directory: Path | None = None

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise UsageError(f"--repeats is {self.repeats}; give a whole number from 1 on")
        if self.scale is not None:
            checkpoint.shape_for(self.scale)
        if self.directory is not None and not self.directory.is_dir():
            raise UsageError(f"--dir {self.directory} is no directory; give one with room for the checkpoint")


def run(bench: LoadBench, command: str, *, json_file: Path | None, plot: Path | None) -> None:
    """Builds the checkpoint, measures, prints, writes, and removes the checkpoint.

    Raises:
        UsageError: no room for the checkpoint, or a child refused its input.
        CorruptionError, OutOfMemoryError: a child ended so.
    """
    device = machine.choose_device(bench.device)
    directory = bench.directory or Path(tempfile.gettempdir())
    scale, why = _choose_scale(bench, device, directory)
    shape = checkpoint.shape_for(scale)
    _check_room(shape, directory)
    about = machine.describe(device)
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-", dir=directory) as folder:
        progress(f"building {_describe(shape)} in {directory} ({why})")
        files = checkpoint.write(shape, Path(folder))
        samples, left_out = _measure(bench, device, Path(folder), files)
    rows = _rows(samples, shape)
    result = Result(
        bench="load",
        command=command,
        machine=about,
        settings={**_settings(bench), "device": str(device), "scale": scale, "shape": _shape_settings(shape)},
        rows=rows,
        notes=[f"checkpoint: {_describe(shape)}, {why}", *_notes(bench, samples)],
        left_out=left_out,
    )
    if plot is not None:
        plots.loads(result, plot)
    publish(result, _table(rows), json_file)


Samples = dict[tuple[str, str], list[dict[str, Any]]]


def _measure(
    bench: LoadBench, device: torch.device, folder: Path, files: list[Path]
) -> tuple[Samples, list[dict[str, str]]]:
    """What the children say, by cache state and side; and the states that cannot be had here."""
    spec = LoadSpec(
        model=str(folder), side="", device=str(device), verify=bench.verify, load_in_4bit=bench.load_in_4bit
    )
    samples: Samples = {}
    left_out = []
    for cache in bench.caches:
        reason = pagecache.drop(files) if cache == "cold" else None
        if reason is not None:
            left_out.append({"what": "cold page cache", "reason": reason})
            continue
        samples.update({(cache, side): [] for side in SIDES})
        for repeat in range(bench.repeats):
            for side in SIDES if repeat % 2 == 0 else SIDES[::-1]:
                if cache == "cold":
                    pagecache.drop(files)
                else:
                    pagecache.warm(files)
                cached = pagecache.cached_share(files)
                progress(f"{cache} cache, {side}, {repeat + 1} of {bench.repeats}")
                answer = _child(replace(spec, side=side))
                samples[cache, side].append({**answer, "cached_share_before": cached})
    return samples, left_out


def _child(spec: LoadSpec) -> dict[str, Any]:
    """Run one load in a process of its own.

    Raises:
        TuneError: of the child's kind, with its message.
    """
    with tempfile.TemporaryDirectory(prefix="hf-rocm-tune-bench-") as scratch:
        asked, answered = Path(scratch) / "spec.json", Path(scratch) / "answer.json"
        asked.write_text(json.dumps(asdict(spec)), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "hf_rocm_tune.bench.load_child", str(asked), str(answered)],
                env={**os.environ, "HF_ROCM_TUNE_QUIET": "1"},
                stderr=subprocess.PIPE,
                text=True,
                timeout=_DEADLINE_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise StallError(f"a load ({spec.side}) has not ended in {_DEADLINE_SECONDS} s and was stopped") from error
        answer: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8")) if answered.exists() else {}
    if done.returncode:
        raise _child_error(spec.side, done.returncode, done.stderr, answer)
    return answer


def _child_error(side: str, code: int, stderr: str, answer: dict[str, Any]) -> Exception:
    """What a child's end means here."""
    kinds = {kind.exit_code: kind for kind in (SeamError, UsageError, CorruptionError, StallError, OutOfMemoryError)}
    if answer:
        return kinds[answer["exit_code"]](f"loading ({side}): {answer['error']}")
    if code == _KILLED:
        return OutOfMemoryError(f"loading ({side}) was killed, most likely for memory: give a smaller --scale")
    return RuntimeError(f"loading ({side}) ended with code {code}:\n{stderr[-4000:]}")


def _choose_scale(bench: LoadBench, device: torch.device, directory: Path) -> tuple[float, str]:
    """The scale, and why."""
    if bench.scale is not None:
        return bench.scale, "scale as given"
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(directory).free
    # A quarter of the memory: the file in the page cache, the model in memory, and room for everybody else.
    budget = min(memory / 4, disk / 2)
    limits = f"{memory / 1e9:.0f} GB of memory and {disk / 1e9:.0f} GB of disk are free"
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
        budget, limits = min(budget, 0.85 * room), f"{limits}, {room / 1e9:.0f} GB on the device"
    else:
        budget, limits = min(budget, _CPU_DEFAULT_BYTES), f"{limits}, at most 1.2 GB without an accelerator"
    return checkpoint.largest_scale(budget), f"chosen because {limits}"


def _check_room(shape: checkpoint.Shape, directory: Path) -> None:
    disk, memory = shutil.disk_usage(directory).free, psutil.virtual_memory().available
    if shape.nbytes * 1.05 > disk:
        raise UsageError(
            f"the checkpoint needs {shape.nbytes / 1e9:.1f} GB, {directory} has {disk / 1e9:.1f} GB free: "
            "give a smaller --scale, or --dir on another disk"
        )
    if shape.nbytes > memory:
        raise UsageError(
            f"the checkpoint has {shape.nbytes / 1e9:.1f} GB, {memory / 1e9:.1f} GB of memory are free: "
            "give a smaller --scale"
        )


def _rows(samples: Samples, shape: checkpoint.Shape) -> list[dict[str, Any]]:
    """One row for each cache state and side."""
    rows = []
    for (cache, side), taken in samples.items():
        seconds = [one["seconds_to_forward"] for one in taken]
        stock = [one["seconds_to_forward"] for one in samples[cache, "stock"]]
        rows.append(
            {
                "cache": cache,
                "side": side,
                "bytes": shape.nbytes,
                "seconds_load": Spread.of([one["seconds_load"] for one in taken]).to_dict(),
                "seconds_to_forward": Spread.of(seconds).to_dict(),
                "gb_per_s": Spread.of([gb_per_s(shape.nbytes, one) for one in seconds]).to_dict(),
                "seconds_to_stock": ratios(seconds, stock).to_dict(),
                "host_peak_anonymous": _added(taken, "anonymous"),
                "host_peak_resident": _added(taken, "resident"),
                "device_peak": max((one["device_peak"] for one in taken if one["device_peak"]), default=None),
                "verified_share": taken[0]["verified_share"],
                "cached_share_before": [one["cached_share_before"] for one in taken],
                "logits": sorted({one["logits"] for one in taken}),
            }
        )
    return rows


def _added(taken: list[dict[str, Any]], name: str) -> dict[str, int] | None:
    """The largest peak of one kind of host memory in bytes, with what the process had before it loaded."""
    pairs = [(one["host_peak"][name], one["host_before"][name]) for one in taken]
    if any(peak is None or before is None for peak, before in pairs):
        return None
    peak, before = max(pairs)
    return {"peak": peak, "before": before}


def _notes(bench: LoadBench, samples: Samples) -> list[str]:
    logits = {one["logits"] for taken in samples.values() for one in taken}
    same = "the first forward gave the same bits on both sides and in every repeat"
    other = (
        "the first forward did NOT give the same bits everywhere (on a CPU with AVX512-BF16, stock 4-bit layers repack "
        "their weights in it, which ours forbids)"
        if bench.load_in_4bit
        else "the first forward did NOT give the same bits everywhere"
    )
    return [
        "GB/s are bytes of the checkpoint over the seconds to the end of the first forward; host peaks are without "
        "what the process had before it loaded; mapped files count as resident (RSS), not as anonymous memory",
        same if len(logits) == 1 else other,
    ]


def _settings(bench: LoadBench) -> dict[str, Any]:
    return {**asdict(bench), "caches": list(bench.caches), "directory": bench.directory and str(bench.directory)}


def _shape_settings(shape: checkpoint.Shape) -> dict[str, int]:
    return {**asdict(shape), "parameters": shape.parameters, "bytes": shape.nbytes, "shards": checkpoint.SHARDS}


def _describe(shape: checkpoint.Shape) -> str:
    return (
        f"a Llama of {shape.parameters / 1e9:.3f} B parameters ({shape.nbytes / 1e9:.2f} GB in bfloat16, hidden "
        f"{shape.hidden}, {shape.layers} layers, {checkpoint.SHARDS} shards)"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    header = [
        "cache",
        "side",
        "s to first forward",
        "s load",
        "GB/s",
        "time to stock",
        "anon MB",
        "RSS MB",
        "device MB",
    ]
    lines = []
    for row in rows:
        spreads = [Spread(**row[name]) for name in ("seconds_to_forward", "seconds_load", "gb_per_s")]
        ratio = Spread(**row["seconds_to_stock"]).show(2) if row["side"] != "stock" else "reference"
        memory = [_megabytes(row[name]) for name in ("host_peak_anonymous", "host_peak_resident")]
        device = "-" if row["device_peak"] is None else f"{row['device_peak'] / 1e6:.0f}"
        lines.append([row["cache"], row["side"], *(spread.show(2) for spread in spreads), ratio, *memory, device])
    return table(header, lines)


def _megabytes(memory: dict[str, int] | None) -> str:
    return "-" if memory is None else f"{(memory['peak'] - memory['before']) / 1e6:.0f}"
